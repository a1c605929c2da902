"""Second formulas of rules that step from an average: server optimizers, FedDyn, FLoRA and FedEx-LoRA.

    server optimizers   algorithm 2 of Reddi et al., 2021, cohort by cohort and value by value
    FedDyn              average of what was trained, and the mean of the sums of changes (Acar et al., 2021)
    FLoRA               newest = sum_k w_k s_k B_k A_k                 adapters: A as it was sent, B = 0
    FedEx-LoRA          newest = sum_k w_k s B_k A_k - s Bbar Abar     adapters: Abar, Bbar

Of the last two the frozen part is that of before and the newest. Which factors the server has taken is left to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atlas_fl.audit.averages import Averaging, Mean
from atlas_fl.audit.dense import arrays, is_compared, is_mixed, numbers, update
from atlas_fl.audit.run_files import Flat, Run
from atlas_fl.audit.step import Step, Value
from atlas_fl.errors import CheckpointError
from atlas_fl.params import HEAD, LORA_A, LORA_B

Moved = tuple[np.ndarray, float, dict[str, np.ndarray]]
"""The next value, the size of what went in, and the moments by path."""
FROZEN = 1e-5
"""Tolerance of a value of a dense update over the largest input."""


def weighted(shares: Sequence[float], values: Sequence[np.ndarray]) -> Value:
    """The weighted sum, and the size of what went in."""
    parts = list(zip(shares, values, strict=True))
    total = np.asarray(sum(share * one for share, one in parts))
    return total, sum(share * float(np.linalg.norm(one)) for share, one in parts)


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(Averaging):
    """The step of a server optimizer from the average of a cohort."""

    kind: str
    lr: float
    """Learning rate where the settings give none, and the first beta."""
    beta1: float
    average = Mean(within="settings")
    has_value = True

    def value(self, step: Step, k: int, key: str) -> Value | None:
        """x_{t+1} of client k; None where it is alone, or nobody of its cohort took part."""
        moved = self._moved(step, k, key)
        return None if moved is None else moved[:2]

    def expected(self, step: Step) -> dict[str, np.ndarray]:
        """The moments after the step: those of cohorts without a step as they were."""
        state, mixing = arrays(step.state), step.run.mixing
        for k, client in enumerate(step.plan.clients):
            for key, tensor in step.before[client].items():
                if is_compared(key, mixing.share, mixing.space) and tensor.numel():
                    moved = self._moved(step, k, key)
                    state |= {} if moved is None else moved[2]
        return state

    def _moved(self, step: Step, k: int, key: str) -> Moved | None:
        if step.run.mixing.space == "product" and key.endswith(LORA_B):
            key = key.removesuffix(LORA_B) + LORA_A
        clusters = step.plan.clusters
        within = step.run.settings.robust.within
        cohort = [one for one in step.mates(k, key) if within == "all" or one == k or 0 <= clusters[k] == clusters[one]]
        if len(cohort) < 2 or not step.there(cohort):
            return None
        parts = [] if within == "all" else [f"cluster-{clusters[k]}"]
        parts += [f"task-{step.plan.tasks[k]}"] if key.startswith(HEAD) else []
        name = "-".join(parts) or "all"
        moved: Moved = step.once(("moved", name, key), lambda: self._move(step, step.there(cohort), name, key))
        return moved

    def _move(self, step: Step, there: Sequence[int], cohort: str, key: str) -> Moved:
        shares = step.shares(there)
        sent, trained = ([step.value(models, one, key) for one in there] for models in (step.before, step.trained))
        current, size = weighted(shares, sent)
        after, size_after = weighted(shares, trained)
        module = key.removesuffix(LORA_A) if step.run.mixing.space == "product" else key
        change, moments = self._direction(step, f"{cohort}/{module}", after - current)
        return current + change, size + size_after + float(np.linalg.norm(change)), moments

    def _direction(self, step: Step, path: str, change: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(the step, the moments by path) for this change."""
        settings = step.run.settings.server
        lr = self.lr if settings.server_lr is None else settings.server_lr
        beta1 = self.beta1 if settings.server_beta1 is None else settings.server_beta1
        beta2, tau = settings.server_beta2, settings.server_tau
        old = self._last(step, f"first/{path}", np.zeros_like(change))
        if self.kind == "fedavgm":
            momentum = beta1 * old + change
            return lr * momentum, {f"first/{path}": momentum}
        m = beta1 * old + (1.0 - beta1) * change
        v = self._last(step, f"second/{path}", np.full_like(change, tau * tau))
        square = change * change
        if self.kind == "fedadagrad":
            v = v + square
        elif self.kind == "fedyogi":
            v = np.where(v > square, v - (1.0 - beta2) * square, np.where(v < square, v + (1.0 - beta2) * square, v))
        else:
            v = beta2 * v + (1.0 - beta2) * square
        return np.asarray(lr * m / (np.sqrt(v) + tau)), {f"first/{path}": m, f"second/{path}": v}

    def _last(self, step: Step, path: str, start: np.ndarray) -> np.ndarray:
        last = numbers(step.state[path]) if path in step.state else start
        if last.shape != start.shape:
            raise CheckpointError(f"{path} of the server state has shape {last.shape}, its tensor {start.shape}")
        return last


class Dynamic(Averaging):
    """FedDyn: the average of what was trained, and the mean of all clients' sums of changes."""

    has_value = True
    corrects = True

    def value(self, step: Step, k: int, key: str) -> Value | None:
        """The next value of this tensor of client k; None where it has no server step."""
        members = tuple(step.mates(k, key))
        if not _steps(step, members, key):
            return None
        value: Value = step.once(("value", members, key), lambda: self._value(step, members, key))
        return value

    def expected(self, step: Step) -> dict[str, np.ndarray]:
        """The sums of changes after the step."""
        state = arrays(step.state)
        for k in step.there(range(step.num_clients)):
            client = step.plan.clients[k]
            for key, tensor in step.before[client].items():
                if tensor.numel() and _steps(step, step.mates(k, key), key):
                    state[f"changes/{client}/{key}"] = self._sum(step, k, key)
        return state

    def correction(self, run: Run, client: str, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Alpha times the sum of the client's changes, of every tensor that it has one of."""
        start, alpha = f"changes/{client}/", run.settings.training.proximal_mu
        return {path.removeprefix(start): alpha * total for path, total in state.items() if path.startswith(start)}

    def _value(self, step: Step, members: Sequence[int], key: str) -> Value:
        there = step.there(members)
        values = [step.value(step.trained, one, key) for one in there]
        sums = [self._sum(step, one, key) for one in members]
        return weighted([*step.shares(there), *step.shares(members)], [*values, *sums])

    def _sum(self, step: Step, k: int, key: str) -> np.ndarray:
        """Sum of client k's changes of this tensor over all rounds; zeros where it took part in none."""
        first, last = (step.value(models, k, key) for models in (step.before, step.trained))
        earlier = step.state.get(f"changes/{step.plan.clients[k]}/{key}")
        total = np.zeros_like(first) if earlier is None else numbers(earlier)
        return total + last - first if step.present[k] else total


def _steps(step: Step, members: Sequence[int], key: str) -> bool:
    return is_mixed(key, step.run.mixing.share) and len(members) > 1 and bool(step.there(members))


@dataclass(frozen=True, kw_only=True)
class ExactAverage(Averaging):
    """FLoRA (`stacks`) or FedEx-LoRA: adapters, and a frozen part that holds what they lack of the average."""

    stacks: bool
    has_value = True

    def value(self, step: Step, k: int, key: str) -> Value | None:
        """The next value of this tensor of client k; None where it has no server step."""
        members = step.mates(k, key)
        if not _steps(step, members, key):
            return None
        if self.stacks and key.endswith((LORA_A, LORA_B)):
            sent, trained = (step.value(models, k, key) for models in (step.before, step.trained))
            next_value = sent if key.endswith(LORA_A) else np.zeros_like(sent)
            return next_value, float(np.linalg.norm(sent) + np.linalg.norm(trained))
        there = step.there(members)
        return weighted(step.shares(there), [step.value(step.trained, one, key) for one in there])

    def frozen(self, state: Flat) -> dict[str, Tensor]:
        """Frozen part of every client, by parameter."""
        return {
            path.removeprefix("residual/"): tensor for path, tensor in state.items() if path.startswith("residual/")
        }

    def state_fault(self, step: Step) -> tuple[str, float | None]:
        """(the first module whose frozen part is not as computed again, the largest error of all)."""
        after, there = step.told, step.there(range(step.num_clients))
        if step.num_clients < 2 or not there or step.is_undone:
            same = after.keys() == step.state.keys() and all(torch.equal(after[one], step.state[one]) for one in after)
            return "" if same else "the frozen part changed in a round without a server step", None
        modules = [key.removesuffix(LORA_A) for key in step.before[step.plan.clients[0]] if key.endswith(LORA_A)]
        ends = [module + end for module in modules for end in (LORA_A, LORA_B)]
        if unknown := sorted(after.keys() - {f"{part}/{end}" for part in ("residual", "newest") for end in ends}):
            return f"the server state has {unknown[0]}, which the rule does not make", None
        worst, fault = 0.0, ""
        for module in modules:
            newest, size = self._newest(step, module, there)
            residual = newest + self._held(step, step.state, f"residual/{module}", newest.shape)
            for part, wanted in (("newest", newest), ("residual", residual)):
                got, unit = self._held(step, after, f"{part}/{module}", newest.shape), max(size, np.abs(wanted).max())
                if got.shape != wanted.shape:
                    return f"{part} of {module} is of shape {got.shape}, not {wanted.shape}", None
                error = float(np.abs(got - wanted).max() / (unit or 1.0))
                worst = max(worst, error)
                if not fault and not error <= FROZEN:
                    fault = f"{part} of {module} is {error:.2g} away from the recomputation"
        return fault, worst

    def _newest(self, step: Step, module: str, there: Sequence[int]) -> tuple[np.ndarray, float]:
        """(what the round adds to this module, dense; the largest value of a product that went in)."""
        models = [step.trained[step.plan.clients[k]] for k in there]
        shares, products = step.shares(there), [update(step.plan, params, module) for params in models]
        total, _ = weighted(shares, products)
        if not self.stacks:
            a, b = (
                weighted(shares, [numbers(params[module + end]) for params in models])[0] for end in (LORA_A, LORA_B)
            )
            total = total - step.plan.scale(len(a)) * (b @ a)
        return total, max(float(np.abs(product).max(initial=0.0)) for product in products)

    def _held(self, step: Step, state: Flat, path: str, shape: tuple[int, ...]) -> np.ndarray:
        factors = {end: state[path + end] for end in (LORA_A, LORA_B) if path + end in state}
        if len(factors) < 2:
            return np.zeros(shape)
        if factors[LORA_B].shape[-1] != len(factors[LORA_A]):
            return np.zeros(())
        return update(step.plan, factors, "")
