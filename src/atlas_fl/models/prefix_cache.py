"""Frozen prefix: what enters the first adapted block, computed once for each example and kept in memory.

Where the lowest blocks carry no adapters, their output depends on the example alone, and rounds, epochs and evaluations
repeat it. Nothing in it is random: the frozen model is in evaluation mode, and dropout is that of adapters and head.

The last bits of a matrix product depend on the number of its rows, and those of attention on what is padded, so the
states of an example differ from one row of tokens to another. (Measured on MiniLM, on a CPU: of 450 examples 39 had
other states alone than in rows of 16, by up to 6e-6.) Therefore states are always computed in fixed chunks of the split
that an example stands in, whether they are kept or not: the same shapes, and so the same bits under any budget.
One example at a time would be exact too and takes two to four times as long, because its products have few rows.

Examples that stand in no split, such as augmented images, are a chunk by themselves and are never kept.

Splits are told apart by their content.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from atlas_fl.models.tokenization import EncodedExamples

CPU_CHUNK_TOKENS, CUDA_CHUNK_TOKENS = 64, 1024
"""Tokens of a chunk. With more of them the products are hardly faster, and whoever needs one example that is not kept
computes more of its neighbours."""

Compute: TypeAlias = Callable[[EncodedExamples], Tensor]
"""(examples) -> their states (tokens, width), in their order, without a gradient."""


@dataclass(kw_only=True, eq=False)
class Chunks:
    """The chunks of one split, and what is kept of them."""

    members: tuple[np.ndarray, ...]
    """By chunk, the places of its examples in the split, (examples,) int64."""
    chunk: np.ndarray
    """The chunk of every example of the split, (n,) int64."""
    start: np.ndarray
    """Its first token inside the chunk, (n,) int64."""
    kept: dict[int, Tensor] = field(default_factory=dict)
    """States of chunks, (tokens, width)."""


def make_chunks(lengths: np.ndarray, *, tokens: int) -> Chunks:
    """Chunks of about `tokens` tokens of examples of these lengths, (n,) int64; short ones first: less is padded.

    >>> [chunk.tolist() for chunk in make_chunks(np.array([5, 3, 9, 3, 70, 2]), tokens=10).members]
    [[5, 1, 3, 0], [2], [4]]
    """
    order = np.argsort(lengths, kind="stable")
    begin = np.cumsum(lengths[order]) - lengths[order]
    first = np.flatnonzero(np.diff(begin // tokens, prepend=-1))
    members = tuple(np.split(order, first[1:]))
    chunk, start = np.empty_like(order), np.empty_like(order)
    for number, places in enumerate(members):
        chunk[places] = number
        start[places] = np.cumsum(lengths[places]) - lengths[places]
    return Chunks(members=members, chunk=chunk, start=start)


@dataclass(kw_only=True, eq=False)
class PrefixCache:
    """The states of examples at the input of the first adapted block, kept up to a number of bytes.

    What comes first stays: every pass takes the same examples in another order, and would push out what the next one
    needs.
    """

    budget_bytes: int = 0
    """Most bytes of states that are kept in memory."""
    chunk_tokens: int = CPU_CHUNK_TOKENS
    """Tokens of a chunk, which decide the last bits."""
    used_bytes: int = 0
    """Bytes of the states that are kept."""
    _splits: dict[str, Chunks] = field(default_factory=dict)

    def states(self, examples: EncodedExamples, compute: Compute) -> Tensor:
        """The states (tokens, width) of these examples, in their order."""
        if examples.taken_from is None:
            return compute(examples)
        split, places = examples.taken_from
        if split.digest not in self._splits:
            self._splits[split.digest] = make_chunks(split.lengths, tokens=self.chunk_tokens)
        chunks = self._splits[split.digest]
        by_chunk = {
            number: self._chunk_states(split, chunks, number, compute)
            for number in np.unique(chunks.chunk[places]).tolist()
        }
        spans = zip(
            chunks.chunk[places].tolist(), chunks.start[places].tolist(), examples.lengths.tolist(), strict=True
        )
        return torch.cat([by_chunk[number][start : start + length] for number, start, length in spans])

    def _chunk_states(self, split: EncodedExamples, chunks: Chunks, number: int, compute: Compute) -> Tensor:
        if number in chunks.kept:
            return chunks.kept[number]
        states = compute(split.take(chunks.members[number]))
        if self.used_bytes + states.nbytes <= self.budget_bytes:
            chunks.kept[number] = states
            self.used_bytes += states.nbytes
        return states
