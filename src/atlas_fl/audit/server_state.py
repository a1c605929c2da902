"""Audit of the server state: moments of server optimizers and pFedGraph's directions, recomputed dense in float64.

Moments are computed cohort by cohort. The models that clients began with, from which pFedGraph takes their directions,
must be those of the run.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from atlas_fl.audit.exact_average import ExactStep
from atlas_fl.audit.feddyn import DynamicStep
from atlas_fl.audit.recompute import is_mixed
from atlas_fl.audit.report import AuditRow
from atlas_fl.audit.rule_weights import (
    KRIGING,
    RESIDUAL,
    SERVER_OPTIMIZERS,
    STACKED,
    Robust,
    bound_weights,
    robust_of,
    run_kind,
)
from atlas_fl.audit.run_files import AuditPlan, Models, Run, read_with_note, round_folder
from atlas_fl.errors import CheckpointError
from atlas_fl.params import HEAD, LORA_A, LORA_B, PRIVATE
from atlas_fl.storage.jsonl import from_json

Flat = Mapping[str, Tensor]
"""A server state: tensors by their paths."""

FILE = "server.safetensors"
RELATIVE, OF_LARGEST = 1e-4, 1e-6
"""Tolerance of a moment: as a share of itself, and of the largest of its tensor."""
FLOAT32 = 3e38
"""A state beyond this cannot be kept, and its round is undone."""


def read_state(folder: Path, *, within: Path) -> Flat | None:
    """The server state that was written here; None where there is none. Raises CheckpointError for a damaged one."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        state, note = read_with_note(path, within=within)
        same = from_json(note or "{}")
        return state | {name: state[lead] for lead, names in same.items() for name in names}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def state_after(run: Run, round: int, before: Flat) -> Flat:
    """The server state after this round; what it was before where the round wrote none."""
    state = read_state(round_folder(run, round), within=run.path)
    return before if state is None else state


def latest_state(run: Run, round: int) -> dict[str, np.ndarray]:
    """The server state as of this round, as float64 arrays by path: the last one that was written."""
    states = (read_state(round_folder(run, earlier), within=run.path) for earlier in range(round, -1, -1))
    return flat_arrays(next((state for state in states if state is not None), {}))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The numbers of a server optimizer."""

    lr: float
    beta1: float
    beta2: float
    tau: float


def settings_of(run: Run, kind: str) -> Settings:
    """Settings of this rule, from config.toml and its defaults."""
    given: Mapping[str, Any] = run.config.get("server", {})
    lr, beta1 = SERVER_OPTIMIZERS[kind]

    def number(name: str, default: float) -> float:
        value = given.get(name, "none")
        return default if value == "none" else float(value)

    return Settings(
        lr=number("server_lr", lr),
        beta1=number("server_beta1", beta1),
        beta2=number("server_beta2", 0.99),
        tau=number("server_tau", 1e-3),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """Input of a server step."""

    plan: AuditPlan
    kind: str
    """The rule."""
    settings: Settings
    robust: Robust
    present: tuple[bool, ...]
    space: str
    share: Sequence[str]
    before: Models
    """The models of the last aggregation."""
    trained: Models
    """The same with the updates."""
    state: Flat
    """Server state before the round."""


class OptimizerStep:
    """The step of a server optimizer: for each cohort, the next model and the moments of every tensor."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._next: dict[tuple[str, str], tuple[np.ndarray, float, dict[str, np.ndarray]]] = {}

    def cohort(self, k: int, *, head: bool) -> tuple[str, list[int]]:
        """(name, members) of the clients that client k has its model, or its head, in common with."""
        plan, within = self.inputs.plan, self.inputs.robust.within
        alone = within == "clusters" and plan.clusters[k] < 0
        members = [
            other
            for other in range(len(plan.clients))
            if (within == "all" or plan.clusters[k] == plan.clusters[other])
            and (not head or plan.tasks[k] == plan.tasks[other])
            and (not alone or other == k)
        ]
        parts = [] if within == "all" else [f"cluster-{plan.clusters[k]}"]
        parts += [f"task-{plan.tasks[k]}"] if head else []
        return "-".join(parts) or "all", members

    def moves(self, k: int, key: str) -> bool:
        """Return whether client k has others in its cohort, and somebody of them took part."""
        _, members = self.cohort(k, head=key.startswith(HEAD))
        return len(members) > 1 and any(self.inputs.present[one] for one in members)

    def next(self, k: int, key: str) -> tuple[np.ndarray, float] | None:
        """(x_{t+1}, the size of what went in) of this tensor, or in product space of its module.

        None where client k has no server step.
        """
        if self.inputs.space == "product" and key.endswith(LORA_B):
            key = key.removesuffix(LORA_B) + LORA_A
        return self._step(k, key)[:2] if self.moves(k, key) else None

    def moments(self) -> dict[str, np.ndarray]:
        """The whole state after the step, by path: that of cohorts without a step as it was."""
        state = flat_arrays(self.inputs.state)
        for k, client in enumerate(self.inputs.plan.clients):
            for key, tensor in self.inputs.before[client].items():
                if self._has_step(key) and tensor.numel() and self.moves(k, key):
                    state |= self._step(k, key)[2]
        return state

    def _has_step(self, key: str) -> bool:
        inputs = self.inputs
        if key == PRIVATE or (inputs.space == "product" and key.endswith(LORA_B)):
            return False
        if key.startswith(HEAD):
            return "head" in inputs.share
        kinds = {key[-1]} if key.endswith((LORA_A, LORA_B)) else {"A", "B"}
        return bool(kinds & set(inputs.share))

    def _value(self, models: Models, client: str, key: str) -> np.ndarray:
        value = np.asarray(models[client][key].double().numpy())
        if self.inputs.space == "product" and key.endswith(LORA_A):
            other = models[client][key.removesuffix(LORA_A) + LORA_B].double().numpy()
            return np.asarray(self.inputs.plan.scale(len(value)) * (other @ value))
        return value

    def _step(self, k: int, key: str) -> tuple[np.ndarray, float, dict[str, np.ndarray]]:
        inputs = self.inputs
        cohort, members = self.cohort(k, head=key.startswith(HEAD))
        if (cohort, key) not in self._next:
            there = [one for one in members if inputs.present[one]]
            examples = bound_weights([inputs.plan.examples[one] for one in there], inputs.robust.max_share)
            current, change, size = np.zeros(()), np.zeros(()), 0.0
            for one, weight in zip(there, examples, strict=True):
                client, p = inputs.plan.clients[one], weight / sum(examples)
                sent, trained = (self._value(models, client, key) for models in (inputs.before, inputs.trained))
                current, change = current + p * sent, change + p * (trained - sent)
                size += p * float(np.linalg.norm(sent) + np.linalg.norm(trained))
            name = key.removesuffix(LORA_A) if inputs.space == "product" else key
            step, moments = self._move(f"{cohort}/{name}", change)
            self._next[cohort, key] = (current + step, size + float(np.linalg.norm(step)), moments)
        return self._next[cohort, key]

    def _move(self, path: str, change: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(the step, the moments by path) for this change, value by value as algorithm 2 of Reddi et al. says."""
        numbers, kind = self.inputs.settings, self.inputs.kind
        first, second = (self._last(f"{word}/{path}", change.shape) for word in ("first", "second"))
        old = np.zeros_like(change) if first is None else first
        if kind == "fedavgm":
            momentum = numbers.beta1 * old + change
            return numbers.lr * momentum, {f"first/{path}": momentum}
        m = numbers.beta1 * old + (1.0 - numbers.beta1) * change
        v = np.full_like(change, numbers.tau * numbers.tau) if second is None else second
        square = change * change
        if kind == "fedadagrad":
            v = v + square
        elif kind == "fedyogi":
            v = np.where(v > square, v - (1.0 - numbers.beta2) * square, v)
            grown = np.full_like(change, numbers.tau * numbers.tau) if second is None else second
            v = np.where(grown < square, grown + (1.0 - numbers.beta2) * square, v)
        else:
            v = numbers.beta2 * v + (1.0 - numbers.beta2) * square
        step = numbers.lr * m / (np.sqrt(v) + numbers.tau)
        return np.asarray(step), {f"first/{path}": m, f"second/{path}": v}

    def _last(self, path: str, shape: tuple[int, ...]) -> np.ndarray | None:
        tensor = self.inputs.state.get(path)
        if tensor is None:
            return None
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{path} of the server state has shape {tuple(tensor.shape)}, its tensor {shape}")
        return np.asarray(tensor.double().numpy())


def recompute_server_step(
    run: Run, plan: AuditPlan, kind: str, *, present: Collection[str], before: Models, trained: Models, state: Flat
) -> OptimizerStep | DynamicStep | ExactStep | None:
    """The step of this round; None under a rule whose step is a mixture of what was trained."""
    if kind == "feddyn":
        return DynamicStep(
            plan=plan,
            present=[client in present for client in plan.clients],
            share=run.mixing.share,
            max_share=robust_of(run).max_share,
            before=before,
            trained=trained,
            state=state,
        )
    if kind in (STACKED, RESIDUAL):
        return ExactStep(
            plan=plan,
            kind=kind,
            present=[client in present for client in plan.clients],
            share=run.mixing.share,
            max_share=robust_of(run).max_share,
            before=before,
            trained=trained,
            state=state,
        )
    if kind not in SERVER_OPTIMIZERS:
        return None
    return OptimizerStep(
        Inputs(
            plan=plan,
            kind=kind,
            settings=settings_of(run, kind),
            robust=robust_of(run),
            present=tuple(client in present for client in plan.clients),
            space=run.mixing.space,
            share=run.mixing.share,
            before=before,
            trained=trained,
            state=state,
        )
    )


def flat_arrays(state: Flat) -> dict[str, np.ndarray]:
    """The state as float64 arrays by path."""
    return {path: np.asarray(tensor.double().numpy()) for path, tensor in state.items()}


def with_initial(run: Run, state: Flat, models: Models) -> dict[str, np.ndarray]:
    """Expected state once these clients begin with these models, as float64 arrays by path."""
    arrays = flat_arrays(state)
    if run_kind(run) in ("pfedgraph", KRIGING):
        for client, params in models.items():
            shared = {key: value for key, value in params.items() if is_mixed(key, run.mixing.share)}
            arrays |= {f"initial/{client}/{key}": value.double().numpy() for key, value in shared.items()}
    return arrays


class Directions:
    """The rows of pFedGraph in one round: by the cosines between the changes since the beginning of the run."""

    def __init__(self, run: Run, plan: AuditPlan, models: Models, state: Flat) -> None:
        self._run, self._plan, self._models, self._state = run, plan, models, state
        given: Mapping[str, Any] = run.config.get("server", {})
        self._by, self._alpha = str(given.get("gram_by", "all")), float(given.get("gram_alpha", 0.8))
        self._cosines: dict[tuple[tuple[int, ...], str], np.ndarray] = {}

    def row(self, k: int, members: Sequence[int], shares: list[float], key: str) -> list[float]:
        """argmin over the simplex of sum_l m_l d_kl + alpha || m - p ||^2, by bisection on what each entry loses."""
        among = (tuple(members), key)
        if among not in self._cosines:
            self._cosines[among] = self._compare(members, key)
        pulls = self._cosines[among][members.index(k)] / (2.0 * self._alpha)
        point = [shares[other] + float(pull) for other, pull in zip(members, pulls, strict=True)]
        low, high = min(point) - 1.0, max(point)
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(max(one - middle, 0.0) for one in point) > 1.0 else (low, middle)
        row = [0.0] * len(shares)
        for other, one in zip(members, point, strict=True):
            row[other] = max(one - high, 0.0)
        return [weight / sum(row) for weight in row]

    def _compare(self, clients: Sequence[int], key: str) -> np.ndarray:
        """The cosines between these clients, over the parameters that share a matrix with `key`."""
        run, plan = self._run, self._plan
        products = np.zeros((len(clients), len(clients)))
        names = [plan.clients[k] for k in clients]
        for one in dict.fromkeys(one for name in names for one in self._models[name]):
            if not _is_compared(run, plan, one, key, by=self._by):
                continue
            changes = [change_since_start(run, plan, name, one, self._models, self._state) for name in names]
            for i, left in enumerate(changes):
                for j, right in enumerate(changes):
                    if not one.startswith(HEAD) or plan.tasks[clients[i]] == plan.tasks[clients[j]]:
                        shorter = min(len(left), len(right))
                        products[i, j] += float(left[:shorter] @ right[:shorter])
        sizes = np.sqrt(np.outer(np.diag(products), np.diag(products)))
        cosines = np.divide(products, sizes, out=np.zeros_like(products), where=sizes > 0)
        np.fill_diagonal(cosines, 1.0)
        return cosines


def _is_compared(run: Run, plan: AuditPlan, one: str, key: str, *, by: str) -> bool:
    """Return whether the matrix of `key` follows from `one`, which in product space stands for its module at its A."""
    if not is_mixed(one, run.mixing.share) or (run.mixing.space == "product" and one.endswith(LORA_B)):
        return False
    return by == "all" or shares_matrix(run, plan, one, key, by=by)


def shares_matrix(run: Run, plan: AuditPlan, one: str, key: str, *, by: str) -> bool:
    """Return whether both are heads, or neither is and `--gram-by` gives them one matrix."""
    if one.startswith(HEAD) or key.startswith(HEAD):
        return one.startswith(HEAD) and key.startswith(HEAD)
    ends = [next((end for end in (LORA_A, LORA_B) if name.endswith(end)), "") for name in (one, key)]
    layers = [plan.layer_of.get(name.removesuffix(end)) for name, end in zip((one, key), ends, strict=True)]
    same_kind = ends[0] == ends[1] or (run.mixing.space == "product" and all(ends))
    return (layers[0] == layers[1] or by in ("all", "kind")) and (same_kind or by in ("all", "layer"))


def change_since_start(run: Run, plan: AuditPlan, client: str, key: str, models: Models, state: Flat) -> np.ndarray:
    """Change of this client's tensor since the beginning, as a vector; empty where it has none.

    Where the state lacks what it began with, that counts as zero: the row of the state itself has failed then.
    """
    now = models[client]
    if key not in now:
        return np.zeros(0)
    is_product = run.mixing.space == "product" and key.endswith(LORA_A)
    names = [key, key.removesuffix(LORA_A) + LORA_B] if is_product else [key]
    first = {name: state.get(f"initial/{client}/{name}", now[name] * 0) for name in names}
    last, initial = (_vector(plan, key, params, is_product=is_product) for params in (now, first))
    longest = max(len(last), len(initial))
    return np.asarray(np.pad(last, (0, longest - len(last))) - np.pad(initial, (0, longest - len(initial))))


def _vector(plan: AuditPlan, key: str, params: Mapping[str, Tensor], *, is_product: bool) -> np.ndarray:
    value = params[key].double().numpy()
    if is_product:
        value = plan.scale(len(value)) * (params[key.removesuffix(LORA_A) + LORA_B].double().numpy() @ value)
    return np.asarray((value.T if key.endswith(LORA_B) else value).ravel())


def state_fault(expected: Mapping[str, np.ndarray], state: Flat, *, before: Flat) -> tuple[str, float]:
    """(the first entry that is not as computed again, the largest error of a value over the largest of its tensor)."""
    if any(np.abs(value).max(initial=0.0) > FLOAT32 for value in expected.values()):
        expected = flat_arrays(before)
    if lacking := sorted(expected.keys() - state.keys()):
        return f"the server state lacks {lacking[0]}", float("inf")
    if unknown := sorted(state.keys() - expected.keys()):
        return f"the server state has {unknown[0]}, which the rule does not make", float("inf")
    worst, fault = 0.0, ""
    for path, want in expected.items():
        got = state[path].double().numpy()
        if got.shape != want.shape or not np.isfinite(got).all():
            return f"{path} of the server state has shape {got.shape} or a value that is no number", float("inf")
        largest = float(np.abs(want).max(initial=0.0))
        error = float(np.abs(got - want).max(initial=0.0)) / (largest or 1.0)
        worst = max(worst, error)
        if not fault and not np.allclose(got, want, rtol=RELATIVE, atol=OF_LARGEST * largest):
            fault = f"{path} of the server state is {error:.2g} away from the recomputation"
    return fault, worst


def check_server_state(run: Run, round: int, expected: Mapping[str, np.ndarray], *, before: Flat) -> Iterator[AuditRow]:
    """A row for the server state after this round; nothing for a strategy without one."""
    yield from _compare_states(run, round, expected, state_after(run, round, before), before=before)


def check_unchanged(run: Run, round: int, expected: Mapping[str, np.ndarray], state: Flat) -> Iterator[AuditRow]:
    """The same for a state that no round has made, at the beginning and where clients join."""
    yield from _compare_states(run, round, expected, state, before=state)


def _compare_states(
    run: Run, round: int, expected: Mapping[str, np.ndarray], state: Flat, *, before: Flat
) -> Iterator[AuditRow]:
    if not expected and not state:
        return
    fault, error = state_fault(expected, state, before=before)
    yield AuditRow(run=run.path.name, round=round, client="", check="server", ok=not fault, error=error, detail=fault)
