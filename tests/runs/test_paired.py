"""`--topology paired`: the models of `--topology server`, computed elsewhere, and every byte where it went."""

import io
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from atlas_fl.client.job import Job
from atlas_fl.experiment.run import RunResult, run_config
from atlas_fl.planning import planner
from atlas_fl.planning.planner import make_plan
from atlas_fl.planning.task_discovery import discover_tasks
from atlas_fl.report.tables import plan_tables
from atlas_fl.storage.jsonl import read_json
from atlas_fl.storage.ledger import LedgerRow, totals
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows, same_tensors, state
from tests.runs.sessions import check_same_runs, in_sessions
from tests.runs.workers import backend_without

# movie-0 and trec-0 are small, movie-1 and trec-1 are not
SPLIT = {"split": "cpu_2gb=1", "devices": ("cpu_2gb", "laptop_8gb"), "topology": "paired"}


def hosts(folder: Path, *, work: str = "training") -> dict[tuple[int, str], str]:
    events = [row for row in rows(folder) if row.get("event") == "hosted" and row["work"] == work]
    return {(int(str(row["round"])), str(row["client"])): str(row["host"]) for row in events}


def sums(folder: Path) -> Counter[tuple[object, ...]]:
    """Bytes by round, client, kind and direction, whoever was at the other end; guests' upper parts left out."""
    found: Counter[tuple[object, ...]] = Counter()
    for row in rows(folder, "ledger"):
        if "guest" not in row:
            found[row["round"], row["client"], row["kind"], row["direction"]] += int(str(row["bytes"]))
    return found


@pytest.fixture(scope="module")
def paired(shared_config: Make) -> RunResult:
    return run_config(shared_config(name="paired", eta=0.3, dropout=0.1, **SPLIT))


@pytest.mark.slow
def test_pairing_changes_who_computes_and_no_bit(config: Make, paired: RunResult) -> None:
    settings = {**SPLIT, "topology": "server"}
    server = run_config(config(name="server", eta=0.3, dropout=0.1, **settings))
    assert same_tensors(state(server.folder), state(paired.folder))
    assert [row for row in rows(paired.folder) if row.get("event") != "hosted"] == rows(server.folder)
    passing_audit(paired.folder)
    assert hosts(server.folder) == {}
    pairs = {"movie-0": "movie-1", "trec-0": "trec-1"}
    everywhere = {(round, guest): host for round in (1, 2) for guest, host in pairs.items()}
    assert hosts(paired.folder) == everywhere
    assert hosts(paired.folder, work="evaluation") == everywhere
    # what crosses a cut is the same, and goes to the host; nobody is paired before there is a plan
    assert sums(paired.folder) == sums(server.folder)
    for row in rows(paired.folder, "ledger"):
        crosses = row["round"] != 0 and row["kind"] in ("activation", "gradient", "label", "control")
        assert row.get("peer") == (pairs[str(row["client"])] if crosses else None)
    for row in rows(server.folder, "ledger"):
        assert row.keys() - {"phase"} == {"round", "client", "direction", "kind", "bytes"}


def test_the_server_is_spared_what_crosses_the_cuts(paired: RunResult) -> None:
    ledger = [LedgerRow(**row) for row in rows(paired.folder, "ledger")]
    found = totals(ledger)
    crossed = sum(row.bytes for row in ledger if row.peer)
    assert paired.summary["bytes"]["between_clients"] == found.between_clients == crossed > 0.5 * found.total
    received = sum(row.bytes for row in ledger if row.peer == "movie-1" and row.direction == "up")
    own = sum(row.bytes for row in ledger if row.client == "movie-1" and row.direction == "down")
    assert found.by_client["movie-1"]["down"] == received + own


def test_a_host_gets_its_guests_upper_parts_and_returns_them(paired: RunResult) -> None:
    """Adapters of blocks 1 and 2 and the head: down to train, up again, and down to evaluate."""
    carried = [row for row in rows(paired.folder, "ledger") if "guest" in row]
    ways = Counter((row["round"], row["guest"], row["kind"], row["direction"]) for row in carried)
    for round in (1, 2):
        for own in ("movie-0", "trec-0"):
            for kind in ("adapter", "head"):
                assert ways[round, own, kind, "down"] == 2
                assert ways[round, own, kind, "up"] == 1
    assert {(row["guest"], row["client"]) for row in carried} == {("movie-0", "movie-1"), ("trec-0", "trec-1")}
    tensors = state(paired.folder)
    above = [key for key in tensors if key.startswith("strategy/movie-0/") and "lora" in key and ".layer.0." not in key]
    values = 4 * sum(tensors[key].numel() for key in above)
    sent = {int(str(row["bytes"])) for row in carried if (row["guest"], row["kind"]) == ("movie-0", "adapter")}
    assert len(sent) == 1
    # the names and shapes are all that is sent besides
    assert values < min(sent) < values + 1200


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["movie-1", "both"])
def test_guests_of_a_host_that_drops_are_paired_again_in_the_same_round(config: Make, gone: str) -> None:
    lost = {"movie-1": ("movie-1",), "both": ("movie-1", "trec-1")}[gone]

    def is_lost(action: str, job: Job) -> bool:
        return (action, job.round) == ("train", 2) and job.client in lost

    result = run_config(config(name="dropping", rounds=3, **SPLIT), backend=backend_without(is_lost))
    assert [(row["client"], row["round"]) for row in rows(result.folder) if row.get("event") == "missing"] == [
        (name, 2) for name in lost
    ]
    found = hosts(result.folder)
    assert (found[1, "movie-0"], found[3, "movie-0"]) == ("movie-1", "movie-1")
    assert found[2, "movie-0"] == found[2, "trec-0"] == ("trec-1" if gone == "movie-1" else "server")
    reasons = {
        row["client"]: row["reason"]
        for row in rows(result.folder)
        if row.get("event") == "hosted" and (row["round"], row["work"]) == (2, "training")
    }
    assert reasons["movie-0"].startswith("the quickest of 1" if gone == "movie-1" else "no client")
    # evaluation finds everyone there, and its rows go there too
    assert set(hosts(result.folder, work="evaluation").values()) == {"movie-1", "trec-1"}
    second = [row for row in rows(result.folder, "ledger") if (row["round"], row["client"]) == (2, "movie-0")]
    peers = {
        kind: {row.get("peer", "server") for row in second if row["kind"] == kind}
        for kind in ("activation", "gradient")
    }
    assert peers == {"activation": {found[2, "movie-0"], "movie-1"}, "gradient": {found[2, "movie-0"]}}
    passing_audit(result.folder)


@pytest.mark.slow
def test_sessions_of_a_paired_run_with_sampling_make_the_same_run(config: Make) -> None:
    settings = {**SPLIT, "participation": 0.5, "wire": "int8", "wire_noise": 0.05}
    once = run_config(config(name="once", **settings))
    parts = in_sessions(config(name="parts", max_rounds=1, **settings))
    check_same_runs(once.folder, parts.folder)
    assert read_json(once.folder / "plan.json")["clients"] == read_json(parts.folder / "plan.json")["clients"]
    trained = {(row["round"], row["client"]) for row in rows(once.folder) if row.get("split") == "train"}
    for (round, _), host in hosts(once.folder).items():
        assert host == "server" or (round, host) in trained


def test_the_plan_says_who_hosts_whom(config: Make) -> None:
    server = make_plan(config(**{**SPLIT, "topology": "server"}))
    plan = make_plan(config(**SPLIT))
    before, after = ({own.name: own for own in one.clients} for one in (server, plan))
    own, host = after["movie-0"], after["movie-1"]
    assert own.split["host"]["name"] == "movie-1"
    assert own.split["host"]["reason"] == "the quickest of 1 with room, in cluster 0"
    assert own.predicted == before["movie-0"].predicted and host.predicted == before["movie-1"].predicted
    assert (own.cut, own.ranks, host.ranks) == (before["movie-0"].cut, before["movie-0"].ranks, before["movie-1"].ranks)
    shown = io.StringIO()
    for table in plan_tables(plan.to_json()):
        Console(width=80, file=shown).print(table)
    assert max(map(len, shown.getvalue().splitlines())) <= 80
    assert "movie-1: the quickest of 1 with room, in cluster 0" in " ".join(shown.getvalue().split())


def test_where_every_model_is_cut_the_server_hosts_all(config: Make) -> None:
    plan = make_plan(config(**{**SPLIT, "split": "1"}))
    server = make_plan(config(**{**SPLIT, "split": "1", "topology": "server"}))
    for own, other in zip(plan.clients, server.clients, strict=True):
        assert own.split["host"]["name"] is None
        assert own.split["host"]["reason"] == "no client that holds a whole model has room for it"
        assert own.predicted == other.predicted


@pytest.mark.slow
def test_clusters_that_are_measured_again_are_paired_again(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the second look had found each small client beside the large one of the other task."""

    def discover(*given: Any, round: int = 0, **words: Any) -> Any:
        found = discover_tasks(*given, round=round, **words)
        return replace(found, labels=(1, 0, 0, 1)) if round else found

    monkeypatch.setattr(planner, "discover_tasks", discover)
    result = run_config(config(name="again", recluster_every=1, clusters="oracle", **SPLIT))
    first, last = (read_json(result.folder / name)["clients"] for name in ("plan.json", "plan-0002.json"))
    hosts_of = [[client["split"].get("host", {}).get("name") for client in plan] for plan in (first, last)]
    assert hosts_of == [["movie-1", None, "trec-1", None], ["trec-1", None, "movie-1", None]]
    for old, new in zip(first, last, strict=True):
        assert new["predicted"] == old["predicted"]
        assert new["memory"] == old["memory"]


@pytest.mark.slow
def test_who_hosts_changes_nothing_of_what_is_shared_in_part(config: Make) -> None:
    settings = {"split": "cpu_2gb=1", "devices": ("cpu_2gb", "laptop_8gb"), "share": ("A",), "space": "factors"}
    settings |= {"eta": 0.3, "dropout": 0.1, "rounds": 2, "head": "client"}
    server = run_config(config(name="server", **settings))
    paired = run_config(config(name="paired", topology="paired", **settings))
    assert same_tensors(state(server.folder, round=2), state(paired.folder, round=2))
    assert [row for row in rows(paired.folder) if row.get("event") != "hosted"] == rows(server.folder)
    assert {row["host"] for row in rows(paired.folder) if row.get("event") == "hosted"} == {"movie-1", "trec-1"}
    passing_audit(paired.folder)
