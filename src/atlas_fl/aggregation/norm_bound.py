"""Bound on the norm of an update against the median of the clients that trained beside it, before any rule.

    norm of client k = || s (B'_k A'_k - B_k A_k) ||_F over all modules      (product space; else of A and B apart)
    too large        = norm_k > C median_l norm_l, l over the clients that trained

Heads are measured apart, among the clients of a task, because only those mix them. Norm bounds against poisoned
updates: Sun, Kairouz, Suresh and McMahan, "Can You Really Backdoor Federated Learning?", 2019. A median says who is far
off where more than half are honest, and of two clients it cannot tell; so from three on.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite, sqrt

import torch

from atlas_fl.aggregation.lora_product import sum_as_pair
from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.params import HEAD, LORA_A, LORA_B, PRIVATE, ByClient, Params, lora_modules, shared_params

LEAST = 3
"""Clients of a cohort from which norms are compared."""
BODY, HEADS = "adapters or weights", "head"
"""The two parts of a model whose changes are measured."""


def change_norms(before: Params, after: Params, how: StrategyOptions) -> dict[str, float]:
    """The norms of what training has changed, by `BODY` and `HEADS`; only of what is shared, and has values here."""
    shared = {key: tensor for key, tensor in shared_params(after, how.share).items() if tensor.numel()}
    squares = {BODY: 0.0, HEADS: 0.0}
    pairs = lora_modules(shared) if how.space == "product" else []
    in_pairs = {module + end for module in pairs for end in (LORA_A, LORA_B)}
    for key in shared:  # a set has no order, and the sum of floats follows it
        if key not in in_pairs:
            # a difference of float32 overflows above 3.4e38, and then it is infinite, which is too large indeed
            norm = float(torch.linalg.vector_norm(after[key] - before[key], dtype=torch.float64))
            squares[HEADS if key.startswith(HEAD) else BODY] += norm**2
    squares[BODY] += _product_square(before, after, pairs, how.scale)
    return {part: sqrt(square) for part, square in squares.items()}


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
) -> dict[str, tuple[str, dict[str, float]]]:
    """(the change that is most beyond `ratio` times the median of its cohort, the limits of all parts) by client.

    Nothing for the others. `norms` are those of all who trained. Where most have not moved at all, or have overflown,
    there is no measure.
    """
    medians: dict[str, dict[str, tuple[float, int]]] = {client: {} for client in norms}
    by_task = [[client for client in norms if tasks[client] == task] for task in dict.fromkeys(tasks.values())]
    for part, cohort in [(BODY, list(norms)), *((HEADS, clients) for clients in by_task if clients)]:
        middle = statistics.median(norms[client][part] for client in cohort)
        for client in cohort if len(cohort) >= LEAST and 0 < middle < inf else ():
            medians[client][part] = (middle, len(cohort))
    excesses = {}
    for client, by_part in medians.items():
        times = {part: norms[client][part] / middle for part, (middle, _) in by_part.items()}
        over = [part for part in times if times[part] > ratio]
        if over:
            part = max(over, key=lambda name: times[name])
            middle, size = by_part[part]
            reason = f"the change of its {part} has norm {norms[client][part]:.3g}, {times[part]:.3g} times the median"
            limits = {name: ratio * own_middle for name, (own_middle, _) in by_part.items()}
            excesses[client] = (f"{reason} {middle:.3g} of {size} clients", limits)
    return excesses


def clip_update(
    before: Params, after: Params, how: StrategyOptions, *, limits: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """The update with its change scaled down so that no part's norm is above its limit (`scaled_change`).

    Cut to the client's rank it may move by as much again as was allowed, so in product space the norm is at most twice
    the limit (the old model is of that rank too). A change that is not finite is left out altogether.
    """
    norms = change_norms(before, after, how)
    return scaled_change(
        before, after, how, factors={part: _factor(norms[part], limit) for part, limit in limits.items()}
    )


def scaled_change(
    before: Params, after: Params, how: StrategyOptions, *, factors: Mapping[str, float]
) -> dict[str, torch.Tensor]:
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
            a, b = ([models[module + end] for models in (before, after)] for end in (LORA_A, LORA_B))
            scale, rank = how.scale(len(a[0])), len(a[0])
            pair = sum_as_pair(a, b, [1 - factor, factor], old_scale=scale, rank=rank, scale=scale)
            new[module + LORA_A], new[module + LORA_B] = pair
    return new


def _factor(norm: float, limit: float) -> float:
    if not isfinite(norm):
        return 0.0
    return min(1.0, limit / norm) if norm > 0 else 1.0


def bound_updates(
    before: ByClient, trained: ByClient, tasks: Mapping[str, str], how: StrategyOptions, *, mode: str, ratio: float
) -> tuple[dict[str, Params], dict[str, str]]:
    """(the updates that may be mixed, why each of the others was refused or scaled down, by client).

    `mode` is `refuse` (the update is left out), `clip` (it is scaled down to the bound) or `off`.
    """
    if mode == "off" or len(trained) < LEAST:
        return dict(trained), {}
    norms = {client: change_norms(before[client], params, how) for client, params in trained.items()}
    excesses = find_excesses(norms, tasks, ratio=ratio)
    reasons = {
        client: f"{reason}; allowed are {ratio:g} (--max-norm-ratio)" for client, (reason, _) in excesses.items()
    }
    if mode == "refuse":
        return {client: params for client, params in trained.items() if client not in excesses}, reasons
    clipped = {
        client: clip_update(before[client], trained[client], how, limits=limits)
        for client, (_, limits) in excesses.items()
    }
    return {**trained, **clipped}, reasons
