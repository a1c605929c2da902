import copy
from itertools import product

import pytest

from atlas_fl.experiment.summary import summarise
from atlas_fl.storage.jsonl import from_json, to_json
from tests.experiment.test_scores import row as metric

CLIENTS = ("a-0", "a-1", "b-0")
REFUSED = {"round": 2, "client": "b-0", "event": "refused", "reason": "head.bias holds NaN"}
SCORED = [(client, at, split) for client in CLIENTS for at in (1, 2) for split in ("train", "test")]
SCORED.remove(("b-0", 2, "train"))
METRICS = [*(metric(client, at, split, 0.5 + 0.1 * at) for client, at, split in SCORED), REFUSED]
LEDGER = [
    {"round": 0, "client": "a-0", "direction": "up", "kind": "fingerprint", "bytes": 40},
    *(
        {"round": at, "client": client, "direction": way, "kind": "adapter", "bytes": 10}
        for at, client, way in product((1, 2), CLIENTS, ("up", "down"))
    ),
]
PLANNED = {"device": "cpu_2gb", "cluster": 0, "ranks": [4, 8], "examples": 200, "cut": None, "budget_bytes": 8}
PLAN = {
    "clients": [
        {"name": name, "task": name[0], **PLANNED}
        | {"memory": {"total": 200}, "predicted": {"memory_bytes": 50, "seconds": seconds}}
        for name, seconds in (("a-0", 10.0), ("a-1", 10.0), ("b-0", 40.0))
    ],
    "clustering": {"method": "corrected", "labels": [0, 0, 1], "agreement": {"purity": 1.0}, "similarity": [[1.0]]},
}


def outcome(**changes):
    given = {
        "run": {"name": "x", "seed": 1, "config_hash": "abc"},
        "metrics": METRICS,
        "ledger": LEDGER,
        "plan": PLAN,
        "phase_seconds": {"plan": 2.0, "train": 5.0},
        "memory": {"rss_bytes": 10},
        "full_model_bytes": 1000,
        "round_seconds": {1: 3.0, 2: 4.0},
    }
    return summarise(**(given | changes))


def test_bytes_by_hand() -> None:
    found = outcome()["bytes"]
    assert (found["up"], found["down"], found["total"]) == (100, 60, 160)
    assert found["by_kind"] == {"fingerprint": {"up": 40, "down": 0}, "adapter": {"up": 60, "down": 60}}
    assert found["by_round"] == {"0": {"up": 40, "down": 0}, "1": {"up": 30, "down": 30}, "2": {"up": 30, "down": 30}}
    # 3 clients in 2 rounds, the refused one included, the whole model of 1000 bytes down and up: 12,000
    assert found["full_model"] == {"total": 12_000, "reduction": pytest.approx(1 - 160 / 12_000)}


def test_a_local_run_sends_nothing_and_saves_everything() -> None:
    found = outcome(ledger=[])
    assert found["bytes"]["total"] == 0
    assert found["bytes"]["full_model"]["reduction"] == 1.0
    assert found["clients"]["a-0"]["bytes"] == {"up": 0, "down": 0}


def test_no_reduction_is_invented() -> None:
    assert "full_model" not in outcome(metrics=[])["bytes"]


def test_clients_of_several_tasks_are_of_one_site() -> None:
    """a-Nord ends with 0.7 and b-Nord with 0.5; a-0 and b-0 are called alike and are dealt out, so of no one site."""
    assert "sites" not in outcome()
    names = {"a-0": "a-Nord", "a-1": "a-South", "b-0": "b-Nord"}
    rows = [{**row, "client": names[row["client"]]} for row in METRICS]
    rows = [{**row, "primary": 0.5} if row["client"] == "b-Nord" and "primary" in row else row for row in rows]
    planned = [{**client, "name": names[client["name"]]} for client in PLAN["clients"]]
    found = outcome(metrics=rows, ledger=[], plan={**PLAN, "clients": planned})
    sites = {site: (group["names"], group["clients"]) for site, group in found["sites"].items()}
    assert sites == {"Nord": (["a-Nord", "b-Nord"], 2), "South": (["a-South"], 1)}
    assert found["sites"]["Nord"]["final"]["test"]["primary"] == pytest.approx(0.6)
    assert found["sites"]["Nord"]["final"]["worst_client"]["client"] == "b-Nord"


def test_clients_carry_what_was_planned_and_what_came_out() -> None:
    found = outcome()["clients"]
    assert list(found) == list(CLIENTS)
    assert found["a-0"]["ranks"] == [4, 8]
    assert found["a-0"]["cut"] is None
    # b-0 does not train in round two: the slowest take 40 s and 10 s
    assert found["a-0"]["utilisation"] == pytest.approx({"memory": 0.25, "busy": 20 / 50})
    assert found["b-0"]["utilisation"] == pytest.approx({"memory": 0.25, "busy": 40 / 50})
    assert found["a-0"]["bytes"] == {"up": 60, "down": 20}
    assert found["a-0"]["final"]["test"]["accuracy"] == pytest.approx(0.7)


def test_groups_events_seconds_and_the_rest() -> None:
    found = outcome()
    assert list(found["tasks"]) == ["a", "b"]
    assert found["tasks"]["a"]["clients"] == 2
    assert found["overall"]["final"]["test"]["gain_over_majority"] == pytest.approx(0.2)
    told = {key: REFUSED[key] for key in ("round", "client", "reason")}
    assert found["events"] == {"count": {"refused": 1}, "refused": [told]}
    rounds = {"rounds": {"1": 3.0, "2": 4.0}, "round_mean": 3.5}
    assert found["seconds"] == {"phases": {"plan": 2.0, "train": 5.0}, "total": 7.0, **rounds}
    assert found["run"] == {"name": "x", "seed": 1, "config_hash": "abc", "rounds": 2}


def test_clients_without_a_row_yet_are_counted() -> None:
    found = outcome(metrics=[metric("a-1", 1, "train", 0.5)])
    assert (found["tasks"]["a"]["clients"], found["overall"]["clients"]) == (2, 3)
    assert list(found["clients"]) == ["a-1"]


def test_the_best_round_is_that_of_the_mean_over_clients_and_a_stop_is_named() -> None:
    scores = {"a-0": (0.5, 0.9, 0.1), "a-1": (0.8, 0.6, 0.6)}  # means .65, .75, .35; a-1 alone was best in the first
    rows = [metric(name, at, "validation", own[at - 1]) for name, own in scores.items() for at in (1, 2, 3)]
    found = outcome(metrics=[*rows, {"round": 3, "event": "stopped early", "best_round": 2, "validation": 0.75}])
    assert found["best"] == {"round": 2, "validation": pytest.approx(0.75)}
    assert found["stopped"] == {"round": 3}
    assert "stopped" not in outcome(metrics=rows)


def test_a_run_of_nothing_has_a_summary() -> None:
    found = outcome(metrics=[], ledger=[], phase_seconds={}, round_seconds={})
    assert found["clients"] == found["tasks"] == {}
    assert found["seconds"] == {"phases": {}, "total": 0, "rounds": {}, "round_mean": 0}


def test_the_summary_is_strict_json_and_nothing_is_changed() -> None:
    before = copy.deepcopy((METRICS, LEDGER, PLAN))
    found = outcome()
    assert from_json(to_json(found)) == found
    assert before == (METRICS, LEDGER, PLAN)
