"""Audit of FLoRA's and FedEx-LoRA's server step: adapters, and the frozen part as dense matrices in float64.

    FLoRA       newest = sum_k w_k s_k B_k A_k                 adapters: A as it was sent, B = 0
    FedEx-LoRA  newest = sum_k w_k s B_k A_k - s Bbar Abar     adapters: Abar, Bbar

and the frozen part is that of before and the newest. Which factors the server has taken is left to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atlas_fl.audit.recompute import is_mixed
from atlas_fl.audit.rule_weights import STACKED, bound_weights
from atlas_fl.audit.run_files import AuditPlan, Models
from atlas_fl.params import HEAD, LORA_A, LORA_B

PARTS = ("residual", "newest")
TOLERANCE = 1e-5
"""Tolerance of a value of a dense update over the largest input."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExactStep:
    """The step of one round."""

    plan: AuditPlan
    kind: str
    present: Sequence[bool]
    share: Sequence[str]
    max_share: float
    before: Models
    """The models of the last aggregation."""
    trained: Models
    """The same with the updates."""
    state: Mapping[str, Tensor]
    """Server state before the round."""

    def next(self, k: int, key: str) -> tuple[np.ndarray, float] | None:
        """(the next value of this tensor of client k, the size of what went in); None where it has no server step."""
        members = self._members(k, key)
        there = [one for one in members if self.present[one]]
        if not is_mixed(key, self.share) or len(members) < 2 or not there:
            return None
        if self.kind == STACKED and key.endswith((LORA_A, LORA_B)):
            sent = self._value(self.before, k, key)
            size = float(np.linalg.norm(sent) + np.linalg.norm(self._value(self.trained, k, key)))
            return (sent if key.endswith(LORA_A) else np.zeros_like(sent)), size
        values = [self._value(self.trained, one, key) for one in there]
        parts = list(zip(self._shares(there), values, strict=True))
        total = np.asarray(sum(share * value for share, value in parts))
        return total, sum(share * float(np.linalg.norm(value)) for share, value in parts)

    def moments(self) -> dict[str, np.ndarray]:
        """Empty: a state of factors is compared as dense updates (`frozen_fault`)."""
        return {}

    def frozen_fault(self, after: Mapping[str, Tensor], *, is_restored: bool) -> tuple[str, float]:
        """(the first module whose frozen part is not as computed again, the largest error of all).

        `after` is the server state after the round, which is that of before where the round was undone.
        """
        there = [k for k, is_there in enumerate(self.present) if is_there]
        if len(self.plan.clients) < 2 or not there or is_restored:
            same = after.keys() == self.state.keys() and all(torch.equal(after[one], self.state[one]) for one in after)
            return ("", 0.0) if same else ("the frozen part changed in a round without a server step", float("inf"))
        modules = [key.removesuffix(LORA_A) for key in self.before[self.plan.clients[0]] if key.endswith(LORA_A)]
        known = {f"{part}/{module}{end}" for part in PARTS for module in modules for end in (LORA_A, LORA_B)}
        if unknown := sorted(after.keys() - known):
            return f"the server state has {unknown[0]}, which the rule does not make", float("inf")
        worst, fault = 0.0, ""
        for module in modules:
            added, size = self._module_change(module, there)
            held = self._dense(self.state, f"residual/{module}", added.shape)
            for part, want in (("newest", added), ("residual", held + added)):
                got, unit = self._dense(after, f"{part}/{module}", added.shape), max(size, float(np.abs(want).max()))
                if got.shape != want.shape:
                    return f"{part} of {module} is of shape {got.shape}, not {want.shape}", float("inf")
                error = float(np.abs(got - want).max()) / (unit or 1.0)
                worst = max(worst, error)
                if not fault and not error <= TOLERANCE:
                    fault = f"{part} of {module} is {error:.2g} away from the recomputation"
        return fault, worst

    def _module_change(self, module: str, there: Sequence[int]) -> tuple[np.ndarray, float]:
        """(what the round adds to this module, dense; the largest value of a product that went in)."""
        a, b = ([self._value(self.trained, k, module + end) for k in there] for end in (LORA_A, LORA_B))
        scales, shares = [self.plan.scale(len(factor)) if len(factor) else 0.0 for factor in a], self._shares(there)
        products = [scale * (right @ left) for scale, left, right in zip(scales, a, b)]
        total = np.asarray(sum(share * product for share, product in zip(shares, products, strict=True)))
        if self.kind != STACKED:
            left, right = (sum(share * one for share, one in zip(shares, factors)) for factors in (a, b))
            total = total - scales[0] * (np.asarray(right) @ np.asarray(left))
        return total, max(float(np.abs(product).max(initial=0.0)) for product in products)

    def _dense(self, state: Mapping[str, Tensor], path: str, shape: tuple[int, ...]) -> np.ndarray:
        if path + LORA_A not in state or path + LORA_B not in state:
            return np.zeros(shape)
        a, b = (np.asarray(state[path + end].double().numpy()) for end in (LORA_A, LORA_B))
        return np.asarray(self.plan.scale(len(a)) * (b @ a)) if b.shape[-1] == len(a) else np.zeros(())

    def _members(self, k: int, key: str) -> tuple[int, ...]:
        tasks = self.plan.tasks
        return tuple(one for one in range(len(tasks)) if not key.startswith(HEAD) or tasks[one] == tasks[k])

    def _shares(self, clients: Sequence[int]) -> list[float]:
        weights = bound_weights([self.plan.examples[one] for one in clients], self.max_share)
        return [weight / sum(weights) for weight in weights]

    def _value(self, models: Models, k: int, key: str) -> np.ndarray:
        return np.asarray(models[self.plan.clients[k]][key].double().numpy())


def frozen_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Part of this server state that every client holds frozen, by parameter."""
    return {path.removeprefix("residual/"): tensor for path, tensor in state.items() if path.startswith("residual/")}
