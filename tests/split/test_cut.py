from dataclasses import replace

import numpy as np
import pytest

from atlas_fl.planning.ranks_and_cuts import SCORE_WEIGHTS, ClientFit, choose_cut, score_cut, score_terms
from atlas_fl.ranks.allocation import RankAssignment
from atlas_fl.ranks.cost_model import Memory, RoundPrediction
from atlas_fl.split.channel import Cut

IMPORTANCE = np.array([0.1, 0.3, 0.6])
ROUND = RoundPrediction(
    up_bytes=0,
    down_bytes=0,
    flops=0.0,
    compute_seconds=3.0,
    server_seconds=1.0,
    transfer_seconds=4.0,
    memory=Memory(total_bytes=100, parts={"weights": 30, "activations": 20}),
)
RANKS = RankAssignment(ranks=(4, 4, 4), budget_bytes=0, largest_rank=4, notes=())


def fit(*, blocks: int = 2, memory: int = 50, **seconds: float) -> ClientFit:
    prediction = replace(ROUND, memory=Memory(total_bytes=100, parts={"all": memory}), **seconds)
    return ClientFit(assignment=RANKS, prediction=prediction, cut=Cut(blocks=blocks), reason="")


EVEN = fit()


def test_the_score_by_hand() -> None:
    assert score_terms(EVEN, IMPORTANCE) == pytest.approx(
        {"memory": 0.5, "communication": 0.5, "importance": 0.6, "balance": 1 / 3}
    )
    assert score_cut(EVEN, IMPORTANCE) == pytest.approx(0.35 * 0.5 + 0.30 * 0.5 + 0.25 * 0.6 + 0.10 / 3)
    assert sum(SCORE_WEIGHTS.values()) == pytest.approx(1)


MORE_EVEN = {"server_seconds": 3.0, "transfer_seconds": 6.0}


@pytest.mark.parametrize("better", [{"memory": 40}, {"transfer_seconds": 3.0}, {"blocks": 1}, MORE_EVEN])
def test_each_part_moves_the_score_the_right_way(better: dict[str, float]) -> None:
    best = fit(**better)  # type: ignore[arg-type]
    assert score_cut(best, IMPORTANCE) > score_cut(EVEN, IMPORTANCE)
    assert choose_cut([EVEN, best], IMPORTANCE, "score")[0] is best


def test_time_and_score_may_disagree_and_both_say_why() -> None:
    slow = fit(memory=10, transfer_seconds=5.0)
    assert choose_cut([slow, EVEN], IMPORTANCE, "time") == (EVEN, "smallest round time, 8.0 s, of 2 that fit")
    best, reason = choose_cut([slow, EVEN], IMPORTANCE, "score")
    assert best is slow
    parts = "memory 0.90, communication 0.44, importance 0.60, balance 0.33"
    assert reason == f"best score, 0.63, of 2 that fit ({parts})"


@pytest.mark.parametrize("objective", ["score", "time"])
def test_equal_cuts_leave_fewer_blocks_on_the_client(objective: str) -> None:
    cuts = [fit(blocks=blocks) for blocks in (1, 2)]
    assert choose_cut(cuts, np.array([0.0, 0.0, 1.0]), objective)[0].cut == Cut(blocks=1)


def test_a_round_of_no_time_is_no_division_by_zero() -> None:
    free = fit(compute_seconds=0.0, server_seconds=0.0, transfer_seconds=0.0)
    terms = score_terms(free, IMPORTANCE)
    assert terms == pytest.approx({"memory": 0.5, "communication": 1.0, "importance": 0.6, "balance": 1.0})
