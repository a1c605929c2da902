"""Second formulas of rules that step from an average, merge changes, or take A and B or their product apart.

    server optimizers   algorithm 2 of Reddi et al., 2021, cohort by cohort and value by value
    TIES, DARE          algorithm 1 of Yadav et al., 2023, and drop and rescale of Yu et al., 2024
    raFLoRA             Wu et al., 2026, partition by partition
    FedBuff             algorithm 1 of Nguyen et al., 2022, from the state's x and the steps since each client began
    FedRot-LoRA         rotations by full decompositions (Zhang et al., 2026)
    FedSVD              the full decomposition of the product of the averages (Lee et al., 2025)
    FedDyn              average of what was trained, and the mean of the sums of changes (Acar et al., 2021)
    FLoRA               newest = sum_k w_k s_k B_k A_k                 adapters: A as it was sent, B = 0
    FedEx-LoRA          newest = sum_k w_k s B_k A_k - s Bbar Abar     adapters: Abar, Bbar
    FedMomentum         newest = U[:, r:] S[r:] V^T[r:] of the sum     adapters: U[:, :r] S[:r] V^T[:r]
    Fed-SB, RAVAN       means of R, or of all s_i H_i; Fed-SB's factors by the singular vectors of sign(G)
    ILoRA               B: Gram-Schmidt of the sum's first columns                      s A: B^T times the sum
    Fed-PLoRA           row j of A, column j of s B: the mean over the clients that trained module j

Of FLoRA, FedEx-LoRA and FedMomentum the frozen part is that of before and the newest. Which factors the server has
taken is left to it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from atlas_fl.audit.averages import MEAN, Averaging, Mean, alike
from atlas_fl.audit.dense import arrays, below, decompose, is_compared, is_mixed, numbers, update
from atlas_fl.audit.run_files import AuditPlan, Flat, Models, Run
from atlas_fl.audit.step import Step, Value, compare_values
from atlas_fl.errors import CheckpointError
from atlas_fl.models.registry import suggested_lr
from atlas_fl.params import HEAD, LORA_A, LORA_B, LORA_CORE, LORA_SCALE, lora_modules, ranks
from atlas_fl.rng import generator, torch_generator

Moved = tuple[np.ndarray, float, dict[str, np.ndarray]]
"""The next value, the size of what went in, and the moments by path."""
FROZEN = 1e-5
"""Tolerance of a value of a dense update over the largest input."""


def weighted(shares: Sequence[float], values: Sequence[np.ndarray]) -> Value:
    """The weighted sum, and the size of what went in."""
    parts = list(zip(shares, values, strict=True))
    total = np.asarray(sum(share * one for share, one in parts))
    return total, sum(share * float(np.linalg.norm(one)) for share, one in parts)


def mean_of(step: Step, models: Models, there: Sequence[int], key: str) -> Value:
    """The average of these clients' values in these models, and the size of what went in."""
    return weighted(step.shares(there), [step.value(models, one, key) for one in there])


def value_key(step: Step, key: str) -> str:
    """The parameter at which the value of this one stands: of B in product space, at its A."""
    return key.removesuffix(LORA_B) + LORA_A if step.run.mixing.space == "product" and key.endswith(LORA_B) else key


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(Averaging):
    """The step of a server optimizer from the average of a cohort."""

    kind: str
    lr: float
    """Learning rate where the settings give none, and the first beta."""
    beta1: float
    average = Mean(within="settings")

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
        key, there = value_key(step, key), self.average.stepping(step, k, key)
        if not there:
            return None
        parts = [] if step.run.settings.robust.within == "all" else [f"cluster-{step.plan.clusters[k]}"]
        parts += [f"task-{step.plan.tasks[k]}"] if key.startswith(HEAD) else []
        module = key.removesuffix(LORA_A) if step.run.mixing.space == "product" else key
        path = f"{'-'.join(parts) or 'all'}/{module}"
        return step.once(("moved", path), lambda: self._move(step, there, path, key))

    def _move(self, step: Step, there: Sequence[int], path: str, key: str) -> Moved:
        settings = step.run.settings.server
        (current, size), (after, size_after) = (
            mean_of(step, models, there, key) for models in (step.before, step.trained)
        )
        change = after - current
        lr = self.lr if settings.server_lr is None else settings.server_lr
        beta1 = self.beta1 if settings.server_beta1 is None else settings.server_beta1
        beta2, tau, square = settings.server_beta2, settings.server_tau, change * change
        old = self._last(step, f"first/{path}", np.zeros_like(change))
        m = beta1 * old + (1.0 if self.kind == "fedavgm" else 1.0 - beta1) * change
        moments, move = {f"first/{path}": m}, lr * m
        if self.kind != "fedavgm":
            v = self._last(step, f"second/{path}", np.full_like(change, tau * tau))
            if self.kind == "fedadagrad":
                v = v + square
            elif self.kind == "fedyogi":
                v = v - (1.0 - beta2) * square * np.sign(v - square)
            else:
                v = beta2 * v + (1.0 - beta2) * square
            moments[f"second/{path}"] = v
            move = move / (np.sqrt(v) + tau)
        return current + move, size + size_after + float(np.linalg.norm(move)), moments

    def _last(self, step: Step, path: str, start: np.ndarray) -> np.ndarray:
        last = numbers(step.state[path]) if path in step.state else start
        if last.shape != start.shape:
            raise CheckpointError(f"{path} of the server state has shape {last.shape}, its tensor {start.shape}")
        return last


class OfCohort(Averaging):
    """A rule of what those of a cohort that took part have trained, the same for all of it; by default the average."""

    average = Mean(within="settings")

    def value(self, step: Step, k: int, key: str) -> Value | None:
        """The next value of client k, in product space that of a module; None where it has no server step."""
        key, there = value_key(step, key), self.average.stepping(step, k, key)
        return step.once(("next", tuple(there), key), lambda: self.next_value(step, there, key)) if there else None

    def next_value(self, step: Step, there: Sequence[int], key: str) -> Value:
        """The next value from these clients' updates, and the size of what went in."""
        return mean_of(step, step.trained, there, key)


class OfAll(OfCohort):
    """The same of all clients, and of heads those of a task, whatever `--within` says."""

    average = MEAN


class Buffer(Averaging):
    """FedBuff: x of all, or of a task's heads, moved by changes over the root of one and the steps since they began."""

    def value(self, step: Step, k: int, key: str) -> Value | None:
        """The newest x of a client that took part; None for the others."""
        moved = self._moved(step, k, key) if step.present[k] else None
        return None if moved is None else moved[1:]

    def expected(self, step: Step) -> dict[str, np.ndarray]:
        """The newest x, and the step after which each client began."""
        state = arrays(step.state)
        for k, client in enumerate(step.plan.clients):
            if step.present[k]:
                state[f"begun/{client}/step"] = np.array(float(step.round))
                keys = [key for key in step.before[client] if is_mixed(key, step.run.mixing.share)]
                moved = [self._moved(step, k, key) for key in keys if step.before[client][key].numel()]
                state |= {path: x for path, x, _ in filter(None, moved)}
        return state

    def _moved(self, step: Step, k: int, key: str) -> tuple[str, np.ndarray, float] | None:
        mates = step.mates(k, key)
        there, part = step.there(mates), f"task-{step.plan.tasks[k]}" if key.startswith(HEAD) else "all"
        if len(mates) < 2:
            return None
        sent, trained = ([step.value(models, one, key) for one in there] for models in (step.before, step.trained))
        path, start_names = f"model/{part}/{key}", [f"begun/{step.plan.clients[one]}/step" for one in there]
        late = [max(0.0, step.round - 1 - float(step.state.get(name, 0.0))) for name in start_names]
        eta = step.run.settings.server.buffer_lr
        shares = step.shares(there)
        changes = [
            share * (new - old) / np.sqrt(1 + tau)
            for share, new, old, tau in zip(shares, trained, sent, late, strict=True)
        ]
        x = numbers(step.state[path]) if path in step.state else weighted(shares, sent)[0]
        size = float(np.linalg.norm(x)) + sum(float(np.linalg.norm(one)) for one in trained)
        return path, np.asarray(x + eta * sum(changes)), size


@dataclass(frozen=True, kw_only=True)
class Middle(OfCohort):
    """Median or trimmed mean of every value; its size is that of most, since one far value does not move it."""

    average = Mean(within="settings", shares=alike)
    reduction: Callable[[Step, np.ndarray], np.ndarray]

    def next_value(self, step: Step, there: Sequence[int], key: str) -> Value:
        """The middle of what was trained."""
        values = np.stack([step.value(step.trained, one, key) for one in there])
        return self.reduction(step, values), float(np.median([np.linalg.norm(value) for value in values]))


@dataclass(frozen=True, kw_only=True)
class Merge(OfCohort):
    """TIES or DARE: the average of what was sent, moved by the merged changes."""

    merge: Callable[[Step, Sequence[int], np.ndarray, str], np.ndarray]
    """(step, clients, their changes, parameter) -> the merged change."""

    def next_value(self, step: Step, there: Sequence[int], key: str) -> Value:
        """The average, moved."""
        sent, trained = ([step.value(models, one, key) for one in there] for models in (step.before, step.trained))
        current, size = weighted(step.shares(there), sent)
        changes = np.stack([last - first for first, last in zip(sent, trained, strict=True)])
        move = step.run.settings.server.merge_scale * self.merge(step, there, changes, key)
        return current + move, size + float(np.linalg.norm(move))


def by_sign(step: Step, there: Sequence[int], changes: np.ndarray, _key: str) -> np.ndarray:
    """Trim, elect and disjoint mean of TIES, one after the other."""
    density = step.run.settings.server.ties_density
    for change in changes:
        dropped = change.size - max(int(np.ceil(density * change.size - 1e-9)), 1)
        change[np.abs(change) < np.sort(np.abs(change), axis=None)[dropped]] = 0.0
    shares = np.array(step.shares(there)).reshape(-1, *[1] * (changes.ndim - 1))
    elected = np.sign((shares * changes).sum(0))
    agrees = shares * ((np.sign(changes) == elected) & (elected != 0))
    return np.asarray((agrees * changes).sum(0) / np.where(agrees.any(0), agrees.sum(0), 1.0))


def by_chance(step: Step, there: Sequence[int], changes: np.ndarray, key: str) -> np.ndarray:
    """Drop and rescale of DARE, by the draws of the run's seed."""
    settings = step.run.settings
    name = key.removesuffix(LORA_A) if step.run.mixing.space == "product" else key
    kept = []
    for k, change in zip(there, changes, strict=True):
        draw = torch_generator(settings.run.seed, "dare", step.round, step.plan.clients[k], name)
        drawn = torch.rand(change.shape, generator=draw, dtype=torch.float64).numpy()
        kept.append(np.where(drawn < settings.server.dare_drop, 0.0, change) / (1 - settings.server.dare_drop))
    return weighted(step.shares(there), kept)[0]


class RankPartitions(OfCohort):
    """raFLoRA: the average of each partition of the ranks over the clients that have it; of heads the average."""

    def next_value(self, step: Step, there: Sequence[int], key: str) -> Value:
        """The sum over all partitions."""
        mean, size = super().next_value(step, there, key)
        if not key.endswith(LORA_A):
            return mean, size
        total, low, module = np.zeros_like(mean), 0, key.removesuffix(LORA_A)
        models = {one: step.trained[step.plan.clients[one]] for one in there}
        shares = dict(zip(there, step.shares(there), strict=True))
        for high in sorted({len(params[key]) for params in models.values()}):
            has = {one: params for one, params in models.items() if len(params[key]) >= high}
            for one, params in has.items():
                a, b = numbers(params[key]), numbers(params[module + LORA_B])
                share = shares[one] / sum(shares[other] for other in has)
                total += share * step.plan.scale(len(a)) * b[:, low:high] @ a[low:high]
            low = high
        return total, size + float(np.linalg.norm(total))


class Dynamic(OfAll):
    """FedDyn: the average of what was trained, and the mean of all clients' sums of changes."""

    def next_value(self, step: Step, there: Sequence[int], key: str) -> Value:
        """The average of those who took part, and the mean of all."""
        members = step.mates(there[0], key)
        values = [step.value(step.trained, one, key) for one in there]
        sums = [self._sum(step, one, key) for one in members]
        return weighted([*step.shares(there), *step.shares(members)], [*values, *sums])

    def expected(self, step: Step) -> dict[str, np.ndarray]:
        """The sums of changes after the step."""
        state = arrays(step.state)
        for k in step.there(range(step.num_clients)):
            client = step.plan.clients[k]
            for key, tensor in step.before[client].items():
                if tensor.numel() and is_mixed(key, step.run.mixing.share) and self.average.stepping(step, k, key):
                    state[f"changes/{client}/{key}"] = self._sum(step, k, key)
        return state

    def correction(self, run: Run, client: str, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Alpha times the sum of the client's changes, of every tensor that it has one of."""
        alpha = run.settings.training.proximal_mu
        return {key: alpha * total for key, total in below(state, f"changes/{client}/").items()}

    def _sum(self, step: Step, k: int, key: str) -> np.ndarray:
        """Sum of client k's changes of this tensor over all rounds; zeros where it took part in none."""
        first, last = (step.value(models, k, key) for models in (step.before, step.trained))
        earlier = step.state.get(f"changes/{step.plan.clients[k]}/{key}")
        total = np.zeros_like(first) if earlier is None else numbers(earlier)
        return total + last - first if step.present[k] else total


class Rotated(OfAll):
    """FedRot-LoRA: the average of factors, each rotated towards those that its client was sent."""

    def next_value(self, step: Step, there: Sequence[int], key: str) -> Value:
        """The average of the rotated factors; of heads the average."""
        if step.round == 1 or not key.endswith((LORA_A, LORA_B)):
            return super().next_value(step, there, key)
        module = key.removesuffix(LORA_A).removesuffix(LORA_B)
        turns = [step.once(("turn", module, one), partial(self._turn, step, module, one)) for one in there]
        pairs = zip([step.value(step.trained, one, key) for one in there], turns, strict=True)
        return weighted(step.shares(there), [v @ turn if key.endswith(LORA_B) else turn.T @ v for v, turn in pairs])

    def _turn(self, step: Step, module: str, k: int) -> np.ndarray:
        key = module + (LORA_B if step.round % 2 else LORA_A)
        own, sent = (step.value(models, k, key) for models in (step.trained, step.before))
        strength = step.run.settings.server.rotation_strength
        best = _rotation(own.T @ sent if step.round % 2 else own @ sent.T)
        return _rotation((1 - strength) * np.eye(len(best)) + strength * best)


def _rotation(matrix: np.ndarray) -> np.ndarray:
    """The nearest rotation."""
    left, _, right = decompose(matrix)
    signs = np.ones(len(matrix))
    signs[-1] = np.linalg.det(left) * np.linalg.det(right)
    return np.asarray((left * np.sign(signs)) @ right)


class Orthonormal(OfAll):
    """FedSVD: the average of A and B, and of full rank the singular vectors of its product."""

    def next_value(self, step: Step, there: Sequence[int], key: str) -> Value:
        """The average of a head, and a factor of the decomposition of the product of averages."""
        if key.startswith(HEAD):
            return super().next_value(step, there, key)
        module = key.removesuffix(LORA_A).removesuffix(LORA_B)
        (a, size_a), (b, size_b) = (mean_of(step, step.trained, there, module + end) for end in (LORA_A, LORA_B))
        left, sizes, right = decompose(b @ a)
        rank = len(a)
        if rank <= len(sizes) and sizes[rank - 1] > 1e-6 * sizes[0]:
            a, b = right[:rank], left[:, :rank] * sizes[:rank]
            turned = np.sign(a[np.arange(rank), np.abs(a).argmax(1)])
            a, b = turned[:, None] * a, turned * b
        factor, size = (a, size_a) if key.endswith(LORA_A) else (b, size_b)
        return factor, size + float(np.linalg.norm(factor))


@dataclass(frozen=True, kw_only=True)
class ExactAverage(OfAll):
    """FLoRA, FedEx-LoRA or FedMomentum: adapters, and a frozen part that holds what they lack of the average."""

    kind: str
    """`stacked`, `residual` or `rest`: what is held frozen."""

    def value(self, step: Step, k: int, key: str) -> Value | None:
        """The next value of this tensor of client k; None where it has no server step."""
        if self.kind != "stacked" or not key.endswith((LORA_A, LORA_B)):
            return super().value(step, k, key)
        if not self.average.stepping(step, k, key):
            return None
        sent, trained = (step.value(models, k, key) for models in (step.before, step.trained))
        next_value = sent if key.endswith(LORA_A) else np.zeros_like(sent)
        return next_value, float(np.linalg.norm(sent) + np.linalg.norm(trained))

    def frozen(self, _plan: AuditPlan, state: Flat, _client: str) -> dict[str, Tensor]:
        """Frozen part of every client, by parameter."""
        return below(state, "residual/")

    def state_fault(self, step: Step) -> tuple[str, float | None]:
        """(the first module whose frozen part is not as computed again, the largest error of all)."""
        there = step.there(range(step.num_clients))
        expected, sizes = dense_updates(step, step.state), dict[str, float]()
        if step.num_clients > 1 and there and not step.is_undone:
            for module in lora_modules(step.before[step.plan.clients[0]]):
                newest, size = self._newest(step, module, there)
                frozen = f"residual/{module}"
                expected |= {f"newest/{module}": newest, frozen: newest + expected.get(frozen, 0.0)}
                sizes |= {f"newest/{module}": size, frozen: size}
        recorded = dense_updates(step, step.told)
        return compare_values(expected, recorded, "the server state", tolerance=(0.0, FROZEN), sizes=sizes)

    def _newest(self, step: Step, module: str, there: Sequence[int]) -> tuple[np.ndarray, float]:
        """(what the round adds to this module, dense; the largest value of a product that went in)."""
        models = [step.trained[step.plan.clients[k]] for k in there]
        shares, products = step.shares(there), [update(step.plan, params, module) for params in models]
        total, _ = weighted(shares, products)
        if self.kind == "rest":
            left, values, right = decompose(total)
            rank = len(models[0][module + LORA_A])
            total = (left[:, rank:] * values[rank:]) @ right[rank:]
        elif self.kind == "residual":
            a, b = (
                weighted(shares, [numbers(params[module + end]) for params in models])[0] for end in (LORA_A, LORA_B)
            )
            total = total - step.plan.scale(len(a)) * (b @ a)
        return total, max(float(np.abs(product).max(initial=0.0)) for product in products)


class Directions(OfAll):
    """ILoRA: of the average of the products the orthonormal directions of its first columns, as many as the rank."""

    def initial(self, _run: Run, models: Models) -> dict[str, np.ndarray]:
        """The adapters that clients begin with; the frozen weights, whose directions they are, are not in a folder."""
        return {
            f"start/{client}/{key}": numbers(one)
            for client, params in models.items()
            for key, one in params.items()
            if key.endswith((LORA_A, LORA_B)) and one.numel()
        }

    def frozen(self, _plan: AuditPlan, state: Flat, client: str) -> dict[str, Tensor]:
        """Minus the update that the client began with."""
        own = below(state, f"start/{client}/")
        return {key: torch.neg(one) if key.endswith(LORA_B) else one for key, one in own.items()}

    def value(self, step: Step, k: int, key: str) -> Value | None:
        """The directions, or what the average has along them; the mean of heads."""
        there = self.average.stepping(step, k, key)
        if not there or not key.endswith((LORA_A, LORA_B)):
            return super().value(step, k, key)
        module, params = key.rpartition(".")[0], step.trained[step.plan.clients[k]]
        models = [step.trained[step.plan.clients[one]] for one in there]
        total, size = weighted(step.shares(there), [update(step.plan, one, module) for one in models])
        rank = len(params[module + LORA_A])
        directions = step.once(("directions", module, rank), lambda: _gram_schmidt(total, rank))
        if key.endswith(LORA_B):
            return directions, 1.0
        return directions.T @ total / step.plan.scale(rank), size


def _gram_schmidt(matrix: np.ndarray, count: int) -> np.ndarray:
    """Orthonormal columns (d_out, count) that span the first columns of a matrix, up to one that adds nothing."""
    columns, least = np.zeros((len(matrix), 0)), 1e-6 * float(np.linalg.norm(matrix))
    for column in matrix.T[:count]:
        rest = column - columns @ (columns.T @ column)
        if np.linalg.norm(rest) <= least:
            break
        rest = rest - columns @ (columns.T @ rest)  # the rounding of the first time
        columns = np.column_stack([columns, rest / np.linalg.norm(rest)])
    return _completed(columns, count)


def dense_updates(step: Step, state: Flat) -> dict[str, np.ndarray]:
    """The dense updates of factors in a server state, by part and module; of factors that do not fit a number alone."""
    return {
        module: update(step.plan, state, module)
        if {module + LORA_A, module + LORA_B} <= state.keys()
        and state[module + LORA_B].shape[-1] == len(state[module + LORA_A])
        else np.zeros(())
        for module in sorted({path.removesuffix(LORA_A).removesuffix(LORA_B) for path in state})
    }


class ByRankOne(Averaging):
    """Fed-PLoRA: modules of rank one, each the mean over who trained it, and those that each client trains next."""

    def initial(self, _run: Run, models: Models) -> dict[str, np.ndarray]:
        """The modules of the largest rank, of which each client trains the first."""
        state: dict[str, np.ndarray] = {"draws": np.array(0.0)}
        for client, params in models.items():
            for module in lora_modules(params):
                rank, path = len(params[module + LORA_A]), f"whole/{module}"
                state[f"chosen/{client}/{module}"] = np.arange(rank, dtype=np.float64)
                if path + LORA_A not in state or rank > len(state[path + LORA_A]):
                    state |= {path + end: numbers(params[module + end]) for end in (LORA_A, LORA_B)}
        return state

    def value(self, step: Step, k: int, key: str) -> Value | None:
        """The modules that client k trains next, or the mean of heads."""
        if not key.endswith((LORA_A, LORA_B)):
            there = step.there(step.mates(k, key))
            return mean_of(step, step.trained, there, key) if there else None
        if not any(step.present):
            return None
        state, module = step.once("expected", lambda: self.expected(step)), key[: -len(LORA_A)]
        places = state[f"chosen/{step.plan.clients[k]}/{module}"].astype(int)
        whole = state[f"whole/{key}"]
        if key.endswith(LORA_A):
            return whole[places], float(np.linalg.norm(whole))
        factor = step.plan.scale(whole.shape[1]) / step.plan.scale(len(places)) if len(places) else 1.0
        return factor * whole[:, places], float(np.linalg.norm(whole))

    def expected(self, step: Step) -> dict[str, np.ndarray]:
        """All modules after the round, and the places of those that each client trains next."""
        state, run = arrays(step.state), step.run
        if not any(step.present) or step.is_undone:
            return state
        modules = lora_modules(step.before[step.plan.clients[0]])
        new = {**{path: value.copy() for path, value in state.items()}, "draws": state["draws"] + 1}
        for module in modules:
            a, b = (new[f"whole/{module}{end}"] for end in (LORA_A, LORA_B))
            for j in range(len(a)):
                places = {k: list(state[f"chosen/{step.plan.clients[k]}/{module}"]) for k in range(step.num_clients)}
                own = {k: places[k].index(j) for k in step.there(range(step.num_clients)) if j in places[k]}
                if own:
                    models = [step.trained[step.plan.clients[k]] for k in own]
                    ways = [[numbers(params[module + end]) for end in (LORA_A, LORA_B)] for params in models]
                    rows = [wide[place] for (wide, _), place in zip(ways, own.values(), strict=True)]
                    columns = [
                        step.plan.scale(len(wide)) / step.plan.scale(len(a)) * tall[:, place]
                        for (wide, tall), place in zip(ways, own.values(), strict=True)
                    ]
                    a[j], b[:, j] = (weighted(step.shares(list(own)), values)[0] for values in (rows, columns))
        sizes = {module: len(new[f"whole/{module}{LORA_A}"]) for module in modules}
        for client in step.plan.clients:
            draw = generator(run.settings.run.seed, "fedplora", int(new["draws"]), client)
            order = draw.permutation(max(sizes.values(), default=0)).tolist()
            for module, rank in ranks(step.before[client]).items():
                drawn = sorted([j for j in order if j < sizes[module]][:rank])
                new[f"chosen/{client}/{module}"] = np.array(drawn, np.float64)
        return new

    def frozen(self, plan: AuditPlan, state: Flat, client: str) -> dict[str, Tensor]:
        """The modules that the client does not train, as an adapter of their number."""
        part: dict[str, Tensor] = {}
        for module, places in below(state, f"chosen/{client}/").items():
            a, b = (state[f"whole/{module}{end}"] for end in (LORA_A, LORA_B))
            others = [j for j in range(len(a)) if j not in places.tolist()]
            if others:
                part[module + LORA_A] = a[others]
                part[module + LORA_B] = plan.scale(len(a)) / plan.scale(len(others)) * b[:, others]
        return part


class Cores(Averaging):
    """Fed-SB and RAVAN: means of the blocks, each times its factor; after a report, factors of the sum of gradients."""

    def value(self, step: Step, k: int, key: str) -> Value | None:
        """The next value of this tensor of client k."""
        there = step.there(step.mates(k, key))
        if not there:
            return None
        module = key.rpartition(".")[0]
        if f"gradient/{module}" in step.told and f"gradient/{module}" not in step.state:
            value = step.once(
                ("factors", module),
                lambda: self._factors(step, module, len(step.before[step.plan.clients[k]][f"{module}{LORA_A}"])),
            )[key]
            return value, float(np.linalg.norm(value))
        if key.endswith(LORA_SCALE):
            return np.ones(len(step.trained[step.plan.clients[k]][key])), 1.0
        values = [step.value(step.trained, one, key) for one in there]
        if key.endswith(LORA_CORE) and module + LORA_SCALE in step.trained[step.plan.clients[k]]:
            scales = [step.value(step.trained, one, module + LORA_SCALE) for one in there]
            values = [scale[:, None, None] * value for scale, value in zip(scales, values, strict=True)]
        return weighted(step.shares(there), values)

    def expected(self, step: Step) -> dict[str, np.ndarray]:
        """The sum of the gradients, as it was recorded: only the factors by it are computed again."""
        return arrays(step.told)

    def _factors(self, step: Step, module: str, rank: int) -> dict[str, np.ndarray]:
        """Fed-SB's A, B and R of a module."""
        settings = step.run.settings
        lr = settings.training.lr if settings.training.lr is not None else suggested_lr(settings.model.model)
        eta = settings.server.first_step * lr / step.plan.scale(rank)
        left, values, right = decompose(-eta * np.sign(numbers(step.told[f"gradient/{module}"])))
        count = int((values[:rank] > 1e-6 * values[0]).sum())
        signs = np.array([np.sign(row[np.abs(row) > np.abs(row).max() / 2][0]) for row in right[:count]])
        core = np.zeros((1, rank, rank))
        core[0, range(count), range(count)] = values[:count]
        return {
            module + LORA_A: _completed(right[:count].T * signs, rank).T,
            module + LORA_B: _completed(left[:, :count] * signs, rank),
            module + LORA_CORE: core,
        }


def _completed(basis: np.ndarray, rank: int) -> np.ndarray:
    """Gram-Schmidt: these columns, then unit vectors less what is in those before; zeros where none is left."""
    columns = list(basis.T)
    for unit in np.eye(len(basis))[: max(min(rank, len(basis)) - len(columns), 0)]:
        rest = unit - sum((column @ unit) * column for column in columns)
        columns.append(rest / np.linalg.norm(rest))
    return np.pad(np.stack(columns, axis=1), ((0, 0), (0, rank - len(columns))))
