import random

from hypothesis import given
from hypothesis import strategies as st

from atlas_fl.experiment.summary import best_rounds, last_improvement, should_stop

SCORES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.625, 0.75, 1.0]), min_size=1, max_size=12)


def numbered(values: list[float], every: int = 1) -> dict[int, float]:
    return {every * place: value for place, value in enumerate(values, start=1)}


def loop(values: list[float], *, patience: int, min_delta: float) -> int | None:
    """The published algorithm: count up, and down to nothing when it gets better."""
    best, waited = float("-inf"), 0
    for place, value in enumerate(values, start=1):
        waited += 1
        if value - best > min_delta:
            best, waited = value, 0
        if waited >= patience:
            return place
    return None


@given(values=SCORES, patience=st.integers(1, 5), min_delta=st.sampled_from([0.0, 0.125, 0.3]))
def test_a_run_stops_where_the_loop_with_a_counter_does(values: list[float], patience: int, min_delta: float) -> None:
    rule = {"patience": patience, "min_delta": min_delta}
    stops = [at for at in range(1, len(values) + 1) if should_stop(numbered(values[:at]), **rule)]
    assert (stops[0] if stops else None) == loop(values, **rule)


def test_patience_is_counted_in_rounds_and_not_in_evaluations() -> None:
    every_fifth = numbered([0.5, 0.25, 0.25], every=5)
    assert should_stop(every_fifth, patience=10)
    assert not should_stop(every_fifth, patience=11)


def test_without_scores_or_patience_nothing_stops() -> None:
    assert not should_stop({}, patience=1)
    assert not should_stop(numbered([1.0] + [0.0] * 50), patience=0)
    assert last_improvement({}) == 0


@given(values=SCORES, count=st.integers(0, 13))
def test_the_best_are_the_highest_and_of_equals_the_earliest(values: list[float], count: int) -> None:
    scores = list(numbered(values).items())
    random.Random(0).shuffle(scores)
    chosen = best_rounds(dict(scores), count)
    assert len(chosen) == min(count, len(values))
    ranked = sorted(range(1, len(values) + 1), key=lambda at: values[at - 1], reverse=True)  # stable: earlier first
    assert list(chosen) == ranked[:count]
