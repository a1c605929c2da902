import numpy as np

from atlas_fl.data.embedded import RUN, answer_types, scramble
from atlas_fl.rng import generator

SENTENCES = tuple(" ".join(f"W{n}{i}" for i in range(7 + n % 6)) for n in range(300))


def test_half_of_the_sentences_are_scrambled_and_their_words_and_ends_stay() -> None:
    rows = scramble(SENTENCES, generator(1, "s"))
    assert rows.label.sum() == 150
    for text, label, origin in zip(rows.text, rows.label, SENTENCES):
        now, before = text.split(), origin.split()
        assert (text == origin) == bool(label)
        assert sorted(now) == sorted(before)
        assert (now[0], now[-1]) == (before[0], before[-1])


def test_the_moved_words_lie_in_one_run_of_five() -> None:
    rows = scramble(SENTENCES, generator(1, "s"))
    for text, origin in zip(rows.text, SENTENCES):
        moved = [i for i, (a, b) in enumerate(zip(text.split(), origin.split())) if a != b]
        assert not moved or (len(moved) >= 2 and moved[-1] - moved[0] < RUN)


def test_short_sentences_and_runs_without_a_second_order_are_left_out() -> None:
    assert len(scramble(["one two three four five six", "a no no No no no b", "a b c d e f g"], generator(1))) == 1


def test_a_scrambled_run_differs_in_more_than_case() -> None:
    rows = scramble(["A the The the the x B"] * 50, generator(2))
    for text, label in zip(rows.text, rows.label):
        assert (text.casefold() == "a the the the the x b") == bool(label)


def test_wrong_answer_types_are_wrong_and_as_frequent_as_right_ones() -> None:
    types = ["person"] * 600 + ["place"] * 300 + ["number"] * 100
    rows = answer_types([f"q{i}" for i in range(1000)], types, generator(3))
    assert rows.pair is not None
    assert rows.label.sum() == 500
    for own, told, label in zip(types, rows.pair, rows.label):
        assert (own == told) == bool(label)
    wrong = [told for told, label in zip(rows.pair, rows.label) if not label]
    # Of 500 wrong ones, persons are drawn for the 40% that are none: .3 * .6/.7 + .1 * .6/.9 = .324.
    assert abs(np.mean([told == "person" for told in wrong]) - 0.324) < 0.06
