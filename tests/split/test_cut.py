import dataclasses

import pytest

from atlas_fl.planning.ranks_and_cuts import SCORE_WEIGHTS, Candidate, choose_cut, score_cut, score_terms

EVEN = Candidate(blocks=2, memory=0.5, importance=0.6, client_seconds=3.0, server_seconds=1.0, link_seconds=4.0)


def changed(**values: float) -> Candidate:
    return dataclasses.replace(EVEN, **values)


def test_the_score_by_hand() -> None:
    assert score_terms(EVEN) == pytest.approx(
        {"memory": 0.5, "communication": 0.5, "importance": 0.6, "balance": 1 / 3}
    )
    assert score_cut(EVEN) == pytest.approx(0.35 * 0.5 + 0.30 * 0.5 + 0.25 * 0.6 + 0.10 / 3)
    assert sum(SCORE_WEIGHTS.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    "better",
    [{"memory": 0.4}, {"link_seconds": 3.0}, {"importance": 0.7}, {"server_seconds": 3.0, "link_seconds": 6.0}],
)
def test_each_part_moves_the_score_the_right_way(better: dict[str, float]) -> None:
    assert score_cut(changed(**better)) > score_cut(EVEN)
    assert choose_cut([EVEN, changed(blocks=3, **better)], "score")[0].blocks == 3


def test_time_and_score_may_disagree_and_both_say_why() -> None:
    slow = changed(blocks=1, memory=0.1, link_seconds=5.0)
    assert choose_cut([EVEN, slow], "time") == (EVEN, "smallest round time, 8.0 s, of 2 that fit")
    best, reason = choose_cut([EVEN, slow], "score")
    assert best is slow
    parts = "memory 0.90, communication 0.44, importance 0.60, balance 0.33"
    assert reason == f"best score, 0.63, of 2 that fit ({parts})"


@pytest.mark.parametrize("objective", ["score", "time"])
def test_equal_cuts_leave_fewer_blocks_on_the_client(objective) -> None:
    cuts = [changed(blocks=blocks) for blocks in (3, 1, 2)]
    assert choose_cut(cuts, objective)[0].blocks == 1


def test_a_round_of_no_time_is_no_division_by_zero() -> None:
    free = changed(client_seconds=0.0, server_seconds=0.0, link_seconds=0.0)
    assert score_terms(free) == {"memory": 0.5, "communication": 1.0, "importance": 0.6, "balance": 1.0}
