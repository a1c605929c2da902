"""Start models that a site works with: those that honest rounds can produce, and no others.

A server that chooses a start model can make an update a weighted sum of what entered the model. With A = 0 and a chosen
B the gradient at A is B^T dY X^T in every round, whose rows lie in the span of the embeddings X. Honest rounds do not
lead there, so a site holds every model that comes against what it knows: the initialisation, which is drawn from the
settings' seed, and its own last trained model. The figures of an adapted module with factors A (r, d_in) and
B (d_out, r), whose update is P = s B A, and of a head or a whole model in the place of P:

    dead     max_i s |B u_i| / sigma_i(A) / (1 + rounds)     over the left singular vectors u_i of A
    large    sigma_1(A) / sigma_1(A_0) / (1 + rounds)        A_0 the initialisation at this rank
    small    sigma_r(A_0) / sigma_r(A)           where A and B are mixed apart, or not at all; `thin` in product space
    moved    |P - P_own| / (rounds since m)      P_own the site's last trained one, m the most that one round of its own
                                                 training has moved it
    far      |P - P_0| / (rounds steps g)        g the most that one step of its optimizer moves it

In round one, before it, and wherever a fingerprint begins, the start is the initialisation bit for bit, but for what a
warm-up has trained or an imported adapter brings. A site trains few start models a round, and none that comes again in
round after round while its training moves.

What a site does not know after a restart, its own last model, is not compared until it has trained again. `BOUNDS` and
how they were measured: docs/guides/site-checks.md. A server that stays inside them is not stopped by them: the
order of a site's examples, which it does not know, is what stands in its way.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from atlas_fl.planning.leakage import MODELS_A_ROUND
from atlas_fl.setup.options import scale_of, train_options, warmup_rank

Initial: TypeAlias = Callable[[Mapping[str, int]], Params]
"""The initialisation with these ranks by module: adapters and head, or the whole model."""

BOUNDS: Mapping[str, float] = {
    "dead": 100.0,
    "large": 20.0,
    "small": 30.0,
    "thin": 1300.0,
    "moved": 300.0,
    "far": 100.0,
}
"""The largest figure that a site takes: about ten times the largest of honest runs, or more."""
WORDS: Mapping[str, str] = {
    "dead": "its factor B has grown by {value:.3g} times its factor A a round in a direction",
    "large": "its factor A has grown by {value:.3g} times the initialisation a round",
    "small": "its factor A is {value:.3g} times shorter than the initialisation in a direction",
    "thin": "its factor A is {value:.3g} times shorter than the initialisation in a direction",
    "moved": "it is {value:.3g} times as far from this site's last model as its own training moves it",
    "far": "it is {value:.3g} times as far from the initialisation as training can move it",
}
"""Each figure in words."""
SAME_STARTS = 3
"""Most rounds in which one start may come while the site's training moves it, or a quarter as many as it has examples:
a system of equations for all examples needs about as many as there are. A server that leaves a site's updates out sends
the same start again."""
STILL = 1e-3
"""Share of what the site's last training has moved, within which another start is the same; 1/12 in honest runs."""
DEAD = 1e-6
"""Share of B's length below which a direction of it is rounding."""
SMALLEST = 1e-12


Part: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""A tensor that is trained as it is, or the factors (a, b) of an update `b @ a`, whose scale is in b; float64."""
Parts: TypeAlias = Mapping[str, Part]
"""A model by the parts that move as one: the update of each adapted module, and every other tensor."""


def _distance(part: Part, other: Part) -> float:
    """The Frobenius norm of the difference, of updates from the Gram matrices of their factors."""
    if isinstance(part, Tensor):
        assert isinstance(other, Tensor), "both are parts of one model"
        return float(torch.linalg.vector_norm(part - other, dtype=torch.float64))
    a = torch.cat([part[0], other[0]])
    b = torch.cat([part[1], -other[1]], 1)
    return math.sqrt(max(float(((b.T @ b) * (a @ a.T)).sum()), 0.0))


def _total_distance(parts: Parts, others: Parts, names: Iterable[str]) -> float:
    """The distance of two models in these parts, as far as both have them."""
    return math.hypot(*(_distance(parts[name], others[name]) for name in names if name in parts and name in others))


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
    """The knowledge of one site about the models that it is sent."""

    config: Config
    initial: Initial
    options: TrainOptions
    """Options of its training in every round."""
    steps: int
    """Steps of its training in a round."""
    images: bool = False
    """The model sees images, and its head may be fitted before round one."""
    same_starts: int = SAME_STARTS
    """Most rounds in which it trains from one start."""
    _own: Parts = field(default_factory=dict)
    """The model that the site has trained last."""
    _own_params: Params = field(default_factory=dict)
    """Tensors of this model."""
    _own_round: int = 0
    _moves: dict[str, float] = field(default_factory=dict)
    """The furthest that a round of its training has moved each part."""
    _last_move: float = 0.0
    """Distance that the last one has moved all."""
    _models: dict[tuple[str, int, str], set[str]] = field(default_factory=dict)
    """By action, round and split the digests of the models that came."""
    _anchor: Parts = field(default_factory=dict)
    """The last start that was another than those before it."""
    _anchored: set[int] = field(default_factory=set)
    """The rounds in which the site trained from it."""

    def check(self, action: str, job: Job, *, is_anchor: bool = False, is_initial: bool = False) -> None:
        """Raise `ProtocolError` for a model that no honest round has produced, with its figure and the bound.

        An anchor is no start, and whether starts stay the same is asked without it. `is_initial` allows the
        initialisation alone.
        """
        params = {key: tensor for key, tensor in job.params.items() if key != PRIVATE}
        # each different model of a round is another look at the data
        split = getattr(job.options, "split", "")
        models = self._models.setdefault((action, job.round, split), set())
        models.add(digest(params))
        if len(models) > MODELS_A_ROUND:
            raise ProtocolError(
                f"the server asks for {action} of round {job.round} with {len(models)} different models; allowed:"
                f" {MODELS_A_ROUND} a round{split and ' on each split'}, because each shows the data once more; nothing"
                " was sent: ask who runs it"
            )
        initial = self.initial(ranks(params))
        # the initialisation, but for warmed-up or imported tensors
        is_first = job.round == 0 or (action == "train" and job.round == 1)
        if action == "fingerprint" or is_initial or (is_first and self.config.model.init_adapter is None):
            self._check_initial(action, params, initial)
        parts = self._parts(params)
        for name, kind, value in self._figures(action, job, parts, params, initial):
            if not value <= BOUNDS[kind]:
                raise ProtocolError(
                    f"the model of {action} in round {job.round}: {short_repr(name)}:"
                    f" {WORDS[kind].format(value=value)}; allowed: {BOUNDS[kind]:g}, because honest rounds lead no"
                    " further, and out of other models' updates texts can be read; nothing was sent: ask who runs the"
                    " server"
                )
        if action == "train" and not is_anchor:
            self._check_still(job, parts)

    def remember(self, job: Job, trained: Params) -> None:
        """Keep the model that the site has trained in a job; `trained` may lack tensors that did not train."""
        params = {key: tensor for key, tensor in job.params.items() if key != PRIVATE}
        own = {**params, **{key: tensor for key, tensor in trained.items() if key in params}}
        start = self._parts(params)
        self._own = self._parts(own)
        self._own_params = own
        moves = {name: _distance(self._own[name], part) for name, part in start.items()}
        self._moves = {name: max(self._moves.get(name, 0.0), move) for name, move in moves.items()}
        self._own_round = job.round
        self._last_move = math.hypot(*moves.values())

    def _check_initial(self, action: str, params: Params, initial: Params) -> None:
        warmed = self.config.clustering.fingerprint == "delta" and action != "fingerprint"
        fits_heads = self.config.images.head_first == "ridge" and self.config.trainable(images=True) == "full"
        may_have_moved = warmed or (fits_heads and self.images)
        low = warmup_rank(self.config)
        for name, tensor in params.items():
            if name.startswith(HEAD) and may_have_moved:
                continue
            fresh = tensor
            drawn = initial[name]
            if action == "sensitivity" and self.config.sparse.calibration_rounds > 1:
                # weights that a round of the mask's making has frozen come turned down, and no weight comes larger
                fresh = torch.where(fresh.abs() <= drawn.to(fresh).abs(), drawn.to(fresh), fresh)
            if warmed and name.endswith(LORA_B):
                fresh, drawn = tensor[:, low:], drawn[:, low:]
            if not torch.equal(fresh, drawn.to(fresh)):
                raise ProtocolError(
                    f"the model of {action}: {short_repr(name)} is not the initialisation of --seed"
                    f" {self.config.run.seed} (it is {float((fresh - drawn.to(fresh)).abs().max()):.3g} away; allowed:"
                    " 0); nothing was sent: ask who runs the server"
                )

    def _figures(
        self, action: str, job: Job, parts: Parts, params: Params, initial: Params
    ) -> Iterator[tuple[str, str, float]]:
        """(tensor or module, kind of figure, value)."""
        moves = math.hypot(*self._moves.values())
        own = self._own_params
        if params.keys() == own.keys() and all(torch.equal(params[key], own[key]) for key in params):
            return  # the site has trained it itself, and no server has made it up
        rounds = max(0, job.round - (action == "train"))
        for module in lora_modules(params):
            yield from self._factors(module, params, initial, rounds=rounds)
        if moves > 0:
            since = max(1, rounds - self._own_round + 1)
            for heads in (True, False):
                names = [name for name in parts if name.startswith(HEAD) is heads]
                most = math.hypot(*(self._moves.get(name, 0.0) for name in names))
                if most > 0:
                    away = _total_distance(parts, self._own, names) / (since * most)
                    yield "the head" if heads else "the adapters or weights", "moved", away
        elif rounds > 0:
            yield from self._far(parts, initial, rounds=rounds)

    def _factors(
        self, module: str, params: Params, initial: Params, *, rounds: int
    ) -> Iterator[tuple[str, str, float]]:
        a, b = params[module + LORA_A].double(), params[module + LORA_B].double()
        yield module, "dead", dead_ratio(a, b, scale=scale_of(self.config)(len(a))) / (1 + rounds)
        _, sizes = _left_singular(a)
        _, fresh = _left_singular(initial[module + LORA_A].double())
        yield module, "large", float(sizes[-1] / fresh[-1]) / (1 + rounds)
        kind = "small" if self.config.mixing.space == "factors" else "thin"
        yield module, kind, float(fresh[0] / sizes[0].clamp(min=SMALLEST))

    def _far(self, parts: Parts, initial: Params, *, rounds: int) -> Iterator[tuple[str, str, float]]:
        """Figures of a site without a model of its own yet; none of unclipped SGD, whose steps have no bound."""
        options = self.options
        fresh = self._parts(initial)
        is_sgd = options.optimizer == "sgd"
        rate = options.lr * max(1.0, options.head_rate)
        step = rate * options.clip / (1 - options.momentum) if is_sgd else rate
        for name, part in parts.items():
            moving = part if isinstance(part, Tensor) else part[1]  # of an adapter, B is what moves at first
            # SGD's clipped step is as long as it is, in all; AdamW moves every number by the rate
            count = 1 if is_sgd else moving.numel()
            length = 1.0
            if not isinstance(part, Tensor):
                first = _left_singular(initial[name + LORA_A].double())[1][-1]
                length = scale_of(self.config)(len(part[0])) * float(first)
            if step > 0 and name in fresh:
                most = rounds * self.steps * step * length * math.sqrt(count)
                yield name, "far", _distance(part, fresh[name]) / most

    def _check_still(self, job: Job, parts: Parts) -> None:
        """Raise `ProtocolError` for a start that stays where it is in round after round although training moves it."""
        limit = STILL * self._last_move
        if not self._anchor or not limit or _total_distance(parts, self._anchor, parts) > limit:
            self._anchor, self._anchored = parts, {job.round}
            return
        self._anchored.add(job.round)
        if len(self._anchored) > self.same_starts:
            raise ProtocolError(
                f"the model of train in round {job.round} is that of {len(self._anchored) - 1} rounds before, although"
                f" this site's training moves it; allowed: {self.same_starts} rounds, whether the server leaves its"
                " updates out or has made the model up; nothing was sent: ask who runs the server"
            )

    def _parts(self, params: Params) -> Parts:
        scale = scale_of(self.config)
        parts: dict[str, Part] = {key: own for key, own in params.items() if not key.endswith((LORA_A, LORA_B))}
        for module in lora_modules(params):
            a = params[module + LORA_A].double()
            parts[module] = a, scale(len(a)) * params[module + LORA_B].double()
        return parts


def start_models_of(config: Config, initial: Initial, *, examples: int, images: bool) -> StartModels:
    """The knowledge of a site with so many training examples before it has trained."""
    options = train_options(config, with_images=images)
    return StartModels(
        config=config,
        initial=initial,
        options=options,
        steps=num_steps(examples, options),
        images=images,
        same_starts=max(SAME_STARTS, examples // 4),
    )
