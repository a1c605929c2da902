"""How often a file of data is read and cut into splits by a command, whoever in it asks."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atlas_fl.config import Config, validate
from atlas_fl.data import cleaning, embedded, formats
from atlas_fl.data.task import forget
from atlas_fl.events import ignore
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.experiment.sweep import grid, run_all
from atlas_fl.planning.place_client import place_client
from atlas_fl.planning.planner import make_plan
from atlas_fl.setup.assembly import load_clients
from tests.runs.finished import Make
from tests.runs.reading import passing_audit
from tests.runs.workers import in_threads

ONCE = {"own.csv": 1, "own": 1, "question_labels.txt": 1, "trec": 1}
"""Files that were read, and tasks that were cut into splits."""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was read and each task was cut into splits since the test began."""
    counts = Counter[str]()

    def counted(function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            counts[name(*args, **options)] += 1
            return function(*args, **options)

        return call

    monkeypatch.setitem(formats.FORMATS, ".csv", counted(formats.FORMATS[".csv"], lambda _, path, __: path.name))
    monkeypatch.setattr(embedded, "read_lines", counted(embedded.read_lines, lambda path: path.name))
    monkeypatch.setattr(cleaning, "split_rows", counted(cleaning.split_rows, lambda _, *, name, **__: name))
    forget()
    return counts


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.csv"
    path.write_text("text,label\n" + "".join(f"{('poor', 'good')[i % 2]} word {i},{i % 2}\n" for i in range(300)))
    return path


@pytest.fixture
def make(config: Make, own: Path) -> Make:
    """Settings of two rounds with a csv and an embedded task."""
    return lambda **values: config(**{"tasks": ("trec",), "task": f"own={own}", "rounds": 2, **values})


@pytest.mark.slow
def test_a_run_its_resumption_its_audit_and_a_newcomer_read_data_once(make: Make, reads: Counter[str]) -> None:
    folder = run_config(make(max_rounds=1)).folder
    assert reads == ONCE
    resume_run(folder)
    passing_audit(folder)
    place_client(folder, task="trec")
    assert reads == ONCE


def test_a_plan_reads_data_once(make: Make, reads: Counter[str]) -> None:
    make_plan(make())
    assert reads == ONCE


def test_workers_of_one_process_share_what_was_read(make: Make, reads: Counter[str]) -> None:
    with in_threads(2)(make(), ignore):
        assert reads == ONCE


@pytest.mark.slow
def test_the_runs_of_a_sweep_share_what_was_read(make: Make, reads: Counter[str]) -> None:
    run_all(grid(make(name="swept", rounds=1), over={"eta": ("0", "0.1", "0.5")}, seeds=(1,)))
    assert reads == ONCE


def test_a_csv_that_changes_between_two_runs_is_read_anew(make: Make, own: Path, reads: Counter[str]) -> None:
    before = digests(make())
    own.write_text(own.read_text().replace("word", "noun"))
    after = digests(make())
    assert reads == {**ONCE, "own.csv": 2, "own": 2}
    assert [left == right for left, right in zip(before, after)] == [True, True, False, False]
    forget()
    assert digests(make()) == after


def test_a_run_leaves_what_it_read_as_it_was(make: Make, reads: Counter[str]) -> None:
    """Flipped labels and shuffled ones are those of a run's own clients."""
    plain = digests(make())
    assert digests(make(attack="label_flip", attackers=("own-0",))) != plain
    assert digests(make(shuffle_labels=True)) != plain
    assert digests(make()) == plain
    assert reads == ONCE


def digests(config: Config) -> list[str]:
    """Of every client's rows."""
    return [client.digest() for client in load_clients(validate(config))]
