"""What the cuts of a model give away of the clients' texts.

What the rows that cross a cut give away of the tokens that went in.

Two measures, both of the client's part alone:

    dFIL   = Tr(J^T J) / d      J the derivative of the rows by what the first block is given, d its numbers
    probe  : a ridge regression from rows to token embeddings, and how often the nearest embedding is the right one

The first is the mean diagonal of the Fisher information that unit Gaussian noise on the rows leaves; its inverse bounds
the error of every unbiased attacker (Maeng et al. 2023, "Bounding the invertibility of privacy-preserving instance
encoding using Fisher information"). The second is an attacker of the simplest kind. It needs pairs of rows and tokens,
which anyone has who holds the public model. A probe that fails proves nothing; one that succeeds does.

What every cut of the model gives away of the clients' own texts, task by task.

`planning.leakage` has the two measures. The probe is fitted on texts of the task's training examples and reads texts of
its test examples, out of rows as they arrive over the wire of the config and with its noise. The model is the frozen
one that all clients share and that anyone may have; adapters begin as no change of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from atlas_fl.client.batching import Row, chunks, make_row
from atlas_fl.errors import ConfigError, DataError
from atlas_fl.models.attention import PackedLayout
from atlas_fl.models.backbone import Backbone, embed_tokens, run_blocks
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import Split
from atlas_fl.rng import torch_generator
from atlas_fl.setup.assembly import Assembly
from atlas_fl.split.codec import add_noise, decode_rows, encode_rows, simulated_secret

MOST_PRODUCTS = 1 << 24
"""Products of rows and token embeddings that are held at once."""


def fisher_leakage(
    backbone: Backbone, embedded: Tensor, layout: PackedLayout, *, blocks: int, seed: int, draws: int = 4
) -> float:
    """Tr(J^T J) / d of the first `blocks` blocks at these rows, (tokens, hidden), as `embed` gives them.

    Hutchinson's estimate: the mean of |J^T u|^2 over `draws` normal u; exact, 1, for no block.
    """
    if not blocks:
        return 1.0
    total = 0.0
    for draw in range(draws):
        given = embedded.detach().requires_grad_()
        rows = run_blocks(backbone, given, layout, range(blocks))
        source = torch_generator(seed, "leakage", blocks, draw)
        upper = torch.randn(rows.shape, generator=source).to(rows.device)
        (found,) = torch.autograd.grad(rows, given, upper)
        total += float(found.double().square().sum())
    return total / draws / embedded.numel()


def token_probe(known: Tensor, tokens: Tensor, unseen: Tensor, *, embeddings: Tensor, ridge: float = 1e-3) -> Tensor:
    """The tokens that the probe reads out of `unseen` rows, (m,) int64.

    It is fitted on `known` rows (n, hidden) of `tokens` (n,) int64; `unseen` is (m, hidden) and `embeddings`
    (vocabulary, hidden) float32. `ridge` is in mean squares of the known rows' numbers.
    """
    centre, middle = known.mean(0), embeddings.mean(0)
    rows, wanted = (known - centre).double(), (embeddings[tokens] - middle).double()
    penalty = ridge * rows.square().mean() * len(rows)
    gram = rows.T @ rows + penalty.clamp(min=1e-12) * torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
    weights = torch.linalg.solve(gram, rows.T @ wanted).float()
    guessed = torch.nn.functional.normalize((unseen - centre) @ weights, dim=-1)
    directions = torch.nn.functional.normalize(embeddings - middle, dim=-1)
    # Tokens times vocabulary would be larger than the model.
    at_once = max(1, MOST_PRODUCTS // len(directions))
    return torch.cat([(few @ directions.T).argmax(-1) for few in torch.split(guessed, at_once)])


KNOWN_TEXTS, UNSEEN_TEXTS, FISHER_TEXTS = 400, 100, 8
"""At most so many texts are known to the probe and read by it; from so many of the latter comes dFIL."""


@dataclass(frozen=True, kw_only=True)
class CutLeakage:
    """What a cut of the model gives away of one task's texts."""

    task: str
    blocks: int
    """Blocks on the client."""
    dfil: float
    """Tr(J^T J) / d of the client's part, for noise of size one; no wire changes it."""
    read: float
    """Share of the unseen tokens that the probe reads."""
    commonest: float
    """Share of them that always saying the commonest known token gets right."""
    known: int
    """Tokens that the probe was fitted on."""
    unseen: int
    """Tokens that it was to read."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Texts:
    """Some texts of a task, in rows that fit the memory of a pack, and what has come of them so far."""

    rows: list[Row]
    words: Tensor  # (tokens,) bool: all but the marks that a tokenizer sets around every text
    ids: Tensor  # (words,) int64
    hidden: list[Tensor]  # of every row, (tokens, hidden)


def every_cut(assembly: Assembly) -> range:
    """The cuts that leave the server a block; at 0 the client has the embeddings alone."""
    return range(assembly.shape.num_layers)


@torch.no_grad()
def leakage_of(assembly: Assembly, cuts: Mapping[str, Sequence[int]]) -> tuple[CutLeakage, ...]:
    """What these cuts, numbers of blocks by task, give away: task by task, from the lowest cut to the highest.

    Raises `ConfigError` for a cut that leaves the server no block, `DataError` where a task's texts hold no token.
    """
    found: list[CutLeakage] = []
    for task, wanted in cuts.items():
        known, unseen = _texts(assembly, task, "train", KNOWN_TEXTS), _texts(assembly, task, "test", UNSEEN_TEXTS)
        done = 0
        for blocks in sorted({_checked(assembly, blocks) for blocks in wanted}):
            known, unseen = (_further(assembly, texts, range(done, blocks)) for texts in (known, unseen))
            found.append(_measured(assembly, task, blocks, known=known, unseen=unseen))
            done = blocks
    return tuple(found)


def _measured(assembly: Assembly, task: str, blocks: int, *, known: _Texts, unseen: _Texts) -> CutLeakage:
    backbone = assembly.site.backbone
    seen, met = _arrived(assembly, known, name="known"), _arrived(assembly, unseen, name="unseen")
    table = backbone.model.get_input_embeddings().weight.detach().float()
    guessed = token_probe(seen, known.ids, met, embeddings=table)
    few = make_row(_some(assembly, task, "test", FISHER_TEXTS), device=backbone.device)
    given = embed_tokens(backbone, few.ids, few.types, few.layout)
    with torch.enable_grad():
        dfil = fisher_leakage(backbone, given, few.layout, blocks=blocks, seed=assembly.config.run.seed)
    return CutLeakage(
        task=task,
        blocks=blocks,
        dfil=dfil,
        read=_share(guessed == unseen.ids),
        commonest=_share(known.ids.mode().values == unseen.ids),
        known=len(known.ids),
        unseen=len(unseen.ids),
    )


def _arrived(assembly: Assembly, texts: _Texts, *, name: str) -> Tensor:
    """The words' rows as the server gets them, (words, hidden) float32."""
    split, rows = assembly.config.split, torch.cat(texts.hidden)[texts.words]
    if split.wire_noise:
        # An attacker has no secret of the client whose rows it reads, and so noise of its own on those that it knows.
        secret = simulated_secret(assembly.config.run.seed, name)
        rows = add_noise(rows, noise=split.wire_noise, secret=secret, kind="activation")
    return decode_rows(encode_rows(rows, wire=split.wire))[0].to(rows.device)


def _further(assembly: Assembly, texts: _Texts, blocks: range) -> _Texts:
    """The texts when they have also gone through these blocks."""
    pairs = zip(texts.rows, texts.hidden, strict=True)
    hidden = [run_blocks(assembly.site.backbone, rows, row.layout, blocks) for row, rows in pairs]
    return replace(texts, hidden=hidden)


def _texts(assembly: Assembly, task: str, split: Split, most: int) -> _Texts:
    backbone, parts = assembly.site.backbone, _some(assembly, task, split, most)
    rows = [
        make_row([parts[k].take(np.arange(len(parts[k]))[part]) for k, part in chunk], device=backbone.device)
        for chunk in chunks([part.lengths for part in parts], assembly.site.max_tokens)
    ]
    ids = torch.cat([row.ids for row in rows])
    words = ~torch.isin(ids, torch.tensor(_marks(assembly), device=ids.device))
    if not words.any():
        raise DataError(f"the {split} texts of task {task!r} hold no token to be read; give it other data")
    hidden = [embed_tokens(backbone, row.ids, row.types, row.layout) for row in rows]
    return _Texts(rows=rows, words=words, ids=ids[words], hidden=hidden)


def _some(assembly: Assembly, task: str, split: Split, most: int) -> list[EncodedExamples]:
    """The task's first examples, client after client."""
    found: list[EncodedExamples] = []
    for client in assembly.clients:
        if client.task.name == task and most:
            own = assembly.site.data[client.name].splits[split]
            found.append(own.take(np.arange(min(most, len(own)))))
            most -= len(found[-1])
    return found


def _marks(assembly: Assembly) -> list[int]:
    """The ids that stand around every text; a word that the tokenizer does not know is none of them."""
    tokenizer = assembly.site.backbone.tokenizer
    roles = ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    found = [getattr(tokenizer, role, None) for role in roles]
    return [int(mark) for mark in found if mark is not None and mark != tokenizer.unk_token_id]


def _share(right: Tensor) -> float:
    return float(right.double().mean())


def _checked(assembly: Assembly, blocks: int) -> int:
    allowed = every_cut(assembly)
    if blocks not in allowed:
        raise ConfigError(
            f"--cuts has {blocks}, and {assembly.site.backbone.name} has {len(allowed)} blocks of which the server"
            f" needs one; allowed: 0 to {allowed[-1]}"
        )
    return blocks
