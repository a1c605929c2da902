"""Robust aggregation against hostile clients: norm bound of models, median, trimmed mean, Krum, geometric median.

    median             of every value, over the clients
    trimmed_mean       the mean of every value without the ceil(trim n) lowest and highest
    krum               the model with the least sum of squared distances to its n - f - 2 nearest
    multi_krum         the mean of the n - f models with the least such sums
    geometric_median   the point with the least sum of distances to all, by Weiszfeld's steps c_k = 1 / max(nu, d_k)

Median and trimmed mean: Yin, Chen, Ramchandran and Bartlett, 2018. Krum: Blanchard, El Mhamdi, Guerraoui and Stainer,
2017. Geometric median: RFA, Pillutla, Kakade and Harchaoui, 2022. Every client counts alike: a claim of examples has no
effect.

The first two are no mixing matrix. The rows of the others follow from the distances between the models:

    d_kl^2 = sum over modules || s_k B_k A_k - s_l B_l A_l ||_F^2 + sum over other tensors || w_k - w_l ||^2

Pairs of factors come from Gram matrices of the small products, so no dense update is formed. All are applied inside
the groups that may mix: everyone, or each cluster; heads inside their task.

Before any rule, an update's norm is measured against the median of the clients that trained beside it:

    norm of client k = || s (B'_k A'_k - B_k A_k) ||_F over all modules      (product space; else of A and B apart)
    too large        = norm_k > C median_l norm_l, l over the clients that trained

Heads are measured apart, among the clients of a task, because only those mix them. Norm bounds against poisoned
updates: Sun, Kairouz, Suresh and McMahan, "Can You Really Backdoor Federated Learning?", 2019. A median says who is far
off where more than half are honest, and of two clients it cannot tell; so from three on.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf, isfinite, sqrt
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from atlas_fl.aggregation.graph import gram_distances, update_gram
from atlas_fl.aggregation.lora_product import factorise, stack_factors, truncated_svd
from atlas_fl.aggregation.matrices import Federation, average, cluster_labels
from atlas_fl.aggregation.strategies import (
    CLUSTERS,
    MixingContext,
    Rule,
    Strategy,
    StrategyOptions,
    groups_within,
    mixing_strategy,
)
from atlas_fl.errors import ProtocolError
from atlas_fl.params import HEAD, LORA_A, LORA_B, PRIVATE, ByClient, Params, lora_modules, shared_params

AT_ONCE = 2**20
"""Values of each client that are looked at together."""


def squared_distances(
    models: ByClient, clients: Sequence[str], *, head: bool, share: Sequence[str], scale: Callable[[int], float]
) -> Float64[np.ndarray, "n n"]:
    """d_kl^2 of what these clients share: of their heads, or of all the rest.

    Without both factors in `share` the one that is there is compared by itself, padded with zeros to the longest rank.
    Raises ProtocolError where the clients hold different tensors.
    """
    parts = [shared_params(models[client], share) for client in clients]
    keys = [key for key in (parts[0] if parts else {}) if key.startswith(HEAD) == head]
    total = np.zeros((len(clients), len(clients)))
    as_products = not head and {"A", "B"} <= set(share)
    if as_products:
        total += gram_distances(update_gram(models, clients, scale))
    for key in keys:
        if not (as_products and key.endswith((LORA_A, LORA_B))):
            lacking = [client for client, part in zip(clients, parts, strict=True) if key not in part]
            if lacking:
                raise ProtocolError(f"{lacking[0]} has no {key}, but clients that it is compared with do")
            total += _plain(_pad_factors([part[key] for part in parts], key))
    return total


def change_gram(
    after: ByClient,
    before: ByClient,
    clients: Sequence[str],
    key: str,
    *,
    as_products: bool,
    scale: Callable[[int], float],
) -> Float64[np.ndarray, "n n"]:
    """<w_k - w_k^before, w_l - w_l^before> of every pair for one tensor; with `as_products`, at an A, of s B A.

    Factors of lower ranks are padded with zeros. Raises ProtocolError where clients hold tensors of other shapes.
    """
    both = [models[client] for models in (after, before) for client in clients]
    n = len(clients)
    if as_products and key.endswith(LORA_A):
        module = key.removesuffix(LORA_A)
        pairs = [{name: params[name] for name in (key, module + LORA_B)} for params in both]
        by_name = {str(index): pair for index, pair in enumerate(pairs)}
        gram = update_gram(by_name, list(by_name), scale)
        return np.asarray(gram[:n, :n] - gram[:n, n:] - gram[n:, :n] + gram[n:, n:])
    rows, total = _pad_factors([params[key] for params in both], key), np.zeros((n, n))
    for first in range(0, len(rows[0]), AT_ONCE):
        stack = torch.stack([row[first : first + AT_ONCE].double() for row in rows])
        changes = stack[:n] - stack[n:]
        total += (changes @ changes.T).cpu().numpy()
    return total


def _pad_factors(tensors: Sequence[Tensor], key: str) -> list[Tensor]:
    """The tensors as vectors of one length; factors of lower ranks get zeros, which other shapes may not."""
    rows = [tensor.T if key.endswith(LORA_B) else tensor for tensor in tensors]
    longest = max(row.shape[0] if row.ndim else 1 for row in rows)
    if key.endswith((LORA_A, LORA_B)):
        rows = [torch.nn.functional.pad(row, (0, 0, 0, longest - row.shape[0])) for row in rows]
    if len({row.shape for row in rows}) > 1:
        raise ProtocolError(f"{key} has several shapes; clients that are compared need equal ones")
    return [row.reshape(-1) for row in rows]


def _plain(rows: Sequence[Tensor]) -> np.ndarray:
    """|| w_k - w_l ||^2 of vectors; their differences from the first one lose fewer digits than they do themselves."""
    total = np.zeros((len(rows), len(rows)))
    for first in range(0, len(rows[0]), AT_ONCE):
        stack = torch.stack([row[first : first + AT_ONCE].double() for row in rows])
        stack -= stack[:1].clone()
        total += gram_distances((stack @ stack.T).cpu().numpy())
    return total


TIE = 1e-9
"""Relative difference of scores below which they are equal; equal ones are averaged, so that no order decides."""
SMOOTHING = 1e-6
"""nu: distances below it count as this."""
STEPS, SETTLED = 1000, 1e-12
"""Most steps of Weiszfeld's algorithm, and the change of a weight below which it has ended."""

Weigh: TypeAlias = Callable[[Float64[np.ndarray, "n n"]], Float64[np.ndarray, " n"]]
"""From the squared distances between the models of a group to the weights of its aggregate."""


def coordinate_median(stack: Tensor) -> Tensor:
    """The median over the first axis; of an even number the mean of the two in the middle."""
    ordered, n = stack.sort(0).values, len(stack)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def num_trimmed(n: int, trim: float) -> int:
    """How many of n values are left out at each end: the share, rounded up, and never all but one or two."""
    return min(ceil(trim * n - 1e-9), (n - 1) // 2)


def trimmed_average(stack: Tensor, *, trim: float) -> Tensor:
    """The mean over the first axis without the lowest and highest values."""
    count = num_trimmed(len(stack), trim)
    return stack.sort(0).values[count : len(stack) - count].mean(0)


def krum_scores(squares: Float64[np.ndarray, "n n"], byzantine: int) -> Float64[np.ndarray, " n"]:
    """The sum of squared distances to the n - f - 2 nearest others, at least one, where there are others."""
    n = len(squares)
    nearest = min(max(n - byzantine - 2, 1), n - 1)
    others = np.array([np.delete(row, k) for k, row in enumerate(squares)]).reshape(n, n - 1)
    return np.asarray(np.sort(others, axis=1)[:, :nearest].sum(axis=1))


def krum_weights(squares: Float64[np.ndarray, "n n"], *, byzantine: int, selected: int) -> Float64[np.ndarray, " n"]:
    """Equal weights of so many models with the least scores, and of those that tie with the last of them."""
    scores = krum_scores(squares, byzantine)
    chosen = scores <= np.sort(scores)[selected - 1] * (1 + TIE)
    return np.asarray(chosen / chosen.sum())


def weiszfeld_weights(squares: Float64[np.ndarray, "n n"]) -> Float64[np.ndarray, " n"]:
    """The weights c of the geometric median `sum_k c_k w_k`, from the mean on.

    The distance of a point to a model follows from those between models: d_k^2 = sum_l c_l d_kl^2 - half of c^T D c.
    """
    weights = np.full(len(squares), 1 / len(squares))
    for _ in range(STEPS):
        pull = squares @ weights
        inverse = 1 / np.sqrt(np.maximum(pull - weights @ pull / 2, SMOOTHING**2))
        new = inverse / inverse.sum()
        moved, weights = float(np.abs(new - weights).max()), new
        if moved < SETTLED:
            break
    return np.asarray(weights)


def _num_selected(n: int, byzantine: int) -> int:
    """Models that multi-Krum takes: all but f, and more than half."""
    return n - min(byzantine, (n - 1) // 2)


def _alike(options: StrategyOptions) -> Rule:
    """Who is aggregated with whom: the plain mean of the present of each group."""

    def rule(step: MixingContext) -> np.ndarray:
        return np.asarray(average(np.ones(len(step.present)), groups_within(step, options.within), step.present))

    return rule


def _weighted_rule(options: StrategyOptions, weigh: Weigh) -> Rule:
    """The weights of each group's present, as their distances give them; before there are updates, the plain mean."""

    def rule(step: MixingContext) -> np.ndarray:
        groups, matrix = groups_within(step, options.within), _alike(options)(step)
        if step.models is None:
            return matrix
        for label in set(groups.tolist()):
            inside = np.flatnonzero((groups == label) & step.present).tolist()
            if len(inside) > 1:
                row = np.zeros(len(matrix))
                row[inside] = weigh(model_distances(step, inside, options))
                matrix[groups == label] = row
        return matrix

    return rule


def model_distances(step: MixingContext, clients: Sequence[int], options: StrategyOptions) -> np.ndarray:
    """The squared distances between the models of these clients, by index: of their heads, or of all the rest."""
    assert step.models is not None, "distances are of models"
    names = [step.federation.clients[k] for k in clients]
    return np.asarray(
        squared_distances(
            step.models.after, names, head=step.parameters.is_head, share=options.share, scale=options.scale
        )
    )


def _by_coordinate(name: str, options: StrategyOptions, reduce: Callable[[Tensor], Tensor]) -> Strategy:
    return mixing_strategy(name, _alike(options), options, clustered=options.within == CLUSTERS, reduce=reduce)


def _by_distance(name: str, options: StrategyOptions, weigh: Weigh) -> Strategy:
    return mixing_strategy(name, _weighted_rule(options, weigh), options, clustered=options.within == CLUSTERS)


def median(options: StrategyOptions) -> Strategy:
    """The median of every value over the clients: less than half of them may be hostile."""
    return _by_coordinate("median", options, coordinate_median)


def trimmed_mean(options: StrategyOptions) -> Strategy:
    """The mean of every value without its lowest and highest (`--trim`)."""
    return _by_coordinate("trimmed_mean", options, partial(trimmed_average, trim=options.trim))


def krum(options: StrategyOptions) -> Strategy:
    """The one model that is nearest to its neighbours, for everyone (`--byzantine`)."""
    return _by_distance("krum", options, partial(krum_weights, byzantine=options.byzantine, selected=1))


def multi_krum(options: StrategyOptions) -> Strategy:
    """The mean of the models that are near to their neighbours: all but `--byzantine`."""

    def weigh(squares: np.ndarray) -> np.ndarray:
        f = options.byzantine
        return np.asarray(krum_weights(squares, byzantine=f, selected=_num_selected(len(squares), f)))

    return _by_distance("multi_krum", options, weigh)


def geometric_median(options: StrategyOptions) -> Strategy:
    """The point with the least sum of distances to all models: less than half of them may be hostile."""
    return _by_distance("geometric_median", options, weiszfeld_weights)


def _half(n: int, _: StrategyOptions) -> int:
    return (n - 1) // 2


def _krum(n: int, _: StrategyOptions) -> int:
    return max((n - 3) // 2, 0)


WITHSTANDS: dict[str, Callable[[int, StrategyOptions], int]] = {
    "median": _half,
    "trimmed_mean": lambda n, options: num_trimmed(n, options.trim),
    "krum": _krum,
    "multi_krum": _krum,
    "geometric_median": _half,
}
"""How many hostile clients of n a rule withstands."""


def small_groups(name: str, federation: Federation, options: StrategyOptions) -> tuple[str, ...]:
    """What a user should know of a rule before a run: the groups in which it withstands fewer than `--byzantine`."""
    if name not in WITHSTANDS:
        return ()
    clusters = [str(label[1]) if label[0] == "cluster" else "" for label in cluster_labels(federation.clusters)]
    apart = clusters if options.within == CLUSTERS else ["all clients"] * len(clusters)
    bodies = [f"cluster {label}" if options.within == CLUSTERS else label for label in apart]
    heads = [f"the heads of {task}" + (f" in {body}" if options.within == CLUSTERS else "")
             for task, body in zip(federation.head_groups, bodies)]  # fmt: skip
    lines = []
    for group in dict.fromkeys([*bodies, *heads]):
        n = bodies.count(group) or heads.count(group)
        withstood = WITHSTANDS[name](n, options)
        if withstood < options.byzantine and n > 1 and not group.endswith("cluster "):
            lines.append(
                f"{name}: {group}: {n} clients withstand {withstood} hostile ones, and --byzantine is"
                f" {options.byzantine}"
            )
    return tuple(lines)


LEAST = 3
"""Clients of a cohort from which norms are compared."""
BODY, HEADS = "adapters or weights", "head"
"""The two parts of a model whose changes are measured."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Where a rule mixes, and so where a change is measured."""

    space: str
    """`product` or `factors`."""
    share: tuple[str, ...]
    """What leaves the client."""
    scale: Callable[[int], float]
    """LoRA scale s of a rank."""


@dataclass(frozen=True, kw_only=True)
class Excess:
    """A change that is too large."""

    part: str
    """Which part of the model it is of."""
    norm: float
    median: float
    clients: int
    """Clients that the median is of."""

    @property
    def ratio(self) -> float:
        """How many times the median it is."""
        return self.norm / self.median

    def __str__(self) -> str:
        """The figures as part of a sentence."""
        return (
            f"the change of its {self.part} has norm {self.norm:.3g}, {self.ratio:.3g} times the median"
            f" {self.median:.3g} of {self.clients} clients"
        )


def change_norms(before: Params, after: Params, how: Space) -> dict[str, float]:
    """The norms of what training has changed, by `BODY` and `HEADS`; only of what is shared, and has values here."""
    shared = {key: tensor for key, tensor in shared_params(after, how.share).items() if tensor.numel()}
    squares = {BODY: 0.0, HEADS: 0.0}
    pairs = lora_modules(shared) if how.space == "product" else []
    in_pairs = {module + end for module in pairs for end in (LORA_A, LORA_B)}
    for key in shared:  # a set has no order, and the sum of floats follows it
        if key not in in_pairs:
            squares[HEADS if key.startswith(HEAD) else BODY] += _square(after[key], before[key])
    squares[BODY] += _product_square(before, after, pairs, how.scale)
    return {part: sqrt(square) for part, square in squares.items()}


def _square(after: Tensor, before: Tensor) -> float:
    # a difference of float32 overflows above 3.4e38, and then it is infinite, which is too large indeed
    return float(torch.linalg.vector_norm(after - before, dtype=torch.float64)) ** 2


def _product_square(before: Params, after: Params, modules: Sequence[str], scale: Callable[[int], float]) -> float:
    """||s B' A' - s B A||^2 over these modules from r x r Gram matrices; modules of one shape are one product."""
    by_shape: dict[tuple[torch.Size, torch.Size], list[str]] = {}
    for module in modules:
        by_shape.setdefault((after[module + LORA_A].shape, after[module + LORA_B].shape), []).append(module)
    total = 0.0
    for (shape, _), alike in by_shape.items():
        factor = scale(shape[0])
        a = torch.stack([torch.cat([after[m + LORA_A], before[m + LORA_A]]) for m in alike]).double()
        b = torch.stack([torch.cat([after[m + LORA_B], -before[m + LORA_B]], 1) for m in alike]).double() * factor
        total += float(((a @ a.mT) * (b.mT @ b)).sum().clamp_min(0))
    return total


def find_excesses(
    norms: Mapping[str, Mapping[str, float]], tasks: Mapping[str, str], *, ratio: float
) -> dict[str, Excess]:
    """By client the change that is most beyond `ratio` times the median of its cohort; nothing for the others.

    `norms` are those of all who trained. Where most have not moved at all, or have overflown, there is no measure.
    """
    excesses: dict[str, Excess] = {}
    for part, cohort in _cohorts(norms, tasks):
        middle = statistics.median(norms[client][part] for client in cohort)
        for client in cohort if len(cohort) >= LEAST and 0 < middle < inf else ():
            excess = Excess(part=part, norm=norms[client][part], median=middle, clients=len(cohort))
            if excess.ratio > ratio and (client not in excesses or excess.ratio > excesses[client].ratio):
                excesses[client] = excess
    return excesses


def _cohorts(norms: Mapping[str, object], tasks: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """(part, clients that are compared in it)."""
    by_task: dict[str, list[str]] = {}
    for client in norms:
        by_task.setdefault(tasks[client], []).append(client)
    return [(BODY, list(norms)), *((HEADS, clients) for clients in by_task.values())]


def clip_update(before: Params, after: Params, how: Space, *, limits: Mapping[str, float]) -> dict[str, Tensor]:
    """The update with its change scaled down so that no part's norm is above its limit (`scaled_change`).

    Cut to the client's rank it may move by as much again as was allowed, so in product space the norm is at most twice
    the limit (the old model is of that rank too). A change that is not finite is left out altogether.
    """
    norms = change_norms(before, after, how)
    return scaled_change(
        before, after, how, factors={part: _factor(norms[part], limit) for part, limit in limits.items()}
    )


def scaled_change(before: Params, after: Params, how: Space, *, factors: Mapping[str, float]) -> dict[str, Tensor]:
    """`w + f (w' - w)` of every part that has a factor f other than 1; in product space `s B A + f (s B' A' - s B A)`,
    of which the client's rank holds the best approximation.
    """
    new = dict(after)
    pairs = lora_modules(shared_params(after, how.share)) if how.space == "product" else []
    in_pairs = {module + end for module in pairs for end in (LORA_A, LORA_B)}
    for key in [key for key in after if key not in in_pairs and key != PRIVATE]:
        factor = factors.get(HEADS if key.startswith(HEAD) else BODY, 1.0)
        if factor != 1.0 and after[key].numel():
            change = (after[key] - before[key]) * factor if factor else torch.zeros_like(before[key])
            new[key] = before[key] + change
    if (factor := factors.get(BODY, 1.0)) != 1.0:
        for module in pairs:
            new |= _clipped_pair(before, after, module, how.scale, factor=factor)
    return new


def _factor(norm: float, limit: float) -> float:
    if not isfinite(norm):
        return 0.0
    return min(1.0, limit / norm) if norm > 0 else 1.0


def _clipped_pair(
    before: Params, after: Params, module: str, scale: Callable[[int], float], *, factor: float
) -> dict[str, Tensor]:
    a, b = ([models[module + end] for models in (before, after)] for end in (LORA_A, LORA_B))
    rank = a[0].shape[0]
    stacks = stack_factors(a, b, [scale(rank)] * 2)
    weights = torch.tensor([[1 - factor] * rank + [factor] * rank], dtype=torch.float64, device=a[0].device)
    best = truncated_svd(*stacks, weights, ranks=[rank])[0]
    new_a, new_b, _ = factorise(best, a[0], rank=rank, scale=scale(rank))
    return {module + LORA_A: new_a.to(a[0].dtype).contiguous(), module + LORA_B: new_b.to(b[0].dtype).contiguous()}


def bound_updates(
    before: ByClient, trained: ByClient, tasks: Mapping[str, str], how: Space, *, mode: str, ratio: float
) -> tuple[dict[str, Params], dict[str, str]]:
    """(the updates that may be mixed, why each of the others was refused or scaled down, by client).

    `mode` is `refuse` (the update is left out), `clip` (it is scaled down to the bound) or `off`.
    """
    if mode == "off" or len(trained) < LEAST:
        return dict(trained), {}
    norms = {client: change_norms(before[client], params, how) for client, params in trained.items()}
    excesses = find_excesses(norms, tasks, ratio=ratio)
    remedy = f"allowed are {ratio:g} (--max-norm-ratio)"
    reasons = {client: f"{excess}; {remedy}" for client, excess in excesses.items()}
    if mode == "refuse":
        return {client: params for client, params in trained.items() if client not in excesses}, reasons
    bounded = dict(trained)
    for client in excesses:
        limits = {
            part: ratio * statistics.median(norms[other][part] for other in cohort)
            for part, cohort in _cohorts(norms, tasks)
            if client in cohort and len(cohort) >= LEAST
        }
        bounded[client] = clip_update(
            before[client], trained[client], how, limits={k: v for k, v in limits.items() if v > 0}
        )
    return bounded, reasons
