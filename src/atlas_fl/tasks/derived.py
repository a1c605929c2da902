"""Labels that follow from how a text was made, not from what a person said of it."""

from collections.abc import Sequence

import numpy as np

from atlas_fl.tasks.spec import Rows

RUN = 5
"""Words that are scrambled."""


def scramble(sentences: Sequence[str], rng: np.random.Generator) -> Rows:
    """Every sentence once, every second one with a run of five words in another order; label 1 is the untouched one.

    The first and the last word stay, since a capital or a full stop in the middle would give the label away;
    sentences of fewer than seven words are left out.
    """
    usable = [words for words in map(str.split, sentences) if _has_orders(words)]
    labels = rng.permutation(np.arange(len(usable)) % 2)
    text = [" ".join(words if label else _scrambled(words, rng)) for words, label in zip(usable, labels)]
    return Rows(text=tuple(text), label=labels.astype(np.int64))


def _has_orders(words: list[str]) -> bool:
    """Whether every run of the sentence has a second order, as "no no no no no" has not."""
    runs = [words[start : start + RUN] for start in range(1, len(words) - RUN)]
    return bool(runs) and all(len({word.casefold() for word in run}) > 1 for run in runs)


def _scrambled(words: list[str], rng: np.random.Generator) -> list[str]:
    start = int(rng.integers(1, len(words) - RUN))
    run = words[start : start + RUN]
    folded = [word.casefold() for word in run]
    while True:
        order = rng.permutation(RUN)
        if [folded[i] for i in order] != folded:
            return words[:start] + [run[i] for i in order] + words[start + RUN :]


def answer_types(questions: Sequence[str], types: Sequence[str], rng: np.random.Generator) -> Rows:
    """Every question once with the description of an answer type; label 1 if it is the question's own.

    `types` holds each question's own description. A wrong one is that of a question drawn at random, so that
    frequent types are as frequent among the wrong as among the right ones and the description alone tells little.
    """
    assert len(set(types)) > 1, "a wrong type needs a second type"
    labels = rng.permutation(np.arange(len(questions)) % 2)
    pair = [own if label else _other(own, types, rng) for own, label in zip(types, labels)]
    return Rows(text=tuple(questions), pair=tuple(pair), label=labels.astype(np.int64))


def _other(own: str, types: Sequence[str], rng: np.random.Generator) -> str:
    while True:
        drawn = types[int(rng.integers(len(types)))]
        if drawn != own:
            return drawn
