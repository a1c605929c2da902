"""Clients that join a run that has begun: placed, fitted and mixed as the others were, and nothing else changes."""

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atlas_fl.audit.check import audit_run
from atlas_fl.config import Config
from atlas_fl.errors import AtlasError, BudgetError
from atlas_fl.events import OnEvent
from atlas_fl.experiment.run import RunResult, resume_run, run_config
from atlas_fl.planning.planner import local_engine
from atlas_fl.ranks.devices import find_devices
from atlas_fl.report.record import read_record
from atlas_fl.runtime.engine import Engine
from atlas_fl.setup.assembly import Assembly, JoinQueue, Newcomer, assemble
from atlas_fl.storage.jsonl import read_json
from atlas_fl.storage.run_folder import RunFolder
from atlas_fl.storage.tensors import read_sketches, read_tensors, write_tensors
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows, same_tensors, state
from tests.runs.sessions import check_same_runs
from tests.runs.workers import Without

LATE = ("movie-1=2", "trec-0=3")
MEASURED = {"clusters": "auto", "fingerprint": "gradient", "min_reliability": "-0.99", "similarity_threshold": "-0.99"}
"""Clusters by sketches, in which nobody is undecided."""


@pytest.fixture(scope="module")
def late(shared_config: Make) -> RunResult:
    return run_config(shared_config(name="late", rounds=3, arrive=LATE, eta=0.3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "space"), [("atlas_laplacian", "factors"), ("fedavg", "product"), ("fedavg_cluster", "factors")]
)
def test_every_rule_gives_newcomers_a_start_that_the_audit_recomputes(config: Make, strategy: str, space: str) -> None:
    result = run_config(config(strategy=strategy, space=space, rounds=3, arrive=LATE))
    found = passing_audit(result.folder)
    joined = [(row.round, row.client) for row in found.rows if row.check == "joined"]
    assert joined == [(2, "movie-1"), (3, "trec-0")]
    fresh, start = (
        read_tensors(RunFolder(result.folder).audit_arrival(2) / f"{name}.safetensors") for name in ("fresh", "start")
    )
    assert not same_tensors(fresh, start)


def test_a_rule_that_sends_nothing_lets_newcomers_begin_with_their_own(config: Make) -> None:
    result = run_config(config(strategy="local", arrive="movie-1=2", rounds=2))
    folder = RunFolder(result.folder)
    assert same_tensors(*(read_tensors(folder.audit_arrival(2) / f"{name}.safetensors") for name in ("fresh", "start")))
    assert rows(result.folder, "ledger") == []
    passing_audit(result.folder)


def test_an_arrival_changes_nothing_that_was_decided_for_others(late: RunResult) -> None:
    plans = [read_json(late.folder / name) for name in ("plan.json", "plan-0002.json", "plan-0003.json")]
    names = [[client["name"] for client in plan["clients"]] for plan in plans]
    assert names == [
        ["movie-0", "trec-1"],
        ["movie-0", "trec-1", "movie-1"],
        ["movie-0", "trec-1", "movie-1", "trec-0"],
    ]
    for before, after in itertools.pairwise(plans):
        size = len(before["clients"])
        assert after["clients"][:size] == before["clients"]
        assert after["importance"][:size] == before["importance"]
        assert (np.array(after["adjacency"])[:size, :size] == np.array(before["adjacency"])).all()
    newcomer = plans[1]["clients"][2]
    assert (newcomer["cluster"], newcomer["device"]) == (0, "tablet_4gb")
    assert plans[1]["importance"][2] == plans[1]["importance"][0], "that of its cluster"
    assert plans[1]["notes"][-1] == "movie-1 joins before round 2: cluster 0, beside movie-0"


def test_rows_and_bytes_of_a_newcomer_begin_with_its_round(late: RunResult) -> None:
    own = [row for row in rows(late.folder) if row.get("client") == "trec-0"]
    assert own[0] == {"round": 3, "event": "joined", "client": "trec-0", "cluster": 1}
    assert {row["round"] for row in own} == {3}
    sent = [(row["direction"], row["kind"]) for row in rows(late.folder, "ledger") if row["client"] == "trec-0"]
    # sketches up, ranks and its start down, then a round as everyone's
    assert sent[:2] == [("up", "fingerprint"), ("down", "control")]
    assert sent[2:].count(("down", "adapter")) == 2
    assert sent[2:].count(("up", "adapter")) == 1
    assert late.summary["events"]["count"]["joined"] == 2
    assert list(late.summary["clients"]) == ["movie-0", "trec-1", "movie-1", "trec-0"]
    assert sorted(path.name for path in RunFolder(late.folder).adapters.iterdir()) == sorted(late.summary["clients"])


def test_a_newcomer_with_a_cut_is_placed_over_it(config: Make) -> None:
    words = {"rounds": 3, "arrive": LATE, "eta": 0.3, "pack_tokens": 1}  # who is cut is in no pack
    whole, cut = (run_config(config(name=f"late-{split}", split=split, **words)) for split in ("none", "movie-1=1"))
    assert same_tensors(state(cut.folder), state(whole.folder))
    sent = [row for row in rows(cut.folder, "ledger") if row["client"] == "movie-1" and row["round"] == 2]
    assert {row["phase"] for row in sent if row.get("phase")} == {"fingerprint"}, "importance is that of its cluster"
    assert {row["kind"] for row in sent if row.get("phase")} == {"activation", "label"}
    assert not any(row["kind"] == "fingerprint" for row in sent)


def test_what_is_shown_of_a_run_is_shown_of_its_newcomers(late: RunResult) -> None:
    record = read_record(late.folder)
    assert list(record.task_of) == list(record.histories) == ["movie-0", "trec-1", "movie-1", "trec-0"]
    assert record.sketches[0].shape[0] == 4


@pytest.mark.parametrize("change", ["start", "plan"])
def test_an_altered_start_of_a_newcomer_is_found(late: RunResult, tmp_path: Path, change: str) -> None:
    folder = RunFolder(Path(shutil.copytree(late.folder, tmp_path / "altered")))
    place = folder.audit_arrival(2)
    if change == "start":
        tensors = read_tensors(place / "start.safetensors")
        key = next(key for key in tensors if key.endswith("lora_B"))
        write_tensors(place / "start.safetensors", {**tensors, key: tensors[key] * 1.01})
    else:
        text = (place / "plan.json").read_text()
        edges = read_json(place / "plan.json")["adjacency"]
        assert edges[2][0] > 0 == edges[2][1]
        (place / "plan.json").write_text(text.replace(str(edges[2][0]), "0.0"))
    found = [row for row in audit_run(folder.path).failures if row.check == "joined"]
    assert [(row.round, row.client) for row in found] == [(2, "movie-1")]


@pytest.mark.slow
def test_sessions_and_clusters_measured_again_make_the_same_run(config: Make) -> None:
    """One arrives in a round of its own, the other where clients are clustered again and get other ranks."""
    settings = {
        **MEASURED,
        **{"arrive": LATE, "rounds": 3, "recluster_every": 2, "rerank": True, "graph": "adaptive", "graph_ema": 0.5},
        **{"checkpoint_every": 3, "complexity_scaling": True},
    }
    once = run_config(config(name="once", **settings))
    parts = run_config(config(name="parts", max_rounds=2, **settings))
    plans = [path.name for path in RunFolder(parts.folder).plans()]
    assert plans == ["plan.json", "plan-0002.json"]
    # one of the arrival, though none was due, and one of the session's end
    held = sorted(path.name for path in RunFolder(parts.folder).checkpoints.iterdir())
    assert held == ["round-0001", "round-0002"]
    assert resume_run(parts.folder).complete
    check_same_runs(once.folder, parts.folder)
    for folder in (once.folder, parts.folder):
        passing_audit(folder)
        sketches = read_sketches(RunFolder(folder).sketches_of("plan-0003.json"))
        assert sketches is not None
        assert sketches.shape[1] == 4


def test_who_cannot_join_is_told_why_and_the_others_go_on(config: Make) -> None:
    told: dict[str, AtlasError] = {}
    tiny = find_devices((), ("none=memory_gb=0.375,gflops=20,up_mbps=2,down_mbps=10,latency_ms=60,max_rank=8",))[0]

    @contextmanager
    def backend(own: Config, on_event: OnEvent) -> Iterator[tuple[Assembly, Engine]]:
        whole = assemble(own)
        waiting = tuple(
            Newcomer(client=whole.clients[k], tokens=whole.site.data[whole.names[k]], device=device)
            for k, device in ((1, tiny), (3, whole.devices[3]))
        )
        queue = JoinQueue(waiting_clients=lambda round: waiting if round == 2 else (), reject_client=told.__setitem__)
        here = replace(whole, clients=whole.clients[::2], devices=whole.devices[::2], join_queue=queue)
        yield here, Without(local_engine(whole, on_event), lambda _, job: job.client == "trec-1")

    notes: list[str] = []
    result = run_config(config(name="open", rounds=2), backend=backend, on_event=lambda e: notes.append(str(e)))
    assert "none has 402.7 MB of memory and training takes" in str(told["movie-1"])
    assert "no fingerprint of trec-1" in str(told["trec-1"])
    assert any(note.startswith("movie-1 does not join: ") for note in notes)
    assert list(result.summary["clients"]) == ["movie-0", "trec-0"]
    assert [path.name for path in RunFolder(result.folder).plans()] == ["plan.json"]
    passing_audit(result.folder)


def test_who_trains_stays_the_same_up_to_the_next_aggregation(config: Make) -> None:
    result = run_config(config(arrive="movie-1=2", aggregate_every=2, rounds=4, strategy="fedavg"))
    first = [row["round"] for row in rows(result.folder) if row.get("event") == "joined"]
    assert first == [3]
    passing_audit(result.folder)


def test_a_late_client_whose_device_fits_no_model_is_refused_in_one_line(config: Make) -> None:
    none = "none=memory_gb=0.375,gflops=20,up_mbps=2,down_mbps=10,latency_ms=60,max_rank=8"
    with pytest.raises(BudgetError, match="none has") as caught:
        run_config(config(arrive="trec-1=2", devices="none", device=none))
    assert "\n" not in str(caught.value)
