import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from atlas_fl.data.task import Source, Task, TaskData
from atlas_fl.data.user_files import parse_tasks
from atlas_fl.errors import ConfigError, DataError

NOWHERE = Source(cache_dir=Path("/nowhere"))


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loaded(task: Task) -> TaskData:
    return task.load(NOWHERE)


def labels(task: Task) -> list[int]:
    data = loaded(task)
    return sorted(np.concatenate([data.train.label, data.validation.label, data.test.label]).tolist())


def test_words_become_classes_in_sorted_order(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("text,label\n" + "".join(f"word {i},{('no', 'yes', 'maybe')[i % 3]}\n" for i in range(43)))
    task = parse_tasks(f"mine={path}")[0]
    assert (task.name, task.num_labels, task.metric, task.label_names) == (
        "mine",
        3,
        "accuracy",
        ("maybe", "no", "yes"),
    )
    data = loaded(task)
    assert [len(rows) for rows in (data.train, data.validation, data.test)] == [20, 10, 13]
    for text, label in zip(data.train.text, data.train.label):
        assert task.label_names[label] == ("no", "yes", "maybe")[int(text.split()[1]) % 3]
    assert data.train.label.dtype == np.int64


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([2, 10, -1], ("-1", "2", "10")),
        ([True, False, True], ("False", "True")),
        (["2", "1", "01"], ("01", "1", "2")),
        (["1.0", "1", "2."], ("1", "2")),
        ([1.0, 1, "1.0", "0"], ("0", "1")),
        (["1.5", "1.0", "-3.0"], ("-3", "1", "1.5")),
    ],
)
def test_whole_numbers_are_sorted_as_numbers(values: list[object], names: tuple[str, ...], tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"text": f"t{i}", "label": values[i % len(values)]} for i in range(30)])
    assert parse_tasks(f"mine={path}")[0].label_names == names


def test_a_number_is_the_same_class_in_every_kind_of_file(tmp_path: Path) -> None:
    values = [(0, 1, 2)[i % 3] for i in range(30)]
    table = pd.DataFrame({"text": [f"t{i}" for i in range(30)], "label": [float(value) for value in values]})
    table.to_csv(tmp_path / "floats.csv", index=False)
    table.to_parquet(tmp_path / "floats.parquet")
    table.assign(label=values).to_csv(tmp_path / "integers.tsv", index=False, sep="\t")
    table.to_json(tmp_path / "floats.jsonl", orient="records", lines=True)
    for path in tmp_path.iterdir():
        assert parse_tasks(f"mine={path}")[0].label_names == ("0", "1", "2"), path.name


@pytest.mark.parametrize("name", ["validation", "dev", "Val"])
def test_a_split_is_known_by_the_names_that_people_give_it(name: str, tmp_path: Path) -> None:
    for split, count in (("train", 8), (name, 4), ("test", 6)):
        write(tmp_path / f"{split}.jsonl", [{"text": f"{split} {i}", "label": "ab"[i % 2]} for i in range(count)])
    data = loaded(parse_tasks(f"mine={tmp_path}")[0])
    assert data.validation.text == tuple(f"{name} {i}" for i in range(4))
    assert data.notes == ()
    write(tmp_path / "validation-0.jsonl", [{"text": "more", "label": "a"}])
    write(tmp_path / "extra.jsonl", [{"text": "more", "label": "a"}])
    data = loaded(parse_tasks(f"mine={tmp_path}")[0])
    unread = f"{tmp_path / 'extra.jsonl'}, {tmp_path / 'validation-0.jsonl'}"
    assert data.notes == (f"2 files are left out, whose names are of no split: {unread}",)
    (tmp_path / "validation.csv").write_text("text,label\nmore,a\n")
    if name != "validation":
        with pytest.raises(DataError, match="holds the validation split more than once"):
            parse_tasks(f"mine={tmp_path}")


@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_classes_of_datasets_have_their_names(kind: str, tmp_path: Path) -> None:
    import datasets

    label = datasets.ClassLabel(names=["spam", "ham", "unused"])
    features = datasets.Features({"text": datasets.Value("string"), "label": label})
    rows = {
        split: datasets.Dataset.from_dict(
            {"text": [f"{split} {i}" for i in range(8)], "label": [i % 2 for i in range(8)]}, features=features
        )
        for split in ("train", "test")
    }
    if kind == "saved":
        datasets.DatasetDict(rows).save_to_disk(str(tmp_path / "t"))
    else:
        (tmp_path / "t").mkdir()
        for split, table in rows.items():
            table.to_parquet(tmp_path / "t" / f"{split}.parquet")
    task = parse_tasks(f"mine={tmp_path / 't'}")[0]
    assert task.label_names == ("ham", "spam")
    test = loaded(task).test
    assert [task.label_names[label] for label in test.label] == [
        "spam" if text[-1] in "0246" else "ham" for text in test.text
    ]


def test_a_row_without_a_class_is_named(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = datasets.Dataset.from_dict({"text": ["x", "y"], "label": [0, -1]}, features=features)
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path))
    with pytest.raises(
        DataError, match=r"train of .* has 1 problem: no value in 'label' in row 2; mend .*missing=skip"
    ):
        parse_tasks(f"mine={tmp_path}")


def test_columns_pair_and_metric_are_options(tmp_path: Path) -> None:
    rows = [{"q": f"question {i}", "a": f"answer {i}", "ok": i % 2} for i in range(20)]
    task = parse_tasks(f"my-pairs_2={write(tmp_path / 't.jsonl', rows)},text=q,pair=a,label=ok,metric=f1")[0]
    assert task.metric == "f1"
    for text, pair in zip(loaded(task).train.text, loaded(task).train.pair or ()):
        assert text.split()[1] == pair.split()[1]


@pytest.mark.parametrize(
    ("metric", "name", "positive"),
    [
        ("f1", "f1 of b", None),
        ("f1:a", "f1 of a", 0),
        ("auroc", "AUROC", None),
        ("balanced_accuracy", "balanced accuracy", None),
    ],
)
def test_a_metric_is_named_with_its_class(tmp_path: Path, metric: str, name: str, positive: int | None) -> None:
    path = write(tmp_path / "t.jsonl", [{"text": f"t{i}", "label": "ab"[i % 2]} for i in range(20)])
    task = parse_tasks(f"mine={path},metric={metric}")[0]
    assert (task.metric_name, task.positive) == (name, positive)
    with pytest.raises(DataError, match=r"metric=f1:c names no class of .*; it has 'a', 'b'"):
        parse_tasks(f"mine={path},metric=f1:c")


def test_pearson_makes_a_regression(tmp_path: Path) -> None:
    rows = [{"text": f"t{i}", "label": i / 8} for i in range(20)]
    task = parse_tasks(f"mine={write(tmp_path / 't.jsonl', rows)},metric=pearson")[0]
    assert task.num_labels == 1
    assert task.is_regression
    assert task.label_names == ()
    assert loaded(task).train.label.dtype == np.float32
    assert labels(task) == [i / 8 for i in range(20)]


def test_a_comma_in_the_path_is_part_of_the_path(tmp_path: Path) -> None:
    path = write(tmp_path / "a,b.jsonl", [{"text": f"t{i}", "y": i % 2} for i in range(10)])
    assert parse_tasks(f"mine={path},label=y")[0].num_labels == 2


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("mine", r"task 'mine' is not of the form name=path\[,text=COLUMN\]"),
        ("mine=", "is not of the form"),
        ("a/b=t.csv", "a name is letters, digits"),
        ("mine=t.csv,lable=x", "unknown task option 'lable'; did you mean 'label'"),
        (
            "mine=t.csv,metric=auc",
            "unknown metric 'auc'; .*known: accuracy, auroc, balanced_accuracy, f1, macro_f1, mcc",
        ),
        ("mine=t.csv,metric=f1:", "has metric=f1:; a class stands behind f1 alone, as in metric=f1:yes"),
        ("mine=t.csv,metric=mcc:yes", "has metric=mcc:yes; a class stands behind f1 alone, as in metric=f1:yes"),
        ("mine=t.csv,text=", "gives an option twice or without a value"),
    ],
)
def test_a_wrong_description_is_a_config_error(description: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_tasks(description)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "a", "label": 0}], ",text=body", r"has no column 'body'; it has 'text', 'label'"),
        (
            [{"text": f"t{i}", "label": "x"} for i in range(9)],
            "",
            r"column 'label' of .* has 1 different values in 9 rows, such as 'x'; allowed: two",
        ),
        (
            [{"text": f"t{i}", "label": i} for i in range(9)],
            "",
            "has 9 different values in 9 rows, such as '0'; allowed: two classes or more",
        ),
        ([{"text": f"t{i}", "label": i % 2} for i in range(4)], "", "task 'mine' has no validation rows"),
        ([{"text": "same", "label": i % 2} for i in range(9)], "", "task 'mine' has no train and no validation and no"),
        (
            [{"text": "a", "label": 10**400}],
            ",metric=pearson",
            "such as 0.5 that float32 holds in 'label' .1000",
        ),
        (
            [{"text": "a", "label": "high"}],
            ",metric=pearson",
            "that float32 holds in 'label' .'high'. in row 1;",
        ),
        (
            [{"text": f"t{i}", "label": 1.5} for i in range(9)],
            ",metric=pearson",
            "training rows of task 'mine' have one",
        ),
        (
            [{"text": f"t{i}", "label": "nan" if i == 6 else "ab"[i % 2]} for i in range(9)],
            "",
            "no value in 'label' .'nan'. in row 7; mend the file, or add missing=skip",
        ),
        (
            [{"text": f"t{i}", "label": "7" * 5000} for i in range(9)],
            "",
            "has 1 different values in 9 rows, such as a number of",
        ),
        ([{"text": "a", "label": None}], "", "no value in 'label' in row 1; mend"),
    ],
)
def test_wrong_data_is_a_data_error(rows: list[dict[str, object]], options: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        parse_tasks(f"mine={write(tmp_path / 't.jsonl', rows)}{options}")


def test_a_folder_without_train_is_refused(tmp_path: Path) -> None:
    told = r"name a file train\.csv or train\.tsv or .*, or for images give a folder of them for each class, or such"
    with pytest.raises(DataError, match=told):
        parse_tasks(f"mine={tmp_path}")
    write(tmp_path / "test.jsonl", [{"text": "a", "label": 0}])
    with pytest.raises(DataError, match=r"has no train split; name a file train\.csv"):
        parse_tasks(f"mine={tmp_path}")


def test_an_empty_split_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"text": f"t{i}", "label": i % 2} for i in range(9)])
    (tmp_path / "validation.jsonl").write_text("")
    with pytest.raises(DataError, match=r"validation\.jsonl is empty"):
        parse_tasks(f"mine={tmp_path}")


def test_a_regression_of_which_every_row_contradicts_another_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"text": "the same words", "label": row + 0.5} for row in range(40)])
    with pytest.raises(DataError, match=r"has no train and no validation and no test rows \(0 distinct rows in all\)"):
        loaded(parse_tasks(f"mine={path},metric=pearson")[0])
