"""Start models that a site works with: those that honest rounds can produce, and no others.

A server that chooses a start model can make an update a weighted sum of what entered the model. With A = 0 and a chosen
B the gradient at A is B^T dY X^T in every round, whose rows lie in the span of the embeddings X. Honest rounds do not
lead there, so a site holds every model that comes against what it knows: the initialisation, which is drawn from the
settings' seed, and its own last trained model. The figures of an adapted module with factors A (r, d_in) and
B (d_out, r), whose update is P = s B A, and of a head or a whole model in the place of P:

    dead     max_i s |B u_i| / sigma_i(A)        over the left singular vectors u_i of A
    large    sigma_1(A) / sigma_1(A_0)           A_0 the initialisation at this rank
    small    sigma_r(A_0) / sigma_r(A)           where A and B are mixed apart, or not at all
    moved    |P - P_own| / (rounds since m)      P_own the site's last trained one, m the most that one round of its own
                                                 training has moved it
    far      |P - P_0| / (rounds steps g)        g the most that one step of its optimizer moves it

In round one, before it, and wherever a fingerprint begins, the start is the initialisation bit for bit, but for what a
warm-up has trained or an imported adapter brings. A site trains few start models a round, and none that comes again in
round after round while its training moves.

What a site does not know after a restart, its own last model, is not compared until it has trained again. `BOUNDS` and
how they were measured: docs/algorithms/start-models.md. A server that stays inside them is not stopped by them: the
order of a site's examples, which it does not know, is what stands in its way.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from atlas_fl.client.job import Job
from atlas_fl.client.local_training import num_steps
from atlas_fl.client.options import TrainOptions
from atlas_fl.config import Config
from atlas_fl.errors import ProtocolError, short_repr
from atlas_fl.params import HEAD, LORA_A, LORA_B, PRIVATE, Params, digest, lora_modules, ranks
from atlas_fl.setup.assembly import scale_of
from atlas_fl.setup.options import warmup_rank

Initial: TypeAlias = Callable[[Mapping[str, int]], Params]
"""The initialisation with these ranks by module: adapters and head, or the whole model."""

BOUNDS: Mapping[str, float] = {"dead": 100.0, "large": 30.0, "small": 30.0, "moved": 100.0, "far": 100.0}
"""The largest figure that a site takes, ten times and more the largest of honest runs."""
WORDS: Mapping[str, str] = {
    "dead": "its factor B is {value:.3g} times as long as its factor A in a direction",
    "large": "its factor A is {value:.3g} times as long as the initialisation",
    "small": "its factor A is {value:.3g} times shorter than the initialisation in a direction",
    "moved": "it is {value:.3g} times as far from this site's last model as its own training moves it",
    "far": "it is {value:.3g} times as far from the initialisation as training can move it",
}
"""Each figure in words."""
SAME_STARTS = 3
"""In how many rounds one start may come while the site's training moves it: its updates are refused thrice at most."""
MOVES = 1e-5
"""Share of a model that training must move, for a start that comes again to count as one that does not."""
DEAD = 1e-6
"""Share of B's length below which a direction of it is rounding."""
SMALLEST = 1e-12


@dataclass(frozen=True, kw_only=True, eq=False)
class Product:
    """An update `b @ a`, whose scale is in b; float64."""

    a: Tensor
    """(rank, d_in)."""
    b: Tensor
    """(d_out, rank)."""

    def __sub__(self, other: "Product") -> "Product":
        return Product(a=torch.cat([self.a, other.a]), b=torch.cat([self.b, -other.b], 1))

    @property
    def norm(self) -> float:
        """The Frobenius norm, from the Gram matrices of the factors."""
        return math.sqrt(max(float(((self.b.T @ self.b) * (self.a @ self.a.T)).sum()), 0.0))


@dataclass(frozen=True, kw_only=True, eq=False)
class Whole:
    """A tensor that is trained as it is."""

    value: Tensor

    def __sub__(self, other: "Whole") -> "Whole":
        return Whole(value=self.value - other.value)

    @property
    def norm(self) -> float:
        """The Euclidean norm."""
        return float(torch.linalg.vector_norm(self.value, dtype=torch.float64))


Parts: TypeAlias = Mapping[str, Product | Whole]
"""A model by what moves as one: the update of each adapted module, and every other tensor."""


def dead_ratio(a: Tensor, b: Tensor, *, scale: float) -> float:
    """max_i s |B u_i| / sigma_i(A) of A (r, d_in) and B (d_out, r), float64; 0 of a B that is 0."""
    vectors, sizes = _left_singular(a)
    beside = scale * (b @ vectors).norm(dim=0)
    alive = beside > DEAD * beside.max()
    return float((beside / sizes.clamp(min=SMALLEST))[alive].max()) if bool(alive.any()) else 0.0


def _left_singular(a: Tensor) -> tuple[Tensor, Tensor]:
    """(left singular vectors as columns, singular values, rising) of A (r, d_in) float64."""
    squares, vectors = torch.linalg.eigh(a @ a.T)
    return vectors, squares.clamp(min=0).sqrt()


@dataclass(kw_only=True, eq=False)
class StartModels:
    """What one site knows of the models that it is sent."""

    config: Config
    initial: Initial
    examples: int
    """Training examples of this site."""
    _own: Parts = field(default_factory=dict)
    """What the site has trained last."""
    _own_round: int = 0
    _moves: dict[str, float] = field(default_factory=dict)
    """The furthest that a round of its training has moved each part."""
    _step: TrainOptions | None = None
    """The options of its last training."""
    _starts: dict[str, set[int]] = field(default_factory=dict)
    """By digest, in which rounds the site trained from this start."""

    def check(self, action: str, job: Job) -> None:
        """Raise `ProtocolError` for a model that no honest round has produced, with its figure and the bound."""
        params = {key: tensor for key, tensor in job.params.items() if key != PRIVATE}
        initial = self.initial(ranks(params))
        if self._begins_anew(action, job):
            self._check_initial(action, params, initial)
        for name, kind, value in self._figures(action, job, params, initial):
            if not value <= BOUNDS[kind]:
                raise ProtocolError(
                    f"the model of {action} in round {job.round}: {short_repr(name)}: {WORDS[kind].format(value=value)};"
                    f" allowed: {BOUNDS[kind]:g}, beyond which no honest round leads, and an update can show single"
                    " texts; nothing was sent: ask who runs the server"
                )
        if action == "train":
            self._check_repeated(job, params)

    def remember(self, job: Job, trained: Params) -> None:
        """Keep what the site has made of a job's model; `trained` may lack what did not train."""
        params = {key: tensor for key, tensor in job.params.items() if key != PRIVATE}
        start, self._own = self._parts(params), self._parts({**params, **trained})
        for name, part in start.items():
            self._moves[name] = max(self._moves.get(name, 0.0), (self._own[name] - part).norm)  # type: ignore[operator]
        self._own_round, self._step = job.round, job.options

    def _begins_anew(self, action: str, job: Job) -> bool:
        """Whether the model is the initialisation, but for what was warmed up or imported."""
        first = job.round == 0 or (action == "train" and job.round == 1)
        return action == "fingerprint" or (first and self.config.model.init_adapter is None)

    def _check_initial(self, action: str, params: Params, initial: Params) -> None:
        warmed = self.config.clustering.fingerprint == "delta" and action != "fingerprint"
        low = warmup_rank(self.config)
        for name, tensor in params.items():
            if name.startswith(HEAD) and (warmed or self._fits_heads):
                continue
            fresh, drawn = tensor, initial[name]
            if warmed and name.endswith(LORA_B):
                fresh, drawn = tensor[:, low:], drawn[:, low:]
            if not torch.equal(fresh, drawn.to(fresh)):
                raise ProtocolError(
                    f"the model of {action}: {short_repr(name)} is not the initialisation of --seed"
                    f" {self.config.run.seed} (it is {float((fresh - drawn.to(fresh)).abs().max()):.3g} away; allowed:"
                    " 0); nothing was sent: ask who runs the server"
                )

    @property
    def _fits_heads(self) -> bool:
        """Whether heads are fitted before anything else."""
        return self.config.images.head_first == "ridge" and self.config.trainable(images=True) == "full"

    def _figures(
        self, action: str, job: Job, params: Params, initial: Params
    ) -> Iterator[tuple[str, str, float]]:
        """(tensor or module, kind of figure, value)."""
        scale = scale_of(self.config)
        for module in lora_modules(params):
            a, b, drawn = (one[module + part].double() for one, part in _factors(params, initial))
            yield module, "dead", dead_ratio(a, b, scale=scale(len(a)))
            sizes, fresh = _left_singular(a)[1], _left_singular(drawn)[1]
            yield module, "large", float(sizes[-1] / fresh[-1])
            if self.config.mixing.space == "factors":
                yield module, "small", float(fresh[0] / sizes[0].clamp(min=SMALLEST))
        rounds = job.round - (action == "train")
        parts = self._parts(params)
        if self._own and rounds >= self._own_round:
            yield from self._moved(parts, rounds=rounds)
        elif rounds > 0 and self._step is None and isinstance(job.options, TrainOptions):
            yield from self._far(parts, self._parts(initial), initial, job.options, rounds=rounds)

    def _moved(self, parts: Parts, *, rounds: int) -> Iterator[tuple[str, str, float]]:
        since = rounds - self._own_round + 1
        for heads in (True, False):
            names = [name for name in parts if name.startswith(HEAD) is heads and name in self._own]
            moves = math.hypot(*(self._moves.get(name, 0.0) for name in names))
            away = math.hypot(*((parts[name] - self._own[name]).norm for name in names))  # type: ignore[operator]
            if moves > 0:
                yield "the head" if heads else "the adapters", "moved", away / (since * moves)

    def _far(
        self, parts: Parts, fresh: Parts, initial: Params, options: TrainOptions, *, rounds: int
    ) -> Iterator[tuple[str, str, float]]:
        """Where the site has no model of its own yet; nothing of SGD that does not clip, whose steps have no bound."""
        step = options.lr
        if options.optimizer == "sgd":
            step = options.lr * options.clip / (1 - options.momentum)
        steps = rounds * num_steps(self.examples, options)
        for name, part in parts.items():
            count, length = float(_numel(part, options)), 1.0
            if isinstance(part, Product):
                length = scale_of(self.config)(len(part.a)) * float(_left_singular(initial[name + LORA_A].double())[1][-1])
            if step > 0:
                yield name, "far", (part - fresh[name]).norm / (steps * step * length * math.sqrt(count))  # type: ignore[operator]

    def _check_repeated(self, job: Job, params: Params) -> None:
        """Raise `ProtocolError` for a start that comes in round after round although the site's training moves it."""
        size = math.hypot(*(part.norm for part in self._own.values())) if self._own else 0.0
        if not size or math.hypot(*self._moves.values()) <= MOVES * size:
            return
        rounds = self._starts.setdefault(digest(params), set())
        rounds.add(job.round)
        if len(rounds) > SAME_STARTS:
            raise ProtocolError(
                f"the model of train in round {job.round} is that of {len(rounds) - 1} rounds before, although training"
                f" moves it; allowed: {SAME_STARTS} rounds; nothing was sent: ask who runs the server"
            )

    def _parts(self, params: Params) -> Parts:
        scale = scale_of(self.config)
        parts: dict[str, Product | Whole] = {
            key: Whole(value=tensor) for key, tensor in params.items() if not key.endswith((LORA_A, LORA_B))
        }
        for module in lora_modules(params):
            a, b = params[module + LORA_A].double(), params[module + LORA_B].double()
            parts[module] = Product(a=a, b=scale(len(a)) * b)
        return parts


def _factors(params: Params, initial: Params) -> tuple[tuple[Params, str], ...]:
    """Where a module's A, B and first A are."""
    return (params, LORA_A), (params, LORA_B), (initial, LORA_A)


def _numel(part: Product | Whole, options: TrainOptions) -> int:
    """Numbers that each move by a whole step: of B under AdamW; SGD's clipped step is as long as it is, in all."""
    if options.optimizer == "sgd":
        return 1
    return part.b.numel() if isinstance(part, Product) else part.value.numel()
