"""Tokenised examples: flat arrays with offsets, so that a batch is a few slices and nothing is padded.

The tokens of an image are its patches. The model itself makes them of pixels, so that they have a number and no ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from atlas_fl.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """`n` tokenised examples with their labels."""

    ids: np.ndarray  # (tokens,) int64; of images none
    types: np.ndarray  # (tokens,) int64, which text of a pair a token belongs to; of images none
    offsets: np.ndarray  # (n + 1,) int64
    labels: np.ndarray  # (n,) int64, or float32 for regression
    written: np.ndarray | None = None  # (tokens,) bool, the tokens that are to be predicted; None where labels are
    pixels: np.ndarray | None = None  # (n, height, width, channels) uint8; None of texts
    counts: np.ndarray | None = None  # (n,) int64, how many of `written` each example has, where they have no places

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every example, (n,) int64."""
        return np.diff(self.offsets)

    @property
    def predictions(self) -> np.ndarray:
        """Tokens to be predicted of every example, (n,) int64; none where labels are."""
        if self.counts is not None:
            return self.counts
        if self.written is None:
            return np.zeros(len(self), dtype=np.int64)
        return np.diff(np.concatenate([[0], np.cumsum(self.written)])[self.offsets])

    def take(self, index: np.ndarray) -> "Encoded":
        """These examples, in this order."""
        lengths = self.lengths[index]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        if self.pixels is not None:
            return replace(self, offsets=offsets, labels=self.labels[index], pixels=self.pixels[index])
        # The place of every token: its example's start, plus its place inside the example.
        where = np.repeat(self.offsets[index] - offsets[:-1], lengths) + np.arange(offsets[-1])
        written = None if self.written is None else self.written[where]
        return Encoded(
            ids=self.ids[where], types=self.types[where], offsets=offsets, labels=self.labels[index], written=written
        )


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


def encode_images(pixels: np.ndarray, labels: np.ndarray, *, length: int) -> Encoded:
    """Images, (n, height, width, channels) uint8, as examples of `length` tokens each."""
    none = np.zeros(0, dtype=np.int64)
    return Encoded(ids=none, types=none, offsets=np.arange(len(labels) + 1) * length, labels=labels, pixels=pixels)


def encode_written(
    text: Sequence[str], target: Sequence[str] | None, *, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Encoded:
    """Texts that a model is to write, up to an end-of-text token: all tokens but the first, or `target` after `text`.

    A prompt ends with a line break. Where both are longer than `max_length` together, the prompt loses its beginning
    and then the target its end.
    """
    end = _end_of_text(tokenizer)
    if target is None:
        whole = [[*ids, end][:max_length] for ids in _ids(text, tokenizer)]
        return _joined([(ids[:1], ids[1:]) for ids in whole])
    written = [[*ids, end][: max_length - 1] for ids in _ids(target, tokenizer, add_special_tokens=False)]
    prompts = _ids([one + "\n" for one in text], tokenizer)
    return _joined([(_cut(ids, max_length - len(own), tokenizer), own) for ids, own in zip(prompts, written)])


def encode_prompts(text: Sequence[str], *, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Encoded:
    """Prompts alone, as `encode_written` gives them, with nothing to be predicted."""
    rows = _joined([(_cut(ids, max_length, tokenizer), []) for ids in _ids([one + "\n" for one in text], tokenizer)])
    return Encoded(ids=rows.ids, types=rows.types, offsets=rows.offsets, labels=rows.labels)


def _end_of_text(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no end-of-text token, without which no text ends; set"
            " eos_token in its tokenizer_config.json"
        )
    return int(tokenizer.eos_token_id)


def _ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, **how: bool) -> list[list[int]]:
    """Every text's tokens; a text of which the tokenizer knows none begins at the end of another."""
    rows: list[list[int]] = tokenizer(list(texts), return_attention_mask=False, verbose=False, **how)["input_ids"]
    return [list(row) or [_end_of_text(tokenizer)] for row in rows]


def _cut(ids: list[int], room: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The last tokens of a prompt, behind the one that begins every text where the tokenizer sets such."""
    if len(ids) <= room:
        return ids
    begin = [ids[0]] if ids[0] == tokenizer.bos_token_id and room > 1 else []
    return begin + ids[len(ids) - room + len(begin) :]


def _joined(rows: Sequence[tuple[list[int], list[int]]]) -> Encoded:
    """Examples of (given tokens, tokens to be predicted)."""
    sizes = [len(given) + len(own) for given, own in rows]
    ids = np.asarray([token for given, own in rows for token in (*given, *own)], dtype=np.int64)
    return Encoded(
        ids=ids,
        types=np.zeros_like(ids),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        labels=np.zeros(len(rows), dtype=np.int64),
        written=np.concatenate([np.repeat([False, True], [len(given), len(own)]) for given, own in rows]),
    )
