"""A server that reads a site's texts out of its updates, by the start models that it chooses and the order of examples.

It follows the pinned settings in every job and replaces the start models alone. A of the adapters is 0 and B of the
first block's is orthonormal columns, so that the forward pass is the base's and the gradient at A is the same in every
round, G_i of example i:

    end - start = sum_s c_s mean_(i in batch s) G_i        rows of G_i in the span of what enters the first block

c_s follows from the optimizer, and who is in which batch from the public seed. As many rounds as examples give a system
of linear equations for all G_i; a token stands at a place where its embedding lies in the span of its example's rows.

Where A does not train it is the site's own, drawn from the public seed, and the gradient at B has its rows in the span
of A x. All that the reader uses is what a server knows: settings, the public model, starts and updates.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from atlas_fl.client import local_training
from atlas_fl.client.job import Job, Site
from atlas_fl.client.options import TrainOptions
from atlas_fl.errors import ProtocolError
from atlas_fl.models.backbone import block_index
from atlas_fl.params import HEAD, LORA_A, LORA_B, Params, lora_modules
from atlas_fl.rng import generator, torch_generator

Guard = Callable[[Job], None]
"""What the site does with a job's start model before it trains; raises `ProtocolError` for one that it refuses."""
Starts = Callable[[int], Params]
"""The start model of a round."""
ADAM_BETA, ADAM_EPS = 0.9, 1e-8
POWERS = 40
"""Squared singular values fall to rounding within so many; more directions of one example are not looked for."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings under which a server tries to read, by their flat names, and how large its B and head are."""

    values: Mapping[str, object]
    size: float = 1.0
    """Of the columns of B."""
    head: float = 1.0
    """Of the weights of the head's two rows, w and -w."""

    @property
    def by_b(self) -> bool:
        """Whether it reads the gradients of B."""
        return self.values.get("trained_parts") == "B"


_SGD = {"optimizer": "sgd", "momentum": "0.9", "batch_size": "8", "lr": "1e-5", "clip": "0"}
CASES: Mapping[str, Case] = {
    "SGD, batch 1": Case(values={**_SGD, "batch_size": "1"}),
    "SGD, batch 1, clipped": Case(values={**_SGD, "batch_size": "1", "clip": "1", "lr": "1e-4"}),
    "SGD, batch 8": Case(values=_SGD),
    "AdamW without the head": Case(
        values={"trained_parts": "without_head", "batch_size": "8", "personal_rounds": "1", "lr": "1e-3"},
        size=1e-7,
    ),
    "SGD, B alone, A and head never sent": Case(
        values={**_SGD, "share": "B", "trained_parts": "B", "space": "factors"}
    ),
    "AdamW, all parts": Case(values={"batch_size": "8", "lr": "1e-5"}, size=1e-7),
}
"""The settings of the review: all but the last were read."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a server has read of a site's training texts."""

    tokens: int = 0
    of_tokens: int = 0
    sentences: int = 0
    of_sentences: int = 0
    rounds: int = 0
    """In which the site sent an update."""
    refusal: str = ""
    """The site's line where it refused a start model."""

    def __str__(self) -> str:
        read = f"{self.tokens} of {self.of_tokens} tokens, {self.sentences} of {self.of_sentences} sentences"
        return read + (f"; refused after {self.rounds} rounds: {self.refusal}" if self.refusal else "")


def made_up(like: Params, *, case: Case, first: Sequence[str]) -> Starts:
    """The review's start models: the same in every round."""
    start: dict[str, Tensor] = {key: torch.zeros_like(tensor) for key, tensor in like.items()}
    for module in first:
        d_out, rank = like[module + LORA_B].shape
        draw = torch.randn(d_out, rank, generator=torch_generator(7, "chosen", module))
        start[module + LORA_B] = case.size * torch.linalg.qr(draw)[0]
    for key, tensor in like.items():
        if key.startswith(HEAD) and tensor.ndim == 2 and not _stays(key, case):
            row = torch.randn(tensor.shape[1], generator=torch_generator(7, "row"))
            start[key] = case.head * torch.stack([row, -row])[: len(tensor)] / row.norm()
    own = {key: tensor for key, tensor in like.items() if _stays(key, case)}
    if case.by_b:
        start |= {key: torch.zeros_like(tensor) for key, tensor in like.items() if key.endswith(LORA_B)}
    return lambda _: {**start, **own}


def _stays(key: str, case: Case) -> bool:
    """Whether this tensor is the site's own, which the server does not send."""
    share = str(case.values.get("share", "A+B+head")).split("+")
    part = "head" if key.startswith(HEAD) else key[-1]
    return part not in share


def near_honest(like: Params, *, case: Case, first: Sequence[str], size: float) -> Starts:
    """Start models of one who knows the site's checks: A as drawn, the first block's B as small as rounds make it."""
    chosen = made_up(like, case=replace(case, size=1.0), first=first)(1)

    def start(round: int) -> Params:
        if round == 1:
            return like
        drift = size * (1 + 1e-3 * round)
        return {
            key: drift * chosen[key] if key.endswith(LORA_B) and not case.by_b else tensor
            for key, tensor in like.items()
        }

    return start


@contextmanager
def order_from_secret() -> Iterator[None]:
    """Examples come in an order that the server does not know, as from a secret of the site."""
    unknown = np.random.default_rng(99)

    def drawn(seed: int, *path: object) -> np.random.Generator:
        if path[:1] == ("order",):
            return np.random.default_rng(unknown.integers(2**63))
        return generator(seed, *path)

    with patch.object(local_training, "generator", drawn):
        yield


@dataclass(kw_only=True, eq=False)
class Server:
    """A server that trains one site with models of its own choice, and reads in what comes back."""

    site: Site
    client: str
    options: TrainOptions
    case: Case
    starts: Starts
    guard: Guard = lambda _: None
    trained: Callable[[Job, Params], None] = lambda *_: None
    """Told what the site answers, as the site's own memory of it is."""
    _rows: list[np.ndarray] = field(default_factory=list)
    _updates: list[Tensor] = field(default_factory=list)

    @property
    def modules(self) -> list[str]:
        """The adapted layers of the first block."""
        return [name for name in self.site.modules if block_index(self.site.backbone, name) == 0]

    def read(self, rounds: int) -> Reading:
        """Ask for so many rounds, and read what they give."""
        refusal = ""
        for number in range(1, rounds + 1):
            try:
                self._round(number)
            except ProtocolError as error:
                refusal = str(error)
                break
        texts = self._texts() if self._updates else []
        return self._score(texts, rounds=len(self._updates), refusal=refusal)

    def _round(self, number: int) -> None:
        start = dict(self.starts(number))
        job = Job(client=self.client, params=start, round=number, options=self.options)
        self.guard(job)
        (update,) = local_training.train([job], self.site)
        self.trained(job, update.params)
        part = LORA_B if self.case.by_b else LORA_A
        change = [update.params[name + part].double() - start[name + part].double() for name in self.modules]
        self._updates.append(torch.cat([tensor.flatten() for tensor in change]))
        self._rows.append(self._weights(number))

    def _weights(self, number: int) -> np.ndarray:
        """c (examples,): what each example's gradient weighs in this round's update, by the public order."""
        options, count = self.options, len(self.site.data[self.client].splits["train"])
        order = [
            generator(options.seed, "order", self.client, number, epoch).permutation(np.arange(count))
            for epoch in range(options.epochs)
        ]
        batches = [row[at : at + options.batch_size] for row in order for at in range(0, count, options.batch_size)]
        weights = np.zeros(count)
        for weight, batch in zip(step_weights(options, len(batches)), batches, strict=True):
            weights[batch] += weight / len(batch)
        return weights

    def _texts(self) -> list[list[int]]:
        """The tokens that are read of each example."""
        mixing, updates = torch.from_numpy(np.stack(self._rows)), torch.stack(self._updates)
        gradients = torch.linalg.lstsq(mixing / mixing.abs().max(), updates, driver="gelsd").solution
        tables = [self._table(place) for place in range(self._longest)]
        return [self._text(gradient, tables) for gradient in gradients]

    def _text(self, gradient: Tensor, tables: Sequence[Tensor]) -> list[int]:
        spans = self._spans(gradient)
        tokenizer, read = self.site.backbone.tokenizer, list[int]()
        keep = min(
            range(1, max(len(vectors) for _, vectors in spans)),
            key=lambda k: self._contrast(_residuals(tables[0], spans, keep=k)),
        )
        for table in tables:
            read.append(int(_residuals(table, spans, keep=keep).argmin()))
            if read[-1] == tokenizer.sep_token_id:
                break
        return read

    def _contrast(self, residuals: Tensor) -> float:
        """How much nearer the mark that begins every text is than the others."""
        return float(residuals[self.site.backbone.tokenizer.cls_token_id] / residuals.median())

    def _spans(self, gradient: Tensor) -> list[tuple[Tensor | None, Tensor]]:
        """(what inputs are multiplied by, right singular vectors) of each system of rows."""
        parts, at = list[Tensor](), 0
        start = self.starts(1)
        for name in self.modules:
            shape = start[name + (LORA_B if self.case.by_b else LORA_A)].shape
            parts.append(gradient[at : at + shape.numel()].view(shape))
            at += shape.numel()
        parts = [part / part.norm().clamp(min=1e-300) for part in parts]
        if not self.case.by_b:
            return [(None, torch.linalg.svd(torch.cat(parts), full_matrices=False)[2][:POWERS])]
        drawn = [start[name + LORA_A].double() for name in self.modules]
        return [
            (a, torch.linalg.svd(part, full_matrices=False)[2][:POWERS]) for a, part in zip(drawn, parts, strict=True)
        ]

    @property
    def _longest(self) -> int:
        return int(self.site.data[self.client].splits["train"].lengths.max())

    def _table(self, place: int) -> Tensor:
        """(vocabulary, hidden): what enters the first block for every token at this place."""
        embeddings = self.site.backbone.model.get_submodule("embeddings")
        ids = torch.arange(self.site.backbone.model.get_input_embeddings().weight.shape[0])[None]
        with torch.inference_mode():
            rows = embeddings(
                input_ids=ids, position_ids=torch.full_like(ids, place), token_type_ids=torch.zeros_like(ids)
            )
        return rows[0].double()

    def _score(self, texts: Sequence[Sequence[int]], *, rounds: int, refusal: str) -> Reading:
        """Only words count: the marks around every text are known to everybody."""
        data = self.site.data[self.client].splits["train"]
        truth = [data.ids[a + 1 : b - 1].tolist() for a, b in zip(data.offsets[:-1], data.offsets[1:], strict=True)]
        words = [list(text[1:]) for text in texts] or [[] for _ in truth]
        right = [sum(map(int.__eq__, own, real)) for own, real in zip(words, truth, strict=True)]
        exact = [own[: len(real)] == real for own, real in zip(words, truth, strict=True)]
        return Reading(
            tokens=sum(right),
            of_tokens=sum(map(len, truth)),
            sentences=sum(exact),
            of_sentences=len(truth),
            rounds=rounds,
            refusal=refusal,
        )


def step_weights(options: TrainOptions, steps: int) -> list[float]:
    """c_s: what the gradient of each step weighs in the end, of SGD, and of AdamW where gradients are far below eps."""
    if options.optimizer == "sgd":
        m = options.momentum
        return [-options.lr * (1 - m ** (steps - s)) / (1 - m) for s in range(steps)]
    beta = ADAM_BETA
    return [
        -options.lr / ADAM_EPS * sum((1 - beta) * beta ** (t - s) / (1 - beta ** (t + 1)) for t in range(s, steps))
        for s in range(steps)
    ]


def _residuals(table: Tensor, spans: Sequence[tuple[Tensor | None, Tensor]], *, keep: int) -> Tensor:
    """(vocabulary,): how far each row lies from the span, squared, as a share of its own length."""
    total = torch.zeros(len(table), dtype=table.dtype)
    for turn, vectors in spans:
        rows = table if turn is None else table @ turn.T
        inside = (rows @ vectors[:keep].T).square().sum(1)
        total += (1 - inside / rows.square().sum(1)).clamp(min=0)
    return total


def honest_params(params: Params) -> list[str]:
    """The adapted modules of a model, for those who write start models by hand."""
    return lora_modules(params)
