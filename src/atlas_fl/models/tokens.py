"""Tokenised examples: flat arrays with offsets, so that a batch is a few slices and nothing is padded."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """`n` tokenised examples with their labels."""

    ids: np.ndarray  # (tokens,) int64
    types: np.ndarray  # (tokens,) int64, which text of a pair a token belongs to
    offsets: np.ndarray  # (n + 1,) int64
    labels: np.ndarray  # (n,) int64, or float32 for regression

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every example, (n,) int64."""
        return np.diff(self.offsets)

    def take(self, index: np.ndarray) -> "Encoded":
        """These examples, in this order."""
        lengths = self.lengths[index]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        # The place of every token: its example's start, plus its place inside the example.
        where = np.repeat(self.offsets[index] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Encoded(ids=self.ids[where], types=self.types[where], offsets=offsets, labels=self.labels[index])


def encode(
    text: Sequence[str],
    pair: Sequence[str] | None,
    labels: np.ndarray,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
) -> Encoded:
    """The examples as tokens, cut to `max_length` (of a pair, the longer text is cut first)."""
    batch = tokenizer(
        list(text),
        None if pair is None else list(pair),
        truncation=True,
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids=True,
    )
    ids = batch["input_ids"]
    return Encoded(
        ids=np.concatenate([np.asarray(row, dtype=np.int64) for row in ids]),
        types=np.concatenate([np.asarray(row, dtype=np.int64) for row in batch["token_type_ids"]]),
        offsets=np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64),
        labels=labels,
    )
