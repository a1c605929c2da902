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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from atlas_fl.client import local_training
from atlas_fl.client.job import Job, Site
from atlas_fl.client.options import TrainOptions
from atlas_fl.errors import ProtocolError
from atlas_fl.models.backbone import block_index
from atlas_fl.params import HEAD, LORA_A, LORA_B, Params
from atlas_fl.rng import generator, torch_generator

Guard = Callable[[Job], None]
"""What the site does with a job's start model before it trains; raises `ProtocolError` for one that it refuses."""
Starts = Callable[[int], Params]
"""The start model of a round."""
ADAM_BETA, ADAM_EPS = 0.9, 1e-8
MOST_DIRECTIONS = 64
"""Of one example: more tokens than that are not looked for."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings under which a server tries to read, by their flat names, and how large the columns of its B are."""

    values: Mapping[str, object]
    size: float = 1.0
    """Of the columns of B."""
    near: float = 2e-7
    """Of the columns of B, for a server that stays inside the site's bounds."""

    @property
    def by_b(self) -> bool:
        """Whether it reads the gradients of B."""
        return self.values.get("trained_parts") == "B"


_SGD = {"optimizer": "sgd", "momentum": "0.9", "batch_size": "8", "lr": "1e-5", "clip": "0"}
CASES: Mapping[str, Case] = {
    "SGD, batch 1": Case(values={**_SGD, "batch_size": "1"}, near=5e-6),
    "SGD, batch 1, clipped": Case(values={**_SGD, "batch_size": "1", "clip": "1", "lr": "1e-4"}, near=5e-5),
    "SGD, batch 8": Case(values=_SGD),
    "AdamW without the head": Case(
        values={"trained_parts": "without_head", "batch_size": "8", "personal_rounds": "1", "lr": "1e-3"},
        size=1e-9,
        near=1e-4,
    ),
    "SGD, B alone, A and head never sent": Case(
        values={**_SGD, "share": "B", "trained_parts": "B", "space": "factors"}, near=1e-9
    ),
    "AdamW, all parts": Case(values={"batch_size": "8", "lr": "1e-5"}, size=1e-9, near=1e-4),
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
    for module in first if not case.by_b else ():
        start[module + LORA_B] = case.size * _chosen(like, module)
    for key, tensor in like.items():
        if key.startswith(HEAD) and tensor.ndim == 2 and not _stays(key, case):
            row = torch.randn(tensor.shape[1], generator=torch_generator(7, "row"))
            start[key] = torch.stack([row, -row]) / row.norm()
    own = {key: tensor for key, tensor in like.items() if _stays(key, case)}
    return lambda _: {**start, **own}


def _chosen(like: Params, module: str) -> Tensor:
    """Orthonormal columns in the place of this module's B."""
    draw = torch.randn(like[module + LORA_B].shape, generator=torch_generator(7, "chosen", module))
    columns: Tensor = torch.linalg.qr(draw)[0]
    return columns


def _stays(key: str, case: Case) -> bool:
    """Whether this tensor is the site's own, which the server does not send."""
    share = str(case.values.get("share", "A+B+head")).split("+")
    part = "head" if key.startswith(HEAD) else key[-1]
    return part not in share


def growth(round: int) -> float:
    """How long the columns of B are in a round, for a server that lets its models drift; 0 where they come honest."""
    return 0.0 if round == 1 else 1 + 0.1 * round


def near_honest(like: Params, *, first: Sequence[str], size: float) -> Starts:
    """Start models of one who knows the site's checks: A as drawn, the first block's B as small as rounds make it.

    Round one begins as it has to, and the models drift about as much as training would move them.
    """
    chosen = {module + LORA_B: size * _chosen(like, module) for module in first}
    return lambda round: {**like, **{key: growth(round) * columns for key, columns in chosen.items()}}


def with_secret(site: Site, client: str) -> Site:
    """The site with a secret of its own, from which the order of its examples follows."""
    return replace(site, secrets={client: bytes(range(32))})


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
    growth: Callable[[int], float] = lambda _: 1.0
    """What the gradients at A are multiplied by in a round."""
    vocabulary: Tensor | None = None
    """Ids of the tokens that it looks for; None for all that there are."""
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
        texts = self._texts() if any(row.any() for row in self._rows) else []
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
        return weights if self.case.by_b else self.growth(number) * weights

    def _texts(self) -> list[list[int]]:
        """The tokens that are read of each example."""
        mixing, updates = torch.from_numpy(np.stack(self._rows)), torch.stack(self._updates)
        gradients = torch.linalg.lstsq(mixing / mixing.abs().max(), updates, driver="gelsd").solution
        tables = [self._table(place) for place in range(self._longest)]
        return [self._text(gradient, tables) for gradient in gradients]

    def _text(self, gradient: Tensor, tables: Sequence[Tensor]) -> list[int]:
        spans, read, tokenizer = self._spans(gradient), list[int](), self.site.backbone.tokenizer
        # the mark that begins every text says how many directions are not rounding
        marks = _residuals(tables[0], spans)
        begin = int((self._ids == tokenizer.cls_token_id).nonzero()[0])
        keep = int((marks[begin] / marks.median(0).values)[:-1].argmin())
        for table in tables:
            read.append(int(self._ids[_residuals(table, spans)[:, keep].argmin()]))
            if read[-1] == tokenizer.sep_token_id:
                break
        return read

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
            return [(None, torch.linalg.svd(torch.cat(parts), full_matrices=False)[2][:MOST_DIRECTIONS])]
        drawn = [start[name + LORA_A].double() for name in self.modules]
        return [
            (a, torch.linalg.svd(part, full_matrices=False)[2][:MOST_DIRECTIONS])
            for a, part in zip(drawn, parts, strict=True)
        ]

    @property
    def _ids(self) -> Tensor:
        if self.vocabulary is not None:
            return self.vocabulary
        return torch.arange(self.site.backbone.model.get_input_embeddings().weight.shape[0])

    @property
    def _longest(self) -> int:
        return int(self.site.data[self.client].splits["train"].lengths.max())

    def _table(self, place: int) -> Tensor:
        """(vocabulary, hidden): what enters the first block for every token at this place."""
        embeddings = self.site.backbone.model.get_submodule("embeddings")
        ids = self._ids[None]
        with torch.inference_mode():
            rows: Tensor = embeddings(
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


def _residuals(table: Tensor, spans: Sequence[tuple[Tensor | None, Tensor]]) -> Tensor:
    """(vocabulary, directions): how far each row lies from the span of the first directions, as a share of its length.

    Squared, and summed over the systems of rows.
    """
    total = torch.zeros(len(table), min(len(vectors) for _, vectors in spans), dtype=table.dtype)
    for turn, vectors in spans:
        rows = table if turn is None else table @ turn.T
        inside = (rows @ vectors[: total.shape[1]].T).square().cumsum(1)
        total += (1 - inside / rows.square().sum(1, keepdim=True)).clamp(min=1e-15)
    return total
