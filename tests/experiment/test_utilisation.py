import pytest

from atlas_fl.experiment.summary import utilisation

PLAN = {
    "clients": [
        {"name": "a", "memory": {"total": 200}, "predicted": {"memory_bytes": 50, "seconds": 10.0}},
        {"name": "b", "memory": {"total": 100}, "predicted": {"memory_bytes": 90, "seconds": 40.0}},
        {"name": "c"},
    ]
}


def trained(round: int, client: str, seconds: float) -> dict[str, object]:
    return {"round": round, "client": client, "split": "train", "seconds": seconds}


METRICS = [trained(1, "a", 2.0), trained(1, "b", 3.0), trained(2, "a", 1.0), trained(2, "c", 1.0)]
OTHERS = [{"round": 2, "client": "b", "split": "test", "seconds": 9.0}, {"round": 1, "event": "mixed"}]


def test_shares_by_hand() -> None:
    found = utilisation(PLAN, [*METRICS, *OTHERS], {1: 6.0, 2: 4.0})
    # the slowest takes 40 s in round one and 10 s in round two, where b does not train
    assert found["a"] == pytest.approx({"memory": 0.25, "busy": 20 / 50, "measured": 0.3})
    assert found["b"] == pytest.approx({"memory": 0.9, "busy": 40 / 50, "measured": 0.3})
    assert found["c"] == pytest.approx({"measured": 0.1}), "what is not predicted is left out"


def test_the_slowest_client_of_every_round_is_always_busy() -> None:
    always = [trained(at, name, 1.0) for at in (1, 2) for name in ("a", "b")]
    assert utilisation(PLAN, always, {})["b"]["busy"] == 1.0
    assert utilisation(PLAN, always, {})["a"] == pytest.approx({"memory": 0.25, "busy": 0.25})


def test_nothing_is_invented_for_a_run_of_nothing() -> None:
    assert utilisation({}, [], {}) == {}
    assert utilisation(PLAN, [], {}) == {"a": {"memory": 0.25}, "b": {"memory": 0.9}, "c": {}}
