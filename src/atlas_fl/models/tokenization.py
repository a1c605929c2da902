"""Tokenised examples: flat arrays with offsets, so that a batch is a few slices and nothing is padded.

The tokens of an image are its patches. The model itself makes them of pixels, so that they have a number and no ids.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from atlas_fl.errors import ModelError, short_repr
from atlas_fl.frozen import Frozen
from atlas_fl.models.chat_template import ChatTemplate
from atlas_fl.params import Truncation

Kind = TypeVar("Kind")


class EncodedExamples(Frozen, eq=False):
    """`n` tokenised examples with their labels."""

    ids: np.ndarray  # (tokens,) int64; of images none
    types: np.ndarray  # (tokens,) int64, which text of a pair a token belongs to; of images none
    offsets: np.ndarray  # (n + 1,) int64
    labels: np.ndarray  # (n,) int64, or float32 for regression; (n, labels) float32 where a row has several
    target_mask: np.ndarray | None = None  # (tokens,) bool, the tokens that are to be predicted; None where labels are
    pixels: np.ndarray | None = None  # (n, height, width, channels) uint8; None of texts
    target_counts: np.ndarray | None = None
    """(n,) int64, tokens to be predicted of every example, where only their number is known."""
    full_lengths: np.ndarray | None = None
    """(n,) int64, tokens of every example before it was cut; None where none was, and of a part of a split."""
    taken_from: tuple["EncodedExamples", np.ndarray] | None = None
    """(the split that these were taken from, their indices in it, (n,) int64); None of a split itself."""
    rejected: "EncodedExamples | None" = None
    """The rejected answers to the same prompts, `n` examples; only of a split whose preferences are learned."""
    ends: tuple[int, ...] = ()
    """Tokens that end an answer to these prompts, beside the end of text."""

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all arrays: their dtypes, shapes and bytes."""
        texts, state = (self.ids, self.types, self.offsets, self.labels, self.target_mask), sha256()
        for array in (*texts, self.pixels, self.target_counts):
            state.update(b"none" if array is None else f"{array.dtype}{array.shape}".encode())
            state.update(b"" if array is None else np.ascontiguousarray(array).data)
        own = state.hexdigest()
        return own if self.rejected is None else sha256((own + self.rejected.digest).encode()).hexdigest()

    @cached_property
    def both(self) -> "EncodedExamples":
        """All chosen answers and then all rejected ones, 2n; the examples themselves where nothing is rejected."""
        return self if self.rejected is None else concatenate([self, self.rejected])

    def take_pairs(self, index: np.ndarray) -> "EncodedExamples":
        """These chosen answers, in this order, and then their rejected ones."""
        return self.both.take(np.concatenate([index, index + len(self)]))

    @property
    def step_lengths(self) -> np.ndarray:
        """Tokens that a step takes for every example, those of its rejected answer among them, (n,) int64."""
        lengths: np.ndarray = self.both.lengths.reshape(-1, len(self)).sum(axis=0)
        return lengths

    @property
    def step_targets(self) -> np.ndarray:
        """Tokens to be predicted that a step takes for every example, (n,) int64."""
        targets: np.ndarray = self.both.num_targets.reshape(-1, len(self)).sum(axis=0)
        return targets

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every example, (n,) int64."""
        return np.diff(self.offsets)

    @property
    def num_targets(self) -> np.ndarray:
        """Tokens to be predicted of every example, (n,) int64; none where labels are."""
        if self.target_counts is not None:
            return self.target_counts
        if self.target_mask is None:
            return np.zeros(len(self), dtype=np.int64)
        return np.diff(np.concatenate([[0], np.cumsum(self.target_mask)])[self.offsets])

    def take(self, index: np.ndarray) -> "EncodedExamples":
        """These examples, in this order."""
        lengths = self.lengths[index]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        taken_from = (self, index) if self.taken_from is None else (self.taken_from[0], self.taken_from[1][index])
        if self.pixels is not None:
            return replace(
                self, offsets=offsets, labels=self.labels[index], pixels=self.pixels[index], taken_from=taken_from
            )
        # The place of every token: its example's start, plus its place inside the example.
        token_index = np.repeat(self.offsets[index] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return EncodedExamples(
            ids=self.ids[token_index],
            types=self.types[token_index],
            offsets=offsets,
            labels=self.labels[index],
            target_mask=None if self.target_mask is None else self.target_mask[token_index],
            taken_from=taken_from,
        )


def concatenate(parts: Sequence[EncodedExamples]) -> EncodedExamples:
    """The examples of these parts, one after another; all have labels, or targets, or are images."""
    pixels = [part.pixels for part in parts if part.pixels is not None]
    masks = [part.target_mask for part in parts if part.target_mask is not None]
    lengths = np.concatenate([part.lengths for part in parts])
    return EncodedExamples(
        ids=np.concatenate([part.ids for part in parts]),
        types=np.concatenate([part.types for part in parts]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        labels=np.concatenate([part.labels for part in parts]),
        target_mask=np.concatenate(masks) if masks else None,
        pixels=np.concatenate(pixels) if pixels else None,
        full_lengths=np.concatenate(
            [part.lengths if part.full_lengths is None else part.full_lengths for part in parts]
        ),
    )


class TextEncoder(Frozen):
    """Texts as examples of at most `max_length` tokens; a longer one loses the part `truncate`."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    truncate: Truncation | None = None

    def examples(self, text: Sequence[str], pair: Sequence[str] | None, labels: np.ndarray) -> EncodedExamples:
        """The examples as tokens, cut to `max_length` (of a pair, the longer text is cut first).

        Without `truncate` a longer text loses what the tokenizer takes, its tail as a rule. Types of tokens are those
        that the tokenizer gives its stock model; where it gives none, they are zero, as the stock model has them.
        """
        batch = self.tokenizer(
            list(text),
            None if pair is None else list(pair),
            truncation=True,
            max_length=self.max_length,
            return_attention_mask=False,
        )
        ids = batch["input_ids"]
        types = batch.get("token_type_ids") or [[0] * len(row) for row in ids]
        full_lengths = np.asarray([len(row) for row in ids], dtype=np.int64)
        if not full_lengths.all():
            empty = text[int(np.flatnonzero(full_lengths == 0)[0])]
            raise ModelError(
                f"the tokenizer of {self.tokenizer.name_or_path!r} gives no token for the text {short_repr(empty)};"
                " take the row out, or give the model the tokenizer that belongs to it"
            )
        longest: list[int] = np.flatnonzero(full_lengths >= self.max_length).tolist()
        if longest:  # only these are encoded again, whole
            whole = self.tokenizer(
                [text[index] for index in longest],
                None if pair is None else [pair[index] for index in longest],
                return_attention_mask=False,
                verbose=False,
            )
            full_lengths[longest] = [len(row) for row in whole["input_ids"]]
            if self.truncate and not self.tokenizer.is_fast:
                raise ModelError(
                    f"truncate={self.truncate} needs a fast tokenizer, and {self.tokenizer.name_or_path!r} has a slow"
                    " one; leave it away, or give the model a tokenizer.json"
                )
            for place, index in enumerate(longest if self.truncate else ()):
                kept = _kept_places(whole.sequence_ids(place), batch.sequence_ids(index), self.truncate)
                ids[index] = [whole["input_ids"][place][token] for token in kept]
                types[index] = [
                    whole["token_type_ids"][place][token] if "token_type_ids" in whole else 0 for token in kept
                ]
        lengths = [len(row) for row in ids]
        return EncodedExamples(
            ids=np.concatenate([np.asarray(row, dtype=np.int64) for row in ids]),
            types=np.concatenate([np.asarray(row, dtype=np.int64) for row in types]),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            labels=labels,
            full_lengths=None if full_lengths.tolist() == lengths else full_lengths,
        )

    def targets(self, text: Sequence[str], target: Sequence[str] | None) -> EncodedExamples:
        """Texts that a model is to write, up to an end-of-text token: all tokens but the first, or `target` alone.

        A prompt ends with a line break. Where both are longer than `max_length` together, the prompt loses its
        beginning, or the part `truncate`, and then the target its end; a text without a prompt loses its end, or that
        part.
        """
        end = self._end_of_text()
        if target is None:
            texts = [[*ids, end] for ids in self._token_ids(text)]
            kept = [_cut(ids, self.max_length, self.truncate) for ids in texts]
            return _concatenate([_answer_after(ids[:1], ids[1:]) for ids in kept], full_lengths=list(map(len, texts)))
        targets = [[*ids, end] for ids in self._token_ids(target, add_special_tokens=False)]
        prompts = self._token_ids([prompt + "\n" for prompt in text])
        rows = []
        for prompt_ids, target_ids in zip(prompts, targets):
            answer = target_ids[: self.max_length - 1]
            rows.append(_answer_after(self._truncate_prompt(prompt_ids, self.max_length - len(answer)), answer))
        return _concatenate(rows, full_lengths=[len(ids) + len(answer) for ids, answer in zip(prompts, targets)])

    def prompts(self, text: Sequence[str]) -> EncodedExamples:
        """Prompts alone, as `targets` gives them, with nothing to be predicted."""
        prompts = self._token_ids([prompt + "\n" for prompt in text])
        return _prompts([self._truncate_prompt(ids, self.max_length) for ids in prompts], prompts)

    def chats(self, chats: Sequence[str], template: ChatTemplate, *, last: bool = False) -> EncodedExamples:
        """Conversations (JSON) in the chat template, whose answers are to be predicted with what ends each.

        With `last` the last answer alone is: of preferences those before are part of the prompt. Without `truncate` a
        longer one loses its tail, or its head where nothing would be left to predict.

        Raises:
            ModelError: an example has nothing to be predicted.
        """
        texts, spans = zip(*map(template.answers, chats), strict=True)
        how = {"add_special_tokens": False, "return_attention_mask": False, "return_offsets_mapping": True}
        encoded = self.tokenizer(list(texts), verbose=False, **how)
        rows = []
        for index, (ids, places) in enumerate(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)):
            answers = spans[index][-1:] if last else spans[index]
            mask = [any(start < end and stop > begin for begin, end in answers) for start, stop in places]
            tokens = list(zip(ids, mask, strict=True))
            kept = _cut(tokens, self.max_length, self.truncate)
            if self.truncate is None and not any(answer for _, answer in kept[1:]):
                kept = _cut(tokens, self.max_length, "head")
            kept[0] = kept[0][0], False  # nothing stands before it that it could be predicted from
            if not any(answer for _, answer in kept):
                raise ModelError(f"no token of an answer is left of {short_repr(texts[index])}; raise --max-length")
            rows.append(kept)
        return _concatenate(rows, full_lengths=[len(ids) for ids in encoded["input_ids"]])

    def chat_prompts(self, chats: Sequence[str], template: ChatTemplate) -> EncodedExamples:
        """Conversations (JSON) up to the opening of their last answers, with nothing to be predicted."""
        whole = self._token_ids([template.prompt(chat) for chat in chats], add_special_tokens=False)
        prompts = _prompts([_cut(ids, self.max_length, self.truncate or "head") for ids in whole], whole)
        # many models end a turn with a token of its own, such as <end_of_turn>
        (closing,) = self._token_ids([template.closing_text(chats[0])], add_special_tokens=False)
        marks = [token for token in closing if token in self.tokenizer.added_tokens_decoder]
        return replace(prompts, ends=tuple(marks[:1]))

    def choices(
        self, prompts: EncodedExamples, contexts: Sequence[str], choices: Sequence[Sequence[str]]
    ) -> EncodedExamples:
        """Every prompt with each of its choices in turn, whose tokens are to be predicted, without an end of text.

        A choice has the tokens that it has behind its context: the prompt's text, or none where it is tokenised alone.
        Where both are longer than `max_length` the prompt loses its beginning, and then the choice its end.
        """
        rows = []
        for place, context in enumerate(contexts):
            prompt: list[int] = prompts.ids[prompts.offsets[place] : prompts.offsets[place + 1]].tolist()
            before = len(self.tokenizer(context, add_special_tokens=False, verbose=False)["input_ids"])
            for choice in choices[place]:
                ids = self.tokenizer(context + choice, add_special_tokens=False, verbose=False)["input_ids"]
                target_ids = ids[min(before, len(ids) - 1) :][: self.max_length - 1]
                rows.append(_answer_after(_cut(prompt, self.max_length - len(target_ids), "head"), target_ids))
        return _concatenate(rows, full_lengths=[len(row) for row in rows])

    def _end_of_text(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise ModelError(
                f"the tokenizer of {self.tokenizer.name_or_path!r} has no end-of-text token, without which no text"
                " ends; set eos_token in its tokenizer_config.json"
            )
        return int(self.tokenizer.eos_token_id)

    def _token_ids(self, texts: Sequence[str], **how: bool) -> list[list[int]]:
        """Every text's tokens; a text of which the tokenizer knows none begins at the end of another."""
        encoded = self.tokenizer(list(texts), return_attention_mask=False, verbose=False, **how)
        return [list(row) or [self._end_of_text()] for row in encoded["input_ids"]]

    def _truncate_prompt(self, ids: list[int], room: int) -> list[int]:
        """A prompt without its head, or the part `truncate`, but with the line break at its end, and with the
        token that begins every text where the tokenizer sets such.
        """
        if len(ids) <= room:
            return ids
        begin = [ids[0]] if ids[0] == self.tokenizer.bos_token_id and room > 1 else []
        return begin + _cut(ids[len(begin) : -1], room - len(begin) - 1, self.truncate or "head") + ids[-1:]


def _kept_places(whole: Sequence[int | None], cut: Sequence[int | None], truncate: Truncation | None) -> list[int]:
    """Places of the tokens that stay: the marks, and of each text so many as are left of it in `cut`."""
    kept = [place for place, text in enumerate(whole) if text is None]
    for text in (0, 1):
        kept += _cut([place for place, own in enumerate(whole) if own == text], cut.count(text), truncate)
    return sorted(kept)


def _cut(items: list[Kind], most: int, truncate: Truncation | None) -> list[Kind]:
    """At most so many items, without their tail, their head or their middle; without one of these it is the tail."""
    head = {"tail": most, "head": 0, "middle": (most + 1) // 2}[truncate or "tail"]
    return items[:head] + items[len(items) - most + head :] if most < len(items) else items


def encode_images(pixels: np.ndarray, labels: np.ndarray, *, length: int) -> EncodedExamples:
    """Images, (n, height, width, channels) uint8, as examples of `length` tokens each."""
    none = np.zeros(0, dtype=np.int64)
    return EncodedExamples(
        ids=none, types=none, offsets=np.arange(len(labels) + 1) * length, labels=labels, pixels=pixels
    )


def _prompts(kept: Sequence[list[int]], whole: Sequence[list[int]]) -> EncodedExamples:
    """Examples of what is kept of these prompts, with nothing to be predicted."""
    rows = _concatenate([_answer_after(ids, []) for ids in kept], full_lengths=[len(ids) for ids in whole])
    return replace(rows, target_mask=None)


def _answer_after(prompt: Sequence[int], answer: Sequence[int]) -> list[tuple[int, bool]]:
    return [*((token, False) for token in prompt), *((token, True) for token in answer)]


def _concatenate(rows: Sequence[Sequence[tuple[int, bool]]], *, full_lengths: Sequence[int]) -> EncodedExamples:
    """Examples of tokens, each with whether it is to be predicted."""
    sizes = [len(row) for row in rows]
    ids = np.asarray([token for row in rows for token, _ in row], dtype=np.int64)
    return EncodedExamples(
        ids=ids,
        types=np.zeros_like(ids),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        labels=np.zeros(len(rows), dtype=np.int64),
        target_mask=np.asarray([is_target for row in rows for _, is_target in row], dtype=np.bool_),
        full_lengths=None if list(full_lengths) == sizes else np.asarray(full_lengths, dtype=np.int64),
    )
