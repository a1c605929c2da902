"""Settings that meet seldom: each pair makes the plain simulation's bits, wherever it is computed."""

from collections.abc import Callable

import pytest

from atlas_fl.config import Config
from atlas_fl.experiment.run import run_config
from atlas_fl.storage.jsonl import read_json
from tests.runs.reading import passing_audit, rows, same_tensors, state
from tests.runs.test_split import SMALL, most_needed

pytestmark = pytest.mark.slow

Make = Callable[..., Config]


def test_who_hosts_changes_nothing_of_what_is_shared_in_part(config: Make) -> None:
    settings = {"split": "cpu_2gb=1", "devices": ("cpu_2gb", "laptop_8gb"), "share": ("A",), "space": "factors"}
    settings |= {"eta": 0.3, "dropout": 0.1, "rounds": 2, "head": "client"}
    server = run_config(config(name="server", **settings))
    paired = run_config(config(name="paired", topology="paired", **settings))
    assert same_tensors(state(server.folder, round=2), state(paired.folder, round=2))
    assert [row for row in rows(paired.folder) if row.get("event") != "hosted"] == rows(server.folder)
    assert {row["host"] for row in rows(paired.folder) if row.get("event") == "hosted"} == {"movie-1", "trec-1"}
    passing_audit(paired.folder)


def test_auto_is_the_run_at_the_cuts_that_it_took(config: Make) -> None:
    gb = (most_needed(config, "2") + most_needed(config, "none")) / 2
    settings = {"devices": ("small", "tablet_4gb"), "device": (SMALL.format(gb=gb),), "ranks": "2", "rounds": 1}
    settings |= {"dropout": 0.1, "eval_every": 1}
    auto = run_config(config(name="auto", split="auto", **settings))
    cuts = {client["name"]: client["cut"] for client in read_json(auto.folder / "plan.json")["clients"]}
    named = ",".join(f"{name}={cut}" for name, cut in cuts.items() if cut is not None)
    assert named
    fixed = run_config(config(name="fixed", split=named, **settings))
    assert same_tensors(state(auto.folder, round=1), state(fixed.folder, round=1))
    assert rows(auto.folder) == rows(fixed.folder)
    passing_audit(auto.folder)
