"""Early stopping and model selection from the validation scores of the rounds.

Patience is that of Goodfellow, Bengio, Courville, Deep Learning (2016), algorithm 7.1, counted in rounds and not in
evaluations, so that a coarser `--eval-every` does not stretch it.
"""

from collections.abc import Mapping


def best_rounds(scores: Mapping[int, float], count: int) -> tuple[int, ...]:
    """The rounds with the highest scores, at most `count`, the best first and the earlier of equals first.

    >>> best_rounds({1: 0.5, 2: 0.75, 3: 0.75, 4: 0.25}, 2)
    (2, 3)
    """
    return tuple(sorted(scores, key=lambda round: (-scores[round], round))[:count])


def last_improvement(scores: Mapping[int, float], *, min_delta: float = 0.0) -> int:
    """The last round whose score exceeds that of the last better one before it by more than `min_delta`.

    The first round that was evaluated counts as better than nothing; without scores it is round 0. Small steps add up:

    >>> last_improvement({1: 0.5, 2: 0.5625, 3: 0.625, 4: 0.625}, min_delta=0.1)
    3
    """
    last, best = 0, float("-inf")
    for round in sorted(scores):
        if scores[round] - best > min_delta:
            last, best = round, scores[round]
    return last


def should_stop(scores: Mapping[int, float], *, patience: int, min_delta: float = 0.0) -> bool:
    """True if the newest score is `patience` rounds or more behind the last better one; never with a patience of 0.

    >>> [should_stop({1: 0.5, 2: 0.25, 3: 0.5}, patience=rounds) for rounds in (0, 1, 2, 3)]
    [False, True, True, False]
    """
    if not patience or not scores:
        return False
    return max(scores) - last_improvement(scores, min_delta=min_delta) >= patience
