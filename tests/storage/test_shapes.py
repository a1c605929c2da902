"""Shapes of JSON: the first fault is told with its place, and unknown names are allowed."""

from pathlib import Path

import pytest

from atlas_fl.errors import CheckpointError
from atlas_fl.storage.json_shapes import (
    DIGESTS,
    PLAN,
    SUMMARY,
    check_shape,
    ledger_row,
    list_of,
    metrics_row,
    require_fields,
)

CLIENT = {"name": "a-0", "task": "a", "ranks": [4, 8], "cluster": -1}
PLANNED = {"clients": [CLIENT, {**CLIENT, "name": "a-1"}], "adjacency": [[0, 0.5], [0.5, 0]], "layer_of": {"q": 1}}
SCORED = {"round": 1, "client": "a-0", "task": "a", "split": "test", "loss": 1e200, "accuracy": 0.5}
SENT = {"round": 0, "client": "a-0", "direction": "up", "kind": "head", "bytes": 3}


def test_what_a_run_writes_fits() -> None:
    assert PLAN({**PLANNED, "younger": 1}, "") == ""
    assert metrics_row(SCORED, "") == metrics_row({"round": 1, "event": "mixed", "spread": 2.0}, "") == ""
    assert ledger_row(SENT, "") == ""
    assert SUMMARY({"run": {"rounds": 3}, "overall": {"final": {"test": {"primary": 0.5}}}}, "") == ""


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"clients": []}, "clients is [] and no list of 1 or more"),
        ({"clients": [CLIENT, CLIENT]}, "two clients have one name"),
        ({"clients": [{"name": "a-0"}]}, "clients[0] lacks 'task'"),
        ({"clients": [{**CLIENT, "ranks": [1, True]}]}, "clients[0].ranks[1] is True and no whole number from 0"),
        ({"adjacency": [[0.0]]}, "adjacency is no matrix of 2 x 2"),
        ({"adjacency": [[0, 1e19], [0, 0]]}, "adjacency[0][1] is 1e+19 and no number"),
        ({"layer_of": {"q": 2}}, "layer_of names a layer without ranks"),
        ({"importance": [[1.0], [1.0, 2.0]]}, "importance has not a row of every layer for 2 clients"),
        ({"notes": "text"}, "notes is 'text' and no list"),
    ],
)
def test_the_first_fault_of_a_plan_is_told_with_its_place(change: dict[str, object], fault: str) -> None:
    assert PLAN({**PLANNED, **change}, "") == fault


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ([], "[3] is [] and no mapping"),
        ({**SCORED, "task": None}, "[3].task is None and no text"),
        ({**SCORED, "loss": "0.5"}, "[3].loss is '0.5' and no number"),
        ({**SCORED, "classes": {"hits": [1], "examples": []}}, "[3].classes has unequal lists"),
        ({"round": 1}, "[3] lacks 'event'"),
        ({"round": 1, "event": "refused", "client": "a-0"}, "[3] lacks 'reason'"),
    ],
)
def test_a_row_is_told_by_its_number(row: object, fault: str) -> None:
    assert list_of(metrics_row)([SCORED, SCORED, SCORED, row], "") == fault


@pytest.mark.parametrize(
    "change",
    [
        {"direction": "left"},
        {"kind": []},
        {"kind": "gossip"},
        {"bytes": -1},
        {"bytes": 1.5},
        {"peer": 3},
        {"strange": 1},
    ],
)
def test_a_ledger_row_of_another_kind_is_none(change: dict[str, object]) -> None:
    assert ledger_row({**SENT, **change}, "[0]").startswith("[0]")


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "", "a\0b"])
def test_digests_are_of_files_inside_the_folder(name: str) -> None:
    assert "no file inside the folder" in DIGESTS({name: "00"}, "")
    assert DIGESTS({"adapters/a-0/labels.json": "00"}, "") == ""


def test_the_message_names_file_fault_and_remedy() -> None:
    with pytest.raises(CheckpointError, match=r"^damaged file run/summary\.json: it lacks 'run'; restore it from"):
        require_fields({}, "run", file=Path("run/summary.json"))
    with pytest.raises(CheckpointError, match=r"^damaged file x: it is 3 and no mapping; restore it"):
        check_shape(3, SUMMARY, file=Path("x"))
