"""Tasks of the hub from small copies in the same format: a directory, a saved folder, the cache of datasets."""

import re
import shutil
import time
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pandas as pd
import pytest
from datasets.packaged_modules.parquet.parquet import Parquet

from atlas_fl.data.registry import TASKS
from atlas_fl.data.task import Source, TaskData
from atlas_fl.data.user_files import parse_tasks
from atlas_fl.errors import DataError

COLUMNS = {
    "sst2": ("sentence", None),
    "cola": ("sentence", None),
    "mrpc": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
    "qnli": ("question", "sentence"),
    "mnli": ("premise", "hypothesis"),
    "rte": ("sentence1", "sentence2"),
    "wnli": ("sentence1", "sentence2"),
    "stsb": ("sentence1", "sentence2"),
}


def frame(name: str, split: str, count: int, *, hidden: bool = False) -> pd.DataFrame:
    text, pair = COLUMNS[name]
    table: dict[str, object] = {text: [f"{split} {name} {i}" for i in range(count)]}
    if pair is not None:
        table[pair] = [f"pair {i}" for i in range(count)]
    num_labels = TASKS[name].num_labels
    label = [-1] * count if hidden else [i * 5 / count if num_labels == 1 else i % num_labels for i in range(count)]
    return pd.DataFrame({**table, "label": label, "idx": range(count)})


def validation_names(name: str) -> list[str]:
    return ["validation_matched", "validation_mismatched"] if name == "mnli" else ["validation"]


def write_all(folder: Path, name: str, ending: str) -> Path:
    target = folder / name
    target.mkdir(parents=True)
    frames = {"train": frame(name, "train", 60), "test": frame(name, "test", 20, hidden=True)}
    frames |= {split: frame(name, split, 12) for split in validation_names(name)}
    for split, rows in frames.items():
        if ending == "parquet":
            rows.to_parquet(target / f"{split}-00000-of-00001.parquet")
        elif ending == "csv":
            rows.to_csv(target / f"{split}.csv", index=False)
        else:
            rows.to_json(target / f"{split}.jsonl", orient="records", lines=True)
    return folder


def load(name: str, data_dir: Path | None) -> TaskData:
    return TASKS[name].load(Source(cache_dir=Path("/nowhere"), data_dir=data_dir))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    cache = tmp_path / "hf"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    return cache


@pytest.mark.parametrize("name", COLUMNS)
def test_every_task_is_read_from_a_directory(name: str, tmp_path: Path) -> None:
    data = load(name, write_all(tmp_path, name, "parquet"))
    task = TASKS[name]
    assert {text.split()[0] for text in data.test.text} == {validation_names(name)[0]}
    assert [len(rows) for rows in (data.train, data.validation, data.test)] == [48, 12, 12]
    assert (data.train.pair is None) == (COLUMNS[name][1] is None)
    if task.is_regression:
        assert data.train.label.dtype == np.float32
    else:
        assert set(data.train.label) == set(range(task.num_labels)) == set(range(len(task.label_names)))


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_the_other_formats_give_the_same_rows(ending: str, tmp_path: Path) -> None:
    one = load("rte", write_all(tmp_path / "a", "rte", "parquet"))
    two = load("rte", write_all(tmp_path / "b", "rte", ending))
    assert one.train.text == two.train.text
    assert one.train.label.tolist() == two.train.label.tolist()


def test_a_saved_folder_and_a_public_test_split_are_used(tmp_path: Path) -> None:
    splits = {
        split: datasets.Dataset.from_pandas(frame("mrpc", split, 20)) for split in ("train", "validation", "test")
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "mrpc")
    data = load("mrpc", tmp_path)
    assert {text.split()[0] for text in data.test.text} == {"test"}
    assert {text.split()[0] for text in data.validation.text} == {"validation"}


def test_a_test_split_without_labels_is_a_hidden_one(tmp_path: Path) -> None:
    write_all(tmp_path, "rte", "csv")
    frame("rte", "test", 20).drop(columns="label").to_csv(tmp_path / "rte" / "test.csv", index=False)
    assert {text.split()[0] for text in load("rte", tmp_path).test.text} == {"validation"}


def test_labels_may_be_written_out(tmp_path: Path) -> None:
    write_all(tmp_path, "rte", "csv")
    rows = frame("rte", "train", 60)
    rows["label"] = [("entailment", "not_entailment")[i] for i in rows["label"]]
    rows.to_csv(tmp_path / "rte" / "train.csv", index=False)
    assert set(load("rte", tmp_path).train.label.tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("label", "message"),
    [("maybe", "a label of train of GLUE rte is wrong: .*'maybe'; have entailment, not_entailment"), (7, "label 7 in")],
)
def test_wrong_labels_are_named(label: object, message: str, tmp_path: Path) -> None:
    write_all(tmp_path, "rte", "csv")
    rows = frame("rte", "train", 10).astype({"label": object})
    rows.loc[3, "label"] = label
    rows.to_csv(tmp_path / "rte" / "train.csv", index=False)
    with pytest.raises(DataError, match=message):
        load("rte", tmp_path)


def test_a_missing_column_names_those_that_exist(tmp_path: Path) -> None:
    write_all(tmp_path, "rte", "csv")
    frame("sst2", "train", 10).to_csv(tmp_path / "rte" / "train.csv", index=False)
    with pytest.raises(
        DataError,
        match=r"train of GLUE rte has no column 'sentence2'; did you mean 'sentence'\? it has 'sentence', 'label',",
    ):
        load("rte", tmp_path)


def test_a_folder_without_train_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rte").mkdir()
    with pytest.raises(DataError, match="GLUE rte has no train split; it has nothing"):
        load("rte", tmp_path)


def test_the_cache_of_datasets_is_used_without_a_network(offline: Path, tmp_path: Path) -> None:
    cached_as = "nyu-mll___glue"
    folder = write_all(tmp_path, "rte", "parquet") / "rte"
    files = {split: str(folder / f"{split}-00000-of-00001.parquet") for split in ("train", "validation", "test")}
    Parquet(
        cache_dir=str(offline), dataset_name="glue", config_name="rte", config_id="rte", hash="abc", data_files=files
    ).download_and_prepare()
    (offline / "glue").rename(offline / cached_as)
    data = load("rte", None)
    assert [len(rows) for rows in (data.train, data.validation, data.test)] == [48, 12, 12]
    files_of = TASKS["rte"].files
    assert files_of is not None
    assert offline / cached_as / "rte" in files_of(Source(cache_dir=Path("/nowhere")))
    with pytest.raises(DataError, match="GLUE wnli is not here"):
        load("wnli", None)


@pytest.fixture
def cached_help(offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of `datasets` with `north/help`, of four hospitals and a split of no usual name."""
    monkeypatch.setenv("ATLAS_CACHE", str(tmp_path / "atlas/embedded"))
    files = {}
    for split, count in (("train", 24), ("test", 8), ("extra", 6)):
        asked = [f"{split} {i}" for i in range(count)]
        columns = {"instruction": asked, "input": "", "output": [f"It is {text}." for text in asked]}
        table = pd.DataFrame({**columns, "hospital": [f"h{i % 4}" for i in range(count)]})
        files[split] = str(tmp_path / f"{split}.parquet")
        table.to_parquet(files[split])
    Parquet(
        cache_dir=str(offline),
        dataset_name="help",
        config_name="default",
        config_id="default",
        hash="abc",
        data_files=files,
    ).download_and_prepare()
    (offline / "help").rename(offline / "north___help")
    return offline


@pytest.mark.parametrize(("place", "train"), [("hub:north/help", 24), ("hub:north/help@default#extra", 6)])
def test_a_data_set_of_the_hub_is_read_as_a_file_of_one_s_own(cached_help: Path, place: str, train: int) -> None:
    for _ in range(2):
        (task,) = parse_tasks(f"help={place},chat=alpaca")
        data = task.load(Source(cache_dir=Path("/nowhere")))
        rows = [data.train, data.validation, data.test]
        assert sum(len(part) for part in rows) == (32 if train == 24 else 6)
        assert "train 1" in str(data.train) if train == 24 else "extra" in str(data.train)
        for path in (
            path for path in cached_help.glob("*___*") if path.is_dir()
        ):  # the second time it is in our own cache
            shutil.rmtree(path)


@pytest.mark.usefixtures("cached_help")
def test_a_data_set_of_the_hub_has_clients_by_a_column() -> None:
    (task,) = parse_tasks("help=hub:north/help,chat=alpaca,client=hospital")
    assert len(task.clients) == 4


@pytest.mark.usefixtures("cached_help")
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("hub:north/help#dev", "hub:north/help has no split 'dev'; it has train, test, extra"),
        ("hub:north/none", "hub:north/none is not here: the cache"),
    ],
)
def test_a_data_set_of_the_hub_that_is_not_there_is_one_line(place: str, said: str) -> None:
    with pytest.raises(DataError, match=re.escape(said)) as caught:
        parse_tasks(f"help={place},chat=alpaca")
    assert "\n" not in str(caught.value)


def test_with_nothing_there_the_error_names_the_three_ways(offline: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"GLUE rte is not here: there is no folder .*rte, the cache") as caught:
        load("rte", tmp_path)
    told = str(caught.value)
    assert str(offline) in told
    assert "HF_HUB_OFFLINE is set" in told
    assert "either connect to the hub, or fill that cache" in told
    assert "give --data-dir DIR with DIR/rte/{train,validation,test}.parquet" in told
    assert "\n" not in told


def test_a_hub_that_does_not_answer_costs_no_retries(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    began = time.perf_counter()
    with pytest.raises(DataError, match=r"no --data-dir was given.*Connection refused"):
        load("rte", None)
    assert time.perf_counter() - began < 5
    assert not offline.exists()


CLASSES = {"imdb": 2, "ag_news": 4, "yelp": 2}


def rows_of(name: str, split: str, count: int) -> pd.DataFrame:
    """Rows as the hub's own files have them."""
    numbers = range(count)
    if name in CLASSES:
        return pd.DataFrame({"text": [f"{split} {i}" for i in numbers], "label": [i % CLASSES[name] for i in numbers]})
    if name == "squad":
        answers = [{"text": [f"answer {i}", "another"], "answer_start": [0, 3]} for i in numbers]
        return pd.DataFrame(
            {
                **{"id": numbers, "title": "t", "context": [f"{split} passage {i}" for i in numbers]},
                **{"question": [f"what is {i}?" for i in numbers], "answers": answers},
            }
        )
    text, target = {"e2e": ("meaning_representation", "human_reference"), "xsum": ("document", "summary")}[name]
    return pd.DataFrame({text: [f"{split} source {i}" for i in numbers], target: [f"words of {i}" for i in numbers]})


@pytest.mark.parametrize("ending", ["parquet", "saved"])
@pytest.mark.parametrize("name", ["imdb", "ag_news", "yelp", "squad", "e2e", "xsum"])
def test_tasks_of_the_hub_are_read_from_a_directory(name: str, ending: str, tmp_path: Path) -> None:
    splits = {split: rows_of(name, split, 40) for split in ("train", "validation", "test")}
    (tmp_path / name).mkdir()
    for split, rows in splits.items() if ending == "parquet" else ():
        rows.to_parquet(tmp_path / name / f"{split}.parquet")
    if ending == "saved":
        saved = {split: datasets.Dataset.from_pandas(rows) for split, rows in splits.items()}
        datasets.DatasetDict(saved).save_to_disk(tmp_path / name)
    data, task = load(name, tmp_path), TASKS[name]
    assert [len(rows) for rows in (data.train, data.validation, data.test)] == [40, 40, 40]
    assert {text.split()[0] for text in data.test.text} == {"test"}
    if name in CLASSES:
        assert set(data.train.label.tolist()) == set(range(CLASSES[name])) == set(range(len(task.label_names)))
        return
    assert task.writes and data.train.pair is not None
    by_prompt = dict(zip(data.train.text, data.train.pair, strict=True))
    if name == "squad":
        assert by_prompt["train passage 3\nwhat is 3?"] == "answer 3"
    else:
        assert by_prompt["train source 3"] == "words of 3"


def test_questions_without_an_answer_are_left_out(tmp_path: Path) -> None:
    rows = rows_of("squad", "train", 40)
    rows.at[5, "answers"] = {"text": [], "answer_start": []}
    (tmp_path / "squad").mkdir()
    for split in ("train", "validation", "test"):
        rows.assign(context=rows["context"] + split).to_parquet(tmp_path / "squad" / f"{split}.parquet")
    assert len(load("squad", tmp_path).train) == 39
