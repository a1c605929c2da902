"""Leakage of the clients' texts through the cuts of a model: a token probe.

The probe is a ridge regression from the rows that cross a cut to token embeddings; a token is read where the nearest
embedding is its own. It is an attacker of the simplest kind. It needs pairs of rows and tokens, which anyone has who
holds the public model. A probe that fails proves nothing; one that succeeds does.

`leakage_of` measures each task's texts: the probe is fitted on training examples and reads test examples, from rows as
the server receives them, with the config's wire format and noise. Noise is measured twice: for one look at a row, and
for the mean of as many looks as a site lets a server take (`most_looks`), each at a model that differs a little. A mean
of k looks has the error of one over sqrt(k). The model is the frozen backbone that all clients
share; adapters start as no change of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np
import torch
from torch import Tensor

from atlas_fl.client.batching import PackedBatch, collate_packed, split_by_tokens
from atlas_fl.config import Config
from atlas_fl.errors import ConfigError, DataError
from atlas_fl.frozen import Frozen
from atlas_fl.models.backbone import embed_tokens, run_blocks
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import Split
from atlas_fl.setup.assembly import Assembly
from atlas_fl.split.codec import add_noise, decode_rows, encode_rows, simulated_secret

MAX_PRODUCTS = 1 << 24
"""Products of rows and token embeddings that are held at once."""
MODELS_A_ROUND = 2
"""Different models that a site works with in one round for one action and split: one, and one more where a server that
was killed mixes the round again without a client."""


def most_looks(config: Config, *, examples: int) -> dict[Split, int]:
    """Number of times that a server may see the row of one token of each split at a cut, with other noise each.

    `examples` are a client's training examples, which it may also see in a fingerprint and for the importance.
    """
    training, phase = config.training, config.clustering
    scored = 1 + training.rounds // training.eval_every + (training.rounds % training.eval_every > 0)
    steps = config.images.local_steps
    epochs = training.local_epochs if steps is None else ceil(steps * training.batch_size / examples)
    passes = phase.fingerprint_steps if phase.fingerprint == "delta" else phase.fingerprint_batches
    plan = ceil(2 * passes * training.batch_size / examples) + 1
    again = 0 if not phase.recluster_every else (training.rounds - 1) // phase.recluster_every
    return {
        "train": MODELS_A_ROUND * (training.rounds * epochs + plan * (1 + 2 * again)),
        "validation": MODELS_A_ROUND * scored,
        "test": MODELS_A_ROUND * scored,
    }


def token_probe(
    known_rows: Tensor, tokens: Tensor, unseen_rows: Tensor, *, embeddings: Tensor, ridge: float = 1e-3
) -> Tensor:
    """The tokens that the probe reads out of `unseen_rows`, (m,) int64; -1 out of rows that are no numbers.

    It is fitted on `known_rows` (n, hidden) of `tokens` (n,) int64; `unseen_rows` is (m, hidden), `embeddings`
    (vocabulary, hidden) float32. `ridge` is in mean squares of the known rows' numbers.
    """
    row_mean, embedding_mean = known_rows.mean(0), embeddings.mean(0)
    rows, targets = (known_rows - row_mean).double(), (embeddings[tokens] - embedding_mean).double()
    penalty = ridge * rows.square().mean() * len(rows)
    gram = rows.T @ rows + penalty.clamp(min=1e-12) * torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    weights = torch.linalg.solve(gram, rows.T @ targets).float()
    predicted = torch.nn.functional.normalize((unseen_rows - row_mean) @ weights, dim=-1)
    directions = torch.nn.functional.normalize(embeddings - embedding_mean, dim=-1)
    # Tokens times vocabulary would be larger than the model.
    batch_size = max(1, MAX_PRODUCTS // len(directions))
    nearest = [(batch @ directions.T).max(-1) for batch in torch.split(predicted, batch_size)]
    return torch.cat([one.indices.masked_fill(~one.values.isfinite(), -1) for one in nearest])


KNOWN_TEXTS, UNSEEN_TEXTS = 400, 100
"""At most so many texts are known to the probe and read by it."""


class CutLeakage(Frozen):
    """The leakage of one task's texts through one cut."""

    task: str
    blocks: int
    """Blocks on the client."""
    read: float
    """Share of the unseen tokens that the probe reads in one look at each."""
    looks: int
    """Number of times that a server may look at a row of training texts with other noise; 1 without noise."""
    read_averaged: float
    """Share of them that it reads in the mean of so many looks."""
    commonest: float
    """Share of them that always saying the commonest known token gets right."""
    known: int
    """Tokens that the probe was fitted on."""
    unseen: int
    """Tokens that it was to read."""


@dataclass(kw_only=True, eq=False)
class _TextSample:
    """Some texts of a task, in packed rows that fit the memory of a pack, and their hidden states so far."""

    rows: list[PackedBatch]
    is_word: (
        Tensor  # (tokens,) bool: all but the marks that a tokenizer sets around every text, an unknown word is none
    )
    ids: Tensor  # (words,) int64
    hidden: list[Tensor]  # of every row, (tokens, hidden)


def every_cut(assembly: Assembly) -> range:
    """The cuts that leave the server a block; at 0 the client has the embeddings alone."""
    return range(assembly.shape.num_layers)


@torch.no_grad()
def leakage_of(assembly: Assembly, cuts: Mapping[str, Sequence[int]]) -> tuple[CutLeakage, ...]:
    """Measure the leakage of these cuts (numbers of blocks by task), task by task, from the lowest cut to the highest.

    Raises `ConfigError` for a cut that leaves the server no block, `DataError` where a task's texts hold no token.
    """
    results: list[CutLeakage] = []
    allowed = every_cut(assembly)
    if wrong := {blocks for counts in cuts.values() for blocks in counts} - {*allowed}:
        raise ConfigError(
            f"--cuts has {min(wrong)}, and {assembly.site.backbone.name} has {len(allowed)} blocks of which the server"
            f" needs one; allowed: 0 to {allowed[-1]}"
        )
    for task, block_counts in cuts.items():
        known_texts = _sample_texts(assembly, task, "train", KNOWN_TEXTS)
        unseen_texts = _sample_texts(assembly, task, "test", UNSEEN_TEXTS)
        depth = 0
        for blocks in sorted({*block_counts}):
            for texts in (known_texts, unseen_texts):
                texts.hidden = [
                    run_blocks(assembly.site.backbone, rows, row.layout, range(depth, blocks))
                    for row, rows in zip(texts.rows, texts.hidden, strict=True)
                ]
            results.append(_measure_cut(assembly, task, blocks, known_texts=known_texts, unseen_texts=unseen_texts))
            depth = blocks
    return tuple(results)


def _measure_cut(
    assembly: Assembly, task: str, blocks: int, *, known_texts: _TextSample, unseen_texts: _TextSample
) -> CutLeakage:
    looks = 1
    if assembly.config.split.wire_noise:  # of the client where they are most
        own = [client.name for client in assembly.clients if client.task.name == task]
        counts = [len(assembly.site.data[name].splits["train"]) for name in own]
        looks = max(most_looks(assembly.config, examples=count)["train"] for count in counts)
    read = _read(assembly, known_texts, unseen_texts, looks=1)
    return CutLeakage(
        task=task,
        blocks=blocks,
        read=read,
        looks=looks,
        read_averaged=read if looks == 1 else _read(assembly, known_texts, unseen_texts, looks=looks),
        commonest=_accuracy(known_texts.ids.mode().values == unseen_texts.ids),
        known=len(known_texts.ids),
        unseen=len(unseen_texts.ids),
    )


def _read(assembly: Assembly, known_texts: _TextSample, unseen_texts: _TextSample, *, looks: int) -> float:
    """The share of the unseen tokens that the probe reads in the mean of so many looks at each."""
    known_rows = _received_rows(assembly, known_texts, name="known", looks=looks)
    unseen_rows = _received_rows(assembly, unseen_texts, name="unseen", looks=looks)
    embeddings = assembly.site.backbone.model.get_input_embeddings().weight.detach().float()
    return _accuracy(token_probe(known_rows, known_texts.ids, unseen_rows, embeddings=embeddings) == unseen_texts.ids)


def _received_rows(assembly: Assembly, texts: _TextSample, *, name: str, looks: int) -> Tensor:
    """The rows of the words as the server has them after so many looks, (words, hidden) float32."""
    split, rows = assembly.config.split, torch.cat(texts.hidden)[texts.is_word]
    if split.wire_noise:
        # An attacker has no secret of the client whose rows it reads, and so noise of its own on those that it knows.
        secret = simulated_secret(assembly.config.run.seed, name)
        rows = add_noise(rows, noise=split.wire_noise / sqrt(looks), secret=secret, kind="activation")
    return decode_rows(encode_rows(rows, wire=split.wire))[0].to(rows.device)


def _sample_texts(assembly: Assembly, task: str, split: Split, max_texts: int) -> _TextSample:
    backbone, parts = assembly.site.backbone, _first_examples(assembly, task, split, max_texts)
    rows = [
        collate_packed(
            [parts[index].take(np.arange(len(parts[index]))[part]) for index, part in chunk], device=backbone.device
        )
        for chunk in split_by_tokens([part.lengths for part in parts], assembly.site.max_tokens)
    ]
    ids = torch.cat([row.ids for row in rows])
    roles = ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    marks = {getattr(backbone.tokenizer, role, None) for role in roles} - {None, backbone.tokenizer.unk_token_id}
    is_word = ~torch.isin(ids, torch.tensor(sorted(marks), device=ids.device))
    if not is_word.any():
        raise DataError(f"the {split} texts of task {task!r} hold no token to be read; give it other data")
    hidden = [embed_tokens(backbone, row.ids, row.types, row.layout) for row in rows]
    return _TextSample(rows=rows, is_word=is_word, ids=ids[is_word], hidden=hidden)


def _first_examples(assembly: Assembly, task: str, split: Split, num_left: int) -> list[EncodedExamples]:
    """The task's first examples, client after client."""
    taken: list[EncodedExamples] = []
    for client in assembly.clients:
        if client.task.name == task and num_left:
            examples = assembly.site.data[client.name].splits[split]
            taken.append(examples.take(np.arange(min(num_left, len(examples)))))
            num_left -= len(taken[-1])
    return taken


def _accuracy(is_correct: Tensor) -> float:
    return float(is_correct.double().mean())
