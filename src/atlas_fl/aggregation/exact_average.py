"""FLoRA and FedEx-LoRA: the exact average of LoRA products, a part of which all clients hold frozen.

    FLoRA       W <- W + sum_k w_k s_k B_k A_k            A as drawn and B = 0 for everyone's next round
    FedEx-LoRA  W <- W + sum_k w_k s B_k A_k - s Bbar Abar          Abar and Bbar for everyone's next round

with Bbar = sum_k w_k B_k and Abar = sum_k w_k A_k over who took part. What is added to W is sent as factors:

    sum_k w_k s_k B_k A_k              = [w_k s_k B_k ...] [A_k ...]                     rank n r
    sum_k w_k s B_k A_k - s Bbar Abar  = [w_k s (B_k - B_n) ...] [A_k - Abar ...]        rank (n - 1) r, k < n

The second form follows from sum_k w_k (A_k - Abar) = 0. W itself stays as it is: clients compute with their adapter
stacked on these factors (`client.second_model`). Heads are averaged inside their task. A client without others keeps
what it trained. FLoRA draws A anew each round; here it is the first draw again.

FLoRA: Wang, Shen, He, Sun, Wang and Lyu 2024, arXiv:2409.05976. FedEx-LoRA: Singhal, Ponkshe and Vepakomma 2024,
arXiv:2410.09432.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atlas_fl.aggregation.lora_product import stack_factors
from atlas_fl.aggregation.matrices import Federation
from atlas_fl.aggregation.server_optimizers import Cohort, cohorts
from atlas_fl.aggregation.strategies import Aggregated, Strategy, StrategyOptions, fedavg
from atlas_fl.errors import ConfigError
from atlas_fl.params import LORA_A, LORA_B, ByClient, Params, ServerState, lora_modules

RESIDUAL, NEWEST = "residual", "newest"
"""Where the server state has what everyone holds frozen, and what of it the newest round has added."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Factors:
    """An update `b @ a` of one module, its scale in b, float64."""

    a: Tensor
    """(rank, d_in); rank 0 where nothing is to be added."""
    b: Tensor
    """(d_out, rank)."""


def stack_products(
    a: Sequence[Tensor], b: Sequence[Tensor], scales: Sequence[float], weights: Sequence[float]
) -> Factors:
    """FLoRA's server step of one module: the weighted sum of all s B A; a_k is (r_k, d_in) and b_k (d_out, r_k)."""
    wide, tall = stack_factors(a, b, [weight * scale for weight, scale in zip(weights, scales, strict=True)])
    return shorten(Factors(a=wide, b=tall))


def residual(a: Sequence[Tensor], b: Sequence[Tensor], scale: float, weights: Sequence[float]) -> Factors:
    """What FedEx-LoRA adds to the averaged adapter of one module: a_k is (r, d_in), b_k (d_out, r), weights sum to 1.

    Raises ConfigError where the ranks differ.
    """
    _check_one_rank([len(factor) for factor in a])
    wide = [factor.double() for factor in a]
    mean = sum((weight * factor for weight, factor in zip(weights, wide, strict=True)), torch.zeros_like(wide[0]))
    last = b[-1].double()
    others = [scale * weight * (factor.double() - last) for weight, factor in zip(weights[:-1], b[:-1])]
    rows = [wide[0][:0], *(factor - mean for factor in wide[:-1])]
    return shorten(Factors(a=torch.cat(rows), b=torch.cat([last[:, :0], *others], dim=1)))


def add_factors(frozen: Factors, new: Factors) -> Factors:
    """What is frozen after another round: the sum of both updates."""
    return shorten(Factors(a=torch.cat([frozen.a, new.a]), b=torch.cat([frozen.b, new.b], dim=1)))


def shorten(factors: Factors) -> Factors:
    """The same update with a rank of at most min(d_in, d_out): above it one factor is the identity."""
    (rank, d_in), d_out = factors.a.shape, len(factors.b)
    if rank <= min(d_in, d_out):
        return factors
    dense, identity = factors.b @ factors.a, torch.eye(min(d_in, d_out), dtype=torch.float64, device=factors.a.device)
    return Factors(a=dense, b=identity) if d_out <= d_in else Factors(a=identity, b=dense)


def fedavg_stacked(options: StrategyOptions) -> Strategy:
    """FLoRA: the sum of all products joins the frozen part, and adapters begin again; heads only inside their task."""
    return _exact_strategy("fedavg_stacked", options, begins_again=True)


def fedavg_with_residual(options: StrategyOptions) -> Strategy:
    """FedEx-LoRA: averaged factors, and what they lack of the average of the products joins the frozen part."""
    return _exact_strategy("fedavg_with_residual", options, begins_again=False)


def frozen_part(server_state: ServerState) -> dict[str, Tensor]:
    """What everyone holds frozen, as an adapter with A (R, d_in) and B (d_out, R), float32; empty before round one."""
    return _adapter(server_state, RESIDUAL)


def newest_part(server_state: ServerState) -> dict[str, Tensor]:
    """The same of what the newest round has added, which is what is sent."""
    return _adapter(server_state, NEWEST)


def _adapter(server_state: ServerState, name: str) -> dict[str, Tensor]:
    part = server_state.get(name, {})
    assert not isinstance(part, Tensor), "it is by parameter"
    return {key: tensor for key, tensor in part.items() if isinstance(tensor, Tensor)}


def _exact_strategy(name: str, options: StrategyOptions, *, begins_again: bool) -> Strategy:
    options = replace(options, space="factors", within="all")
    base = fedavg(options)

    def aggregate(
        server_state: ServerState,
        client_models: ByClient,
        updates: ByClient,
        federation: Federation,
        *,
        round: int,
    ) -> Aggregated:
        done = base.aggregate(server_state, client_models, updates, federation, round=round)
        present = [client in updates for client in federation.clients]
        everyone = next((one for one in cohorts(federation, present, options) if not one.is_head), None)
        if everyone is None:
            return done
        newest: dict[str, Tensor] = {}
        whole: dict[str, Tensor] = {}
        for module in lora_modules(next(iter(updates.values()))):
            new = _new_factors(module, updates, everyone, federation, options.scale, stacks=begins_again)
            newest |= _to_adapter(module, new, options.scale)
            held = _from_adapter(module, frozen_part(server_state), options.scale, like=new)
            whole |= _to_adapter(module, add_factors(held, new), options.scale)
        models = done.client_models
        if begins_again:
            models = {client: {**params, **_begin_again(client_models[client])} for client, params in models.items()}
        return replace(done, server_state={RESIDUAL: whole, NEWEST: newest}, client_models=models)

    check = base.check if begins_again else _check_ranks  # products of any ranks are summed
    return replace(base, name=name, aggregate=aggregate, check=check, takes_newcomers=False)


def _new_factors(
    module: str,
    updates: ByClient,
    cohort: Cohort,
    federation: Federation,
    scale: Callable[[int], float],
    *,
    stacks: bool,
) -> Factors:
    """What the round of these updates adds to one module; clients that carry no adapter there add nothing."""
    weights = {federation.clients[k]: weight for k, weight in cohort.weights.items()}
    clients = [client for client in weights if len(updates[client][module + LORA_A])]
    if not clients:
        client = next(iter(weights))
        return Factors(a=updates[client][module + LORA_A].double(), b=updates[client][module + LORA_B].double())
    a, b = ([updates[client][module + end] for client in clients] for end in (LORA_A, LORA_B))
    parts = [weights[client] for client in clients]
    if stacks:
        return stack_products(a, b, [scale(len(factor)) for factor in a], parts)
    return residual(a, b, scale(len(a[0])), parts)


def _begin_again(sent: Params) -> dict[str, Tensor]:
    """The adapter of this model as it was drawn: A as it was sent, B = 0."""
    return {
        key: tensor if key.endswith(LORA_A) else torch.zeros_like(tensor)
        for key, tensor in sent.items()
        if key.endswith((LORA_A, LORA_B))
    }


def _to_adapter(module: str, factors: Factors, scale: Callable[[int], float]) -> dict[str, Tensor]:
    """float32 A and B with `scale(rank) B A` as the update; nothing of rank 0."""
    rank = len(factors.a)
    return (
        {module + LORA_A: factors.a.float(), module + LORA_B: (factors.b / scale(rank)).float().contiguous()}
        if rank
        else {}
    )


def _from_adapter(module: str, adapter: Params, scale: Callable[[int], float], *, like: Factors) -> Factors:
    if module + LORA_A not in adapter:
        return Factors(a=like.a[:0], b=like.b[:, :0])
    a, b = (adapter[module + end].to(like.a) for end in (LORA_A, LORA_B))
    return Factors(a=a, b=scale(len(a)) * b)


def _check_ranks(models: ByClient, federation: Federation) -> None:
    """Raise ConfigError where the ranks of clients differ."""
    for module in lora_modules(models[federation.clients[0]]):
        _check_one_rank([len(models[client][module + LORA_A]) for client in federation.clients])


def _check_one_rank(ranks: Sequence[int]) -> None:
    if len(set(ranks)) > 1:
        raise ConfigError(
            f"fedex averages factors of one rank, and these have {sorted(set(ranks))}: set --ranks, or take flora"
        )
