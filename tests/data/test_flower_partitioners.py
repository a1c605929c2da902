"""Each row of the table of Flower's partitioners makes the clients that it says, of the flags as they stand there."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from atlas_fl.cli.arguments import parse, split
from atlas_fl.cli.options import RunOptions
from atlas_fl.config import validate
from atlas_fl.data.clients import ClientData
from atlas_fl.setup.assembly import load_clients
from tests.data.test_own_clients import texts, triage, write

ROWS = Path("docs/coming-from.md").read_text(encoding="utf-8")
FLAGS = dict(re.findall(r"^\| `?(\w+(?:Partitioner)|a split by time).*? \| .*?(`--.*) \|$", ROWS, re.MULTILINE))
HOSPITALS = {"Mary": "South", "north": "North", "south": "South"}
Sizes = Sequence[int]
Counts = np.ndarray


def in_proportion(weights: Sequence[float]) -> Callable[[Sizes, Counts], bool]:
    expected = np.asarray(weights) / sum(weights)
    return lambda sizes, _: np.allclose(np.asarray(sizes) / sum(sizes), expected, atol=0.02)


def alike(sizes: Sizes, counts: Counts) -> bool:
    return max(sizes) - min(sizes) <= 1 and np.ptp(counts, axis=0).max() <= 2


LAWS: Mapping[str, Callable[[Sizes, Counts], bool]] = {
    "IidPartitioner": alike,
    "DirichletPartitioner": lambda sizes, counts: max(sizes) - min(sizes) <= 1 and np.ptp(counts, axis=0).max() > 10,
    "ShardPartitioner": lambda sizes, counts: max(sizes) - min(sizes) <= 1 and (counts == 0).any(axis=1).all(),
    "PathologicalPartitioner": lambda _, counts: ((counts > 0).sum(axis=1) == 2).all(),
    "LinearPartitioner": in_proportion([1, 2, 3]),
    "SquarePartitioner": in_proportion([1, 4, 9]),
    "ExponentialPartitioner": in_proportion(list(np.exp([1, 2, 3]))),
}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[ClientData, ...]]:
    monkeypatch.chdir(tmp_path)
    for hospital, region in HOSPITALS.items():
        own = triage(hospital, 120, "abcd", region=region)
        days = [f"2026-{1 + n % 6:02}-{1 + n // 6:02}" for n in range(120)]
        patients = [f"{hospital}-{n // 4}" for n in range(120)]
        rows = [{**row, "date": day, "patient": patient} for row, day, patient in zip(own, days, patients)]
        write(tmp_path / f"{hospital}.csv", rows)
    lines = [(tmp_path / f"{hospital}.csv").read_text().splitlines() for hospital in HOSPITALS]
    header = lines[0][0].replace("text", "note").replace("label", "triage")
    (tmp_path / "hospitals.csv").write_text("\n".join([header, *(line for own in lines for line in own[1:])]))
    whole = "--samples none --validation-samples none --test-samples none --clients-per-task 3"

    def clients_of(flags: str) -> tuple[ClientData, ...]:
        task = "" if "--task " in flags else "--task triage=hospitals.csv,text=note,label=triage "
        words = f"{whole} {task}{flags}".split()
        return load_clients(validate(parse(RunOptions, split(words), command="atlas run").settings))

    return clients_of


@pytest.mark.parametrize("name", LAWS)
def test_a_partitioner_of_sizes_and_mixes(name: str, load: Callable[[str], tuple[ClientData, ...]]) -> None:
    clients = load(re.findall(r"`(.*?)`", FLAGS[name])[0])
    counts = np.asarray([np.bincount(client.train.label, minlength=4) for client in clients])
    assert LAWS[name]([len(client.train) for client in clients], counts), counts


def test_partitioners_by_columns(load: Callable[[str], tuple[ClientData, ...]]) -> None:
    task = {name: re.findall(r"`(.*?)`", flags) for name, flags in FLAGS.items() if name not in LAWS}
    assert set(task) == {"NaturalIdPartitioner", "GroupedNaturalIdPartitioner", "a split by time"}
    (natural,), (grouped, kept), (by_time,) = task.values()
    assert [client.name for client in load(natural)] == list(HOSPITALS)
    assert [client.name for client in load(grouped)] == ["North", "South"]
    for client in load(grouped + kept):  # `kept` stands behind it
        patients = [{patient_of(text) for text in texts(rows)} for rows in client.splits.values()]
        assert (
            sum(map(len, patients))
            == len(set.union(*patients))
            == 30 * sum(HOSPITALS[h] == client.name for h in HOSPITALS)
        )
    for client in load(by_time):
        numbers = [[int(text.split()[1]) for text in texts(rows)] for rows in client.splits.values()]
        days = [[(n % 6, n // 6) for n in own] for own in numbers]
        assert max(days[0]) < min(days[1]) < max(days[1]) < min(days[2])


def patient_of(text: str) -> tuple[str, int]:
    _, number, _, hospital = text.split()
    return hospital, int(number) // 4
