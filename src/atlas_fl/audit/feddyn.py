"""Audit of FedDyn's server step: averages, sums of changes and their mean, tensor by tensor in float64."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from atlas_fl.audit.recompute import is_mixed
from atlas_fl.audit.rule_weights import bound_weights
from atlas_fl.audit.run_files import AuditPlan, Models
from atlas_fl.params import HEAD


@dataclass(frozen=True, kw_only=True, eq=False)
class DynamicStep:
    """The step of one round: the next model of every tensor, and the sums of changes after it."""

    plan: AuditPlan
    present: Sequence[bool]
    share: Sequence[str]
    max_share: float
    before: Models
    """The models of the last aggregation."""
    trained: Models
    """The same with the updates."""
    state: Mapping[str, Tensor]
    """Server state before the round."""
    _done: dict[tuple[str, tuple[int, ...]], tuple[np.ndarray, float]] = field(default_factory=dict)

    def next(self, k: int, key: str) -> tuple[np.ndarray, float] | None:
        """(the next value of this tensor of client k, the size of what went in); None where it has no server step."""
        members = self._members(k, key)
        if not self._moves(members, key):
            return None
        if (key, members) not in self._done:
            there = [one for one in members if self.present[one]]
            values = [self._value(self.trained, one, key) for one in there]
            parts = list(zip(self._shares(there), values, strict=True))
            parts += [(share, self._sum(one, key)) for share, one in zip(self._shares(members), members, strict=True)]
            total = sum(share * value for share, value in parts)
            size = sum(share * float(np.linalg.norm(value)) for share, value in parts)
            self._done[key, members] = np.asarray(total), size
        return self._done[key, members]

    def moments(self) -> dict[str, np.ndarray]:
        """The whole state after the step, by path."""
        state = {path: np.asarray(tensor.double().numpy()) for path, tensor in self.state.items()}
        for k in (k for k, is_there in enumerate(self.present) if is_there):
            for key, tensor in self.before[self.plan.clients[k]].items():
                if tensor.numel() and self._moves(self._members(k, key), key):
                    state[self._path(k, key)] = self._sum(k, key)
        return state

    def _members(self, k: int, key: str) -> tuple[int, ...]:
        tasks = self.plan.tasks
        return tuple(one for one in range(len(tasks)) if not key.startswith(HEAD) or tasks[one] == tasks[k])

    def _moves(self, members: Sequence[int], key: str) -> bool:
        return is_mixed(key, self.share) and len(members) > 1 and any(self.present[one] for one in members)

    def _shares(self, clients: Sequence[int]) -> list[float]:
        weights = bound_weights([self.plan.examples[one] for one in clients], self.max_share)
        return [weight / sum(weights) for weight in weights]

    def _value(self, models: Models, k: int, key: str) -> np.ndarray:
        return np.asarray(models[self.plan.clients[k]][key].double().numpy())

    def _path(self, k: int, key: str) -> str:
        return f"changes/{self.plan.clients[k]}/{key}"

    def _sum(self, k: int, key: str) -> np.ndarray:
        """Sum of client k's changes of this tensor over all rounds; zeros where it took part in none."""
        earlier = self.state.get(self._path(k, key))
        value = self._value(self.before, k, key)
        total = np.zeros_like(value) if earlier is None else np.asarray(earlier.double().numpy())
        return total + self._value(self.trained, k, key) - value if self.present[k] else total
