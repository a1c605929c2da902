"""What clients of one cluster have in common above their cuts: one set of tensors, not several that are alike."""

from collections.abc import Collection, Iterator

from torch import Tensor

from atlas_fl.audit.folder import Plan
from atlas_fl.audit.models import Models
from atlas_fl.tree import LORA_A, LORA_B


def common_faults(plan: Plan, trained: Models, after: Models, *, kept: Collection[str]) -> Iterator[tuple[str, str]]:
    """(client, fault) for everyone who has something in common with others: the first tensor of which it has another.

    Who kept its own model at the end has it with what was in common when it was trained.
    """
    for k, client in enumerate(plan.clients):
        faults, is_one = [], False
        for key, owners in _in_common(plan, k, after[client]):
            is_one = True
            for models, what in ((trained, "trained"), (after, "starts with")):
                others = [plan.clients[one] for one in owners if one < k and plan.clients[one] not in kept]
                mine = models.get(client, {}).get(key) if client not in kept else None
                faults += [
                    f"{client} {what} another {key} than {other}"
                    for other in others
                    if mine is not None and key in models.get(other, {}) and not _same(mine, models[other][key])
                ]
        if is_one:
            yield client, faults[0] if faults else ""


def in_common(plan: Plan, before: Models, trained: Models) -> Models:
    """What everyone holds before the server's step: what was trained in common is so for those who took no part."""
    held = {client: dict(params) for client, params in before.items()}
    for k, client in enumerate(plan.clients):
        for key, owners in _in_common(plan, k, before[client]):
            there = [plan.clients[one] for one in owners if plan.clients[one] in trained]
            if client not in trained and there:
                held[client][key] = trained[there[0]][key]
    return held


def _in_common(plan: Plan, k: int, params: dict[str, Tensor]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for key in params:
        layer = plan.layer_of.get(key.removesuffix(LORA_A).removesuffix(LORA_B))
        owners = () if layer is None else plan.owners(k, layer)
        if len(owners) > 1:
            yield key, owners


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())
