"""Clients that the data name: by a column, a file or a folder; splits by a column, by time, by groups."""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from atlas_fl.config import Config, validate, with_values
from atlas_fl.data.clients import (
    ClientData,
    client_names,
    data_notes,
    make_clients,
    site_client,
    site_of,
    task_of_client,
)
from atlas_fl.data.own_clients import cut_groups, name_clients
from atlas_fl.data.registry import find_tasks
from atlas_fl.data.task import Rows, Source
from atlas_fl.data.user_files import with_labels
from atlas_fl.deployment.settings_policy import with_classes_of
from atlas_fl.errors import ConfigError, DataError

NOWHERE = Source(cache_dir=Path("/nowhere"))
Row = Mapping[str, object]
Write = Callable[..., Path]


def triage(hospital: str, count: int, classes: str = "abc", **more: object) -> list[Row]:
    return [
        {"text": f"note {n} of {hospital}", "label": classes[n % len(classes)], "hospital": hospital, "n": n, **more}
        for n in range(count)
    ]


def write(path: Path, rows: Sequence[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


def clients_of(*descriptions: str, samples: int | None = None, **more: object) -> tuple[ClientData, ...]:
    sizes = {"samples": samples, "validation_samples": None, "test_samples": None, "partition": "iid", "seed": 1}
    usual = {**sizes, "clients_per_task": 3, "dirichlet_alpha": 0.5, "shuffle_labels": False}
    return make_clients(find_tasks((), descriptions), NOWHERE, **{**usual, **more})  # type: ignore[arg-type]


def texts(rows: object) -> tuple[str, ...]:
    assert isinstance(rows, Rows)
    return rows.text


def test_a_column_names_the_clients_and_all_rows_are_theirs(tmp_path: Path) -> None:
    """Of 43 rows 20 train, 10 validate, 13 test; each client's own, in its own mix."""
    rows = [*triage("St. Mary's", 43), *triage("north", 86, "ab"), *triage("10", 43), *triage("9", 43)]
    path = write(tmp_path / "notes.csv", [rows[index] for index in np.random.default_rng(0).permutation(len(rows))])
    clients = clients_of(f"triage={path},client=hospital")
    assert [(client.name, client.source, client.number) for client in clients] == [
        ("hospital-9", "triage", 0),
        ("hospital-10", "triage", 1),
        ("St.-Mary-s", "triage", 2),
        ("north", "triage", 3),
    ]
    assert [tuple(map(len, client.splits.values())) for client in clients] == [(20, 10, 13)] * 3 + [(40, 20, 26)]
    words = ("9", "10", "St. Mary's", "north")
    for client, word in zip(clients, words, strict=True):
        assert all(text.endswith(f" of {word}") for rows in client.splits.values() for text in texts(rows))
    assert clients[3].task.label_names == ("a", "b", "c")
    assert 2 not in clients[3].train.label
    (note,) = data_notes(clients)
    assert "names of clients: '9' is hospital-9, '10' is hospital-10, \"St. Mary's\" is St.-Mary-s" in note


def test_a_file_or_a_folder_is_a_client_and_keeps_its_splits(tmp_path: Path) -> None:
    for name in ("north", "south"):
        write(tmp_path / f"files/{name}.csv", triage(name, 43))
        for split in ("train", "val", "test"):
            write(tmp_path / f"folders/{name}/{split}.csv", triage(f"{name}-{split}", 6))
    for given in (f"{tmp_path}/files", f"{tmp_path}/files/*.csv"):
        clients = clients_of(f"triage={given},client=file")
        assert [(client.name, len(client.train)) for client in clients] == [("north", 20), ("south", 20)]
    for client in clients_of(f"triage={tmp_path}/folders,client=file"):
        assert [len(rows) for rows in client.splits.values()] == [6, 6, 6]
        assert all("-val" in text for text in texts(client.validation))


def test_a_split_column_is_kept_and_time_tests_on_the_latest(tmp_path: Path) -> None:
    kept = [{**row, "part": ("train", "train", "dev", "Test")[index % 4]} for index, row in enumerate(triage("a", 40))]
    (client,) = clients_of(f"t={write(tmp_path / 'kept.csv', kept)},client=hospital,split=part")
    assert [len(rows) for rows in client.splits.values()] == [20, 10, 10]
    dates = [{**row, "when": f"2026-{1 + n // 28:02}-{1 + n % 28:02}"} for n, row in enumerate(triage("a", 43))]
    path = write(tmp_path / "dates.csv", dates[::-1])
    for order in ("when", "n"):
        (client,) = clients_of(f"t={path},client=hospital,order={order}")
        numbers = [[int(text.split()[1]) for text in texts(rows)] for rows in client.splits.values()]
        assert numbers == [list(range(20)), list(range(20, 30)), list(range(30, 43))]


def test_rows_of_one_group_stay_in_one_split(tmp_path: Path) -> None:
    rows = [{**row, "patient": index // 4} for index, row in enumerate(triage("a", 172))]
    path = write(tmp_path / "g.csv", rows)
    (client,) = clients_of(f"t={path},client=hospital,group=patient")
    patients = [{int(text.split()[1]) // 4 for text in texts(part)} for part in client.splits.values()]
    assert [len(part) for part in client.splits.values()] == [80, 40, 52]
    assert sum(map(len, patients)) == len(set.union(*patients)) == 43


def test_groups_go_by_their_earliest_row_and_a_large_one_where_its_middle_is() -> None:
    """The patients 0, 1, 2 begin at times 5, 1, 3; 1 has the first five of ten rows, 2 the next two, 0 the last."""
    groups = [0, 1, 1, 2, 1, 1, 1, 2, 0, 0]
    cut = cut_groups(groups, np.asarray([5.0, 1, 1, 3, 1, 1, 1, 3, 5, 6]), name="t")
    assert {split: rows.tolist() for split, rows in cut.items()} == {
        "train": [1, 2, 4, 5, 6],
        "validation": [3, 7],
        "test": [0, 8, 9],
    }


def test_small_clients_are_left_out_and_limits_are_at_most_with_notes(tmp_path: Path) -> None:
    rows = [*triage("large", 86), *triage("small", 43), *triage("tiny", 3)]
    path = write(tmp_path / "t.csv", rows)
    clients = clients_of(f"t={path},client=hospital,least=10", samples=30)
    assert [(client.name, len(client.train)) for client in clients] == [("large", 30), ("small", 20)]
    assert data_notes(clients) == (
        "t: left out since they have fewer than 10 examples: 1 of 3 clients, tiny (3)",
        "t: 1 of 2 clients have more than 30 train examples, and this many of them are taken; --samples none takes all",
    )
    again = clients_of(f"t={path},client=hospital,least=10", samples=30, secrets={"large": b"x" * 32})
    assert again[1].digest() == clients[1].digest()
    assert again[0].digest() != clients[0].digest()
    (alone,) = find_tasks((), (f"t={write(tmp_path / 'alone.csv', triage('large', 86))},labels=a|b|c",))
    sizes = {"train": 30, "validation": None, "test": None}
    at_site = site_client(alone, NOWHERE, sizes, name="large", secret=b"x" * 32, shuffle_labels=False)
    assert at_site.digest() == again[0].digest()


def test_rows_that_were_left_out_are_those_of_all_clients(tmp_path: Path) -> None:
    rows = [*triage("a", 46), *triage("a", 46)[:1], *triage("b", 46), *triage("b", 46)[:2]]
    (note,) = data_notes(clients_of(f"t={write(tmp_path / 't.csv', rows)},client=hospital"))
    assert note.startswith("t: rows left out: 3, which repeat or contradict others")


def test_texts_of_two_clients_are_told(tmp_path: Path) -> None:
    rows = triage("a", 43)
    both = write(tmp_path / "t.csv", [*rows, *({**row, "hospital": "b"} for row in rows)])
    split = write(tmp_path / "s.csv", [{**row, "hospital": "ab"[n % 2]} for n, row in enumerate(triage("x", 86))])
    assert data_notes(clients_of(f"t={both},client=hospital")) == ()  # a text falls into one split at both
    swapped = [{**row, "part": "train" if n % 2 else "test"} for n, row in enumerate(rows)]
    other = [{**row, "hospital": "b", "part": "test" if row["part"] == "train" else "train"} for row in swapped]
    path = write(tmp_path / "u.csv", [*swapped, *other])
    (note,) = data_notes(clients_of(f"t={path},client=hospital,split=part"))
    assert note.startswith("t: 35 test texts of a client are training texts of another one")
    assert data_notes(clients_of(f"t={split},client=hospital")) == ()


def test_declared_classes_keep_their_order_and_one_may_be_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", triage("a", 43, "ab"))
    (task,) = find_tasks((), (with_labels(f"t={path}", ["b", "x|,y=%", "a"]),))
    assert (task.label_names, task.num_labels) == (("b", "x|,y=%", "a"), 3)
    assert set(task.load(NOWHERE).train.label.tolist()) == {0, 2}
    (only,) = find_tasks((), (f"t={write(tmp_path / 'one.csv', triage('a', 43, 'a'))},labels=a|b",))
    assert set(only.load(NOWHERE).train.label.tolist()) == {0}
    assert [set(client.train.label) for client in clients_of(f"t={tmp_path / 'one.csv'},labels=a|b")] == [{0}] * 3
    (named,) = find_tasks((), ("t,labels=low|high",))
    assert named.label_names == ("low", "high")
    with pytest.raises(
        ConfigError, match="task 't' names classes and no file, which is for `atlas serve`; give it a file"
    ):
        named.load(NOWHERE)


def test_names_are_safe_and_of_one_client_each() -> None:
    assert name_clients(["Nord", "nord", "a/b", "北", "../x", "3"], prefix="site") == (
        *("Nord", "nord-2", "a-b", "site-3", "x", "site-3-2"),
    )


def test_two_tasks_with_one_name_put_theirs_before_it(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [*triage("a", 43), *triage("b", 43)])
    tasks = find_tasks((), (f"one={path},client=hospital", f"two={path},client=hospital", f"three={path}"))
    assert client_names(tasks, 1) == (("one-a", "one-b"), ("two-a", "two-b"), ("three-0",))
    sizes = {"train": None, "validation": None, "test": None}
    at_site = site_client(tasks[1], NOWHERE, sizes, name="two-b", secret=b"x" * 32, shuffle_labels=False)
    assert (at_site.name, {text[-1] for text in texts(at_site.test)}) == ("two-b", {"b"})


def kinds(hospital: str, **classes: str) -> list[Row]:
    """43 rows of each task, of these classes, in turn."""
    rows = [[{**row, "kind": kind} for row in triage(hospital, 43, own)] for kind, own in classes.items()]
    return [{**row, "text": f"{row['kind']} {row['text']}"} for of_both in zip(*rows, strict=True) for row in of_both]


def test_a_column_of_tasks_makes_one_task_of_each_and_one_client_a_hospital_of_it(tmp_path: Path) -> None:
    few = [{**row, "text": f"few {row['n']}", "kind": "topic"} for row in triage("south", 3, "x")]
    mary = kinds("St. Mary's", triage="ab", topic="xyz")
    path = write(
        tmp_path / "t.csv", [*mary, *kinds("north", triage="bc", topic="xy"), *kinds("south", triage="ac"), *few]
    )
    row = f"notes={path},client=hospital,least=10,task=kind"
    clients = clients_of(row)
    assert [(one.name, one.task.name, "".join(one.task.label_names), len(one.train)) for one in clients] == [
        ("notes-topic-St.-Mary-s", "notes-topic", "xyz", 20),
        ("notes-topic-north", "notes-topic", "xyz", 20),
        ("notes-triage-St.-Mary-s", "notes-triage", "abc", 20),
        ("notes-triage-north", "notes-triage", "abc", 20),
        ("notes-triage-south", "notes-triage", "abc", 20),
    ]
    assert all(text.startswith(one.task.name[6:]) for one in clients for text in texts(one.train))
    sites = [site_of(one.name, one.task.name) for one in clients]
    assert sites == ["St.-Mary-s", "north", "St.-Mary-s", "north", "south"]
    assert "notes-topic: left out since they have fewer than 10 examples: 1 of 3 clients, south (3)" in data_notes(
        clients
    )
    # the name of the row stands for all its tasks; a row may take one alone, with classes and a metric of its own
    assert [task.name for task in find_tasks(("movie", "notes"), (row,))] == ["movie", "notes-topic", "notes-triage"]
    rows = (f"{row}:topic,labels=z|y|x,metric=macro_f1", f"{row}:triage")
    assert [(task.name, *task.label_names, task.metric) for task in find_tasks((), rows)] == [
        ("notes-topic", *"zyx", "macro_f1"),
        ("notes-triage", *"abc", "accuracy"),
    ]
    dealt = clients_of(f"notes={path},task=kind", clients_per_task=2)
    assert [one.name for one in dealt] == ["notes-topic-0", "notes-topic-1", "notes-triage-0", "notes-triage-1"]
    assert [site_of(one.name, one.task.name) for one in dealt] == [one.name for one in dealt]
    alone = clients_of(f"notes={path},client=hospital,task=kind:triage,order=n")
    assert [(one.name, texts(one.test)[-1]) for one in alone][1:] == [
        ("north", "triage note 42 of north"),
        ("south", "triage note 42 of south"),
    ]


def test_tasks_of_a_column_compose_with_files_of_clients_and_a_column_of_splits(tmp_path: Path) -> None:
    for name in ("north", "south"):
        rows = kinds(name, triage="ab", topic="xy")
        rows = [{**row, "part": ("train", "train", "dev", "test")[n // 2 % 4]} for n, row in enumerate(rows)]
        write(tmp_path / f"files/{name}.csv", rows)
    clients = clients_of(f"notes={tmp_path}/files,client=file,task=kind,split=part")
    names = [f"notes-{kind}-{site}" for kind in ("topic", "triage") for site in ("north", "south")]
    assert [(one.name, *map(len, one.splits.values())) for one in clients] == [(name, 22, 11, 10) for name in names]


@pytest.mark.parametrize("own_file", [False, True])
@pytest.mark.parametrize("kind", ["topic", "triage"])
def test_a_site_of_several_tasks_has_the_rows_of_the_simulation(own_file: bool, kind: str, tmp_path: Path) -> None:
    """By the same words, or with a file of its own, which lacks classes that the server tells."""
    north = kinds("north", triage="bc", topic="xy")
    path = write(tmp_path / "t.csv", [*kinds("south", triage="ab", topic="xyz"), *north])
    name = f"notes-{kind}-north"
    simulated = {one.name: one for one in clients_of(f"notes={path},client=hospital,task=kind", samples=9)}
    told = {"notes-topic": ("x", "y", "z"), "notes-triage": ("a", "b", "c")}
    words = (
        f"notes={write(tmp_path / 'n.csv', north)},task=kind" if own_file else f"notes={path},client=hospital,task=kind"
    )
    for classes in (told, {}):
        description = with_classes_of(words, classes, client=name)
        assert (":" in description, "labels=" in description) == (bool(classes), bool(classes))
        task = task_of_client(find_tasks((), (description,)), name)
        sizes = {"train": None, "validation": None, "test": None}
        at_site = site_client(task, NOWHERE, sizes, name=name, secret=b"x" * 32, shuffle_labels=False)
        assert set(texts(simulated[name].train)) < set(texts(at_site.train))
        assert texts(at_site.test) == texts(simulated[name].test)
        assert (task.label_names == told[f"notes-{kind}"]) is (bool(classes) or not own_file)
    with pytest.raises(DataError, match=r"the data have the tasks notes-topic, notes-triage, and none has .* 'west'"):
        task_of_client(find_tasks((), (words,)), "west")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "client=hospital,least=9,task=text",
            "'text' of .* has 46 different values in 46 rows, .* each would be a task",
        ),
        ("task=hospital", "column 'label' of task 't-tiny' of .* has 3 different values in 3 rows"),
        (
            "task=label",
            "column 'label' of task 't-a' of .* has 1 different values .* take other tasks alone, as in task=la",
        ),
        ("task=hospital:tini", "column 'hospital' of .* has no 'tini'; did you mean 'tiny'[?] it has a, tiny"),
        ("task=hospital:", "task=hospital: of task 't' is no column; write task=kind for the column"),
        ("task=ward", "has no column 'ward'; it has 'text', 'label', 'hospital', 'n'"),
        (
            "task=hospital,labels=a|b",
            "has labels= and task=hospital, whose tasks have classes each; write a row of --task",
        ),
        ("task=hospital:a,metric=f1:x", "metric=f1:x names no class of task 't-a' of .*; it has 'a', 'b', 'c'"),
        ("client=ward", "has no column 'ward'; it has 'text', 'label', 'hospital', 'n'.*; client= names it$"),
        ("group=wards", "has no column 'wards'; it has .*; group= names it$"),
        (
            "client=hospital",
            "client 'tiny': task 't' has no validation and no test rows .* leave small clients out with",
        ),
        (
            "client=hospital,group=hospital,least=9",
            "no train and no .* five at the least and three groups in 'hospital', or",
        ),
        ("client=hospital,least=many", "least='many' of task 't' is no number of examples"),
        ("client=hospital,least=99", "no client of task 't' has 99 examples, the most are 43; lower least="),
        ("least=3", "task 't' has least= without client="),
        ("client=hospital,least=9,split=label", "no split such as train, validation.* in 'label' .* in row 2"),
        (
            "client=hospital,least=9,order=text",
            "no number and no date such as 2026-03-31.* in 'text' .'note 0 of a'. in row 2",
        ),
        ("client=hospital,split=label,order=n", "has split= and order=, which both say what is tested on"),
        ("client=hospital,least=9,labels=a|b", ".* has 'c' in column 'label' .rows: 15., which is none of the classes"),
        ("labels=a|a", "labels='a|a' of task 't' declares no two different classes"),
        ("labels=1|2,metric=pearson", "has labels= and metric=pearson"),
    ],
)
def test_what_is_wrong_is_one_line(options: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [*triage("a", 43), *triage("tiny", 3)])
    with pytest.raises((ConfigError, DataError), match=message) as error:
        clients_of(f"t={path},{options}")
    assert "\n" not in str(error.value)


def test_files_of_clients_that_are_not_there_or_not_asked_for(tmp_path: Path) -> None:
    for name in ("a.csv", "a.jsonl"):
        write(tmp_path / "two" / name, triage("a", 9))
    with pytest.raises(DataError, match=r"two files in .* are of one client 'a'"):
        clients_of(f"t={tmp_path}/two,client=file")
    with pytest.raises(DataError, match=r"there are no files of clients in .*none"):
        clients_of(f"t={tmp_path}/none/*.csv,client=file")
    with pytest.raises(ConfigError, match=r"names files by a pattern .*; add client=file"):
        clients_of(f"t={tmp_path}/two/*.csv")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clients_per_task": 5}, "the data name the clients .*, and --clients-per-task 5 says how many"),
        (
            {"partition": "dirichlet"},
            "and --partition dirichlet would deal their examples out again; take --partition natural",
        ),
        ({"nc": "2"}, "and --nc 2 would deal their examples out again"),
        (
            {"client_sizes": (9,)},
            "and --client-sizes 9 would deal their examples out again; leave it out or take a preset",
        ),
        ({"test_mix": "task"}, "what each is tested on, and --test-mix task would choose it anew"),
        ({"one_task": True}, "the clients of one task .*, and --one-task makes clients of several sources"),
        ({"clusters": "4"}, "--clusters is '4'; allowed: auto, oracle, or a number from 1 to 2, the number of clients"),
    ],
)
def test_settings_that_would_deal_the_rows_again_are_refused(values: Row, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", [*triage("a", 43), *triage("b", 43)])
    config = with_values(Config(), {"tasks": (), "task": (f"t={path},client=hospital",)})
    for allowed in ({"partition": "natural"}, {"flipped_clients": 0.5}, {"split": "a=2", "strategy": "fedavg"}):
        validate(with_values(config, allowed))
    with pytest.raises(ConfigError, match=message):
        validate(with_values(config, values))


def test_natural_needs_clients_of_the_data_and_pathological_its_number_of_classes() -> None:
    for values, message in (
        ({"partition": "natural"}, "takes the clients that the data name, and a task names none; add client=COLUMN"),
        ({"partition": "pathological"}, "as many classes as --nc says, which is iid; set --nc to 2, say"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate(with_values(Config(), values))
    validate(with_values(Config(), {"partition": "pathological", "nc": "2", "tasks": "trec"}))
