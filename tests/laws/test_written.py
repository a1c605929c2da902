"""Laws of a run's files: what a writer takes its readers read, and what they would call damaged is not written."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_fl.errors import CheckpointError, DataError, ProtocolError
from atlas_fl.experiment.summary import summarise
from atlas_fl.planning.plan import Plan
from atlas_fl.ranks.devices import BOUNDS as DEVICE_BOUNDS
from atlas_fl.ranks.devices import parse_device
from atlas_fl.runtime.coordinator.client_registry import ClientProxy
from atlas_fl.runtime.protocol.answer_schema import CORRELATIONS, ROUGE, SCORES, SECONDS
from atlas_fl.runtime.protocol.client_metadata import read_metadata
from atlas_fl.storage.json_shapes import METRICS, PLAN, STATE, SUMMARY, ledger_row, list_of, metrics_row
from atlas_fl.storage.jsonl import append_rows, from_json, read_json, read_rows, to_json, write_json
from atlas_fl.storage.run_folder import RunFolder
from tests.examples import examples
from tests.runtime.coordinator.test_coordinator import CENSUS

NUMBERS = st.one_of(
    st.floats(width=64),
    st.integers(-(10**30), 10**30),
    st.sampled_from([0, 1, -1, 1e17, 1e18, 1e299, 1e300, 5e-324, 10**12, 10**12 + 1, True, None, "1"]),
)
CLIENT = {
    **{"name": "a-0", "task": "a", "device": "d", "examples": 4, "cluster": 0, "ranks": [4, 8], "cut": None},
    **{"budget_bytes": 1, "largest_rank": 1, "memory": {"total": 1}, "split": {}},
    **{"predicted": {"seconds": 1.0, "memory_bytes": 2}},
}
PLANNED = {
    **{"clients": [CLIENT], "adjacency": [[0.0]], "importance": [[0.5, 0.5]], "layer_of": {"q": 0}, "lora": {}},
    **{"clustering": {"labels": [0]}, "leakage": [], "notes": [], "sparse": {}},
    "data": [{"client": "a-0", "task": "a", "examples": {"train": 4}, "labels": {"x": 2.0, "y": 2.0}, "majority": {}}],
}
PLACES = (
    *(("clients", 0, "predicted", name) for name in ("seconds", "memory_bytes")),
    ("clients", 0, "memory", "total"),
    ("clients", 0, "budget_bytes"),
    ("clients", 0, "examples"),
    *(("adjacency", 0, 0), ("importance", 0, 1), ("data", 0, "labels", "x"), ("data", 0, "examples", "train")),
)


def with_value(content, place, value):
    """The content with this value at this place."""
    copy = json.loads(json.dumps(content))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return copy


@given(place=st.sampled_from(PLACES), value=NUMBERS)
@examples(200)
def test_a_plan_that_is_written_is_read_and_another_is_refused_by_the_name_of_its_field(place, value) -> None:
    plan = with_value(PLANNED, place, None)
    plan = with_value(plan, place, value) if value == value else plan
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        try:
            write_json(path, plan, shape=PLAN)
        except DataError as error:
            assert str(place[-1]) in str(error)
            assert not path.exists()
        else:
            assert Plan.from_json(read_json(path)).to_json() == plan


@st.composite
def metric_rows(draw):
    """Rows of two clients in two rounds, a few of whose numbers are anything."""
    rows = []
    for round_number in (1, 2):
        for client in ("a-0", "a-1"):
            for split in ("train", "validation", "test"):
                row = {"round": round_number, "client": client, "task": "a", "split": split}
                row |= {"primary": 0.5, "loss": 1.0, "accuracy": 0.5, "majority": 0.5, "examples": 4, "seconds": 0.1}
                rows.append(row | {"classes": {"hits": [1, 0], "examples": [2, 2]}})
    for _ in range(draw(st.integers(0, 3))):
        index, name = draw(st.integers(0, len(rows) - 1)), draw(st.sampled_from([*METRICS, "seconds", "examples"]))
        rows[index][name] = draw(st.one_of(st.floats(-1e17, 1e17), NUMBERS))
    return rows


ROW = {"round": 1, "client": "a-0", "task": "a", "split": "test"}
LEDGER = {"round": 1, "client": "a-0", "direction": "up", "kind": "head", "bytes": 3}


@given(
    rows=metric_rows(),
    size=st.one_of(st.integers(0, 10**12), NUMBERS),
    seconds=st.floats(1e-6, 1e9),
    predicted=st.floats(0, 1e15),
)
@examples(200)
def test_a_summary_of_rows_and_a_plan_that_were_written_is_one_that_can_be_read(rows, size, seconds, predicted) -> None:
    """So that nothing that was let into a run's folder is found at its end."""
    ledger, plan = [LEDGER, {**LEDGER, "bytes": size}], with_value(PLANNED, PLACES[0], predicted)
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        try:
            append_rows(folder.metrics, rows, shape=metrics_row)
            append_rows(folder.ledger, ledger, shape=ledger_row)
            write_json(folder.plan, plan, shape=PLAN)
        except DataError as error:
            assert "is not written: [" in str(error) or "strict JSON" in str(error)
            return
        metrics, sent = read_rows(folder.metrics), read_rows(folder.ledger)
        assert list_of(metrics_row)(metrics, "") == list_of(ledger_row)(sent, "") == ""
        summary = summarise(
            **{"run": {"seed": 0}, "metrics": metrics, "ledger": sent, "plan": read_json(folder.plan)},
            **{"phase_seconds": {"rounds": seconds}, "memory": {"rss_bytes": 1}, "versions": {}},
            **{"full_model_bytes": 1000, "round_seconds": {1: seconds, 2: seconds}},
        )
        write_json(folder.summary, summary, shape=SUMMARY)
        assert SUMMARY(read_json(folder.summary), "") == ""


@pytest.mark.parametrize("kind", SCORES)
def test_whatever_a_client_may_answer_is_a_row_that_can_be_read(kind: str) -> None:
    """At the bounds of every score, rounding included: no answer that the server takes spoils the file."""
    ranges = {**SCORES[kind], **CORRELATIONS, **ROUGE, "seconds": SECONDS}
    for name, allowed in ranges.items():
        for bound in (allowed.least, allowed.most):
            for value in (bound, bound - 1e-6 * max(1.0, abs(bound)), bound + 1e-6 * max(1.0, abs(bound))):
                assert not allowed.holds(value) or metrics_row({**ROW, name: value}, "") == ""


@given(value=NUMBERS, place=st.sampled_from([("examples", "train"), ("max_length",), ("left_out",), ("num_labels",)]))
@examples(150)
def test_what_a_site_says_of_itself_is_refused_or_kept_as_it_was(value, place) -> None:
    from atlas_fl.deployment.service import read_sites, write_sites

    try:
        metadata = read_metadata(with_value({**CENSUS, "left_out": 0}, place, value))
    except ProtocolError as error:
        assert place[-1] in str(error) or "does not hold together" in str(error)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        device = parse_device("d=memory_gb=3,gflops=50,up_mbps=5,down_mbps=20,latency_ms=60,max_rank=8")
        write_sites(folder, [ClientProxy("a", metadata=metadata, device=device)])
        assert read_sites(folder, ["a"]) == {"a": (metadata, device)}


@pytest.mark.parametrize("name", DEVICE_BOUNDS)
def test_every_number_of_a_device_is_taken_at_its_bounds_and_not_beyond(name: str) -> None:
    from atlas_fl.errors import ConfigError

    profile = {"memory_gb": 3, "gflops": 50, "up_mbps": 5, "down_mbps": 20, "latency_ms": 60, "max_rank": 8}
    bounds = DEVICE_BOUNDS[name]

    def described(value: float) -> str:
        return "d=" + ",".join(f"{key}={number!r}" for key, number in {**profile, name: value}.items())

    for value in (bounds.least, bounds.most):
        assert parse_device(described(value)).name == "d"
    for value in (bounds.least / 2 - 1e-9, bounds.most * 2):
        with pytest.raises(ConfigError, match=f"{name}="):
            parse_device(described(value))


def test_the_state_of_a_checkpoint_holds_the_digests_of_the_model() -> None:
    state = {
        **{"origin": {"settings": {}, "data": {}, "model": {"weights": "0a", "vocabulary": None}}, "same": {}},
        **{"metrics_bytes": 0, "ledger_bytes": 0, "stale": [], "validation": {}, "plan": "plan.json"},
        **{"seconds": {}, "peak": {}, "round_seconds": {}, "reused_seconds": 0.0, "history": {}, "over": False},
    }
    assert STATE(from_json(to_json(state)), "") == ""
    assert "model.weights is 3" in STATE(with_value(state, ("origin", "model", "weights"), 3), "")
    with pytest.raises(CheckpointError):
        read_json(Path("nowhere/state.json"))
