"""The cache of what enters the first adapted block: chunks, budget, order."""

import numpy as np
import pytest
import torch
from torch import Tensor

from atlas_fl.models.prefix_cache import PrefixCache, make_chunks
from atlas_fl.models.tokenization import EncodedExamples

LENGTHS = np.array([5, 3, 9, 3, 20, 2])


def split_of(lengths: np.ndarray) -> EncodedExamples:
    """Examples whose tokens are 100 times their place in the split and their own place."""
    ids = np.concatenate([100 * place + np.arange(length) for place, length in enumerate(lengths)])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return EncodedExamples(ids=ids, types=np.zeros_like(ids), offsets=offsets, labels=np.arange(len(lengths)))


class Counted:
    """States that are the tokens themselves, two values wide, with what was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(self, examples: EncodedExamples) -> Tensor:
        self.asked.append(examples.labels.tolist())
        return torch.from_numpy(examples.ids).float()[:, None].repeat(1, 2)


def test_chunks_by_hand() -> None:
    # by length: 5 (2 tokens), 1, 3 (3 each), 0 (5), 2 (9), 4 (20), which begin at tokens 0, 2, 5, 8, 13, 22
    chunks = make_chunks(LENGTHS, tokens=10)
    assert [members.tolist() for members in chunks.members] == [[5, 1, 3, 0], [2], [4]]
    assert chunks.chunk.tolist() == [0, 0, 1, 0, 2, 0]
    assert chunks.start.tolist() == [8, 2, 0, 5, 0, 0]


@pytest.mark.parametrize("budget_bytes", [0, 200, 10**6])
def test_examples_come_in_the_order_in_which_they_are_asked_for(budget_bytes: int) -> None:
    cache, split = PrefixCache(budget_bytes=budget_bytes, chunk_tokens=10), split_of(LENGTHS)
    for order in ([4, 0, 3, 0], [1], [2, 5]):
        batch = split.take(np.array(order))
        states = cache.states(batch, Counted())
        assert states[:, 0].tolist() == batch.ids.tolist() == states[:, 1].tolist()


def test_a_part_of_a_part_is_of_the_same_split() -> None:
    cache, split, compute = PrefixCache(budget_bytes=10**6, chunk_tokens=10), split_of(LENGTHS), Counted()
    cache.states(split.take(np.array([0, 2, 4])), compute)
    part = split.take(np.array([5, 4, 3, 2])).take(np.array([3, 0]))
    assert cache.states(part, compute)[:, 0].tolist() == [*range(200, 209), 500, 501]
    assert compute.asked == [[5, 1, 3, 0], [2], [4]], "once each"


def test_what_is_beyond_the_budget_is_computed_again_in_the_same_chunks() -> None:
    # 13 tokens of two float32 values are 104 bytes, 9 more are 72; 20 more would be 160
    cache, split, compute = PrefixCache(budget_bytes=180, chunk_tokens=10), split_of(LENGTHS), Counted()
    for _ in range(2):
        cache.states(split.take(np.arange(6)), compute)
    assert cache.used_bytes == 176
    assert compute.asked == [[5, 1, 3, 0], [2], [4], [4]]


def test_without_a_budget_nothing_is_kept() -> None:
    cache, split, compute = PrefixCache(chunk_tokens=10), split_of(LENGTHS), Counted()
    for _ in range(2):
        cache.states(split.take(np.array([0, 1, 0])), compute)
    assert cache.used_bytes == 0
    assert compute.asked == [[5, 1, 3, 0]] * 2, "a chunk once for all of a batch's examples in it"


def test_examples_of_no_split_are_computed_as_they_are_and_not_kept() -> None:
    cache, compute = PrefixCache(budget_bytes=10**6, chunk_tokens=10), Counted()
    for _ in range(2):
        assert cache.states(split_of(LENGTHS), compute).shape == (42, 2)
    assert len(compute.asked) == 2 and cache.used_bytes == 0


def test_two_splits_with_the_same_places_are_not_mistaken_for_each_other() -> None:
    cache, compute = PrefixCache(budget_bytes=10**6), Counted()
    first, second = split_of(np.array([2, 1])), split_of(np.array([1, 3]))
    assert cache.states(first.take(np.array([1])), compute)[:, 0].tolist() == [100]
    assert cache.states(second.take(np.array([1])), compute)[:, 0].tolist() == [100, 101, 102]
