"""Laws that every method obeys, checked on a small federation of two tasks: `atlas check-method FILE`.

Five clients with ranks of their own where a method takes them, of which some take no part and one has never taken part.
A fault is a sentence for the author of the method.
"""

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch

from atlas_fl.aggregation.distances import squared_distances
from atlas_fl.aggregation.matrices import Federation
from atlas_fl.aggregation.rules import Answers, RoundModels, StrategyOptions
from atlas_fl.errors import AtlasError
from atlas_fl.methods.method import Aggregated, Method, RoundStart, StepInputs
from atlas_fl.params import HEAD, ByClient, Params, ServerState, digest, flatten_state

CLIENTS = ("a", "b", "c", "d", "e")
TASKS = ("movie", "movie", "trec", "trec", "movie")
LABELS = 3
"""Classes of both tasks, so that nothing but the law keeps their heads apart."""
ATOL = 1e-4
"""Largest difference of values of the order of one that is rounding."""


def check_method(method: type[Method], options: StrategyOptions | None = None) -> list[str]:
    """The faults of a method, a sentence each; none where it obeys all laws."""
    options = options or StrategyOptions(space="factors" if method.in_factors else "product")
    faults: list[str] = []
    for name, law in LAWS.items():
        try:
            fault = law(Trial(method(options)))
        except AtlasError as error:
            fault = str(error)
        except ERRORS as error:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
            place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
            fault = f"{type(error).__name__}: {error}{place}"
        if fault:
            faults.append(f"{name}: {fault}")
        if faults and name == "shapes":
            break  # the other laws read the models that this one looks for
    return faults


ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that code of a method may raise by mistake."""


class Trial:
    """A method with models, updates and reports of five clients."""

    def __init__(self, method: Method) -> None:
        self.method = method
        ranks = (4,) * 5 if method.equal_ranks or "equal ranks" in method.needs else (2, 4, 2, 3, 4)
        self.federation = _federation(CLIENTS, TASKS)
        try:
            method.check({name: _model(0, rank) for name, rank in zip(CLIENTS, ranks)}, self.federation)
        except AtlasError:
            ranks = (4,) * 5
        self.before = {name: _model(k, rank) for k, (name, rank) in enumerate(zip(CLIENTS, ranks))}
        self.updates = {name: _model(10 + k, rank) for k, (name, rank) in enumerate(zip(CLIENTS, ranks))}

    def step(
        self,
        updates: ByClient,
        *,
        before: ByClient | None = None,
        state: ServerState | None = None,
        federation: Federation | None = None,
    ) -> Aggregated:
        """One server step in round two, with the answers that these updates come with."""
        before = self.before if before is None else before
        state = self.method.init(before) if state is None else state
        reports = self._reports(updates)
        if reports:
            state = self.method.record_reports(state, reports)
        answers = Answers(
            metrics={name: {"loss": 1.0 + CLIENTS.index(name) / 4, "steps": 3.0, "seconds": 1.0} for name in updates},
            validation=dict.fromkeys(updates, 0.5),
            reports={self.method.report: reports} if reports else {},
        )
        return self.method.aggregate(
            StepInputs(
                server_state=state,
                client_models=before,
                updates=updates,
                federation=federation or self.federation,
                round=2,
                answers=answers,
            )
        )

    def _reports(self, updates: ByClient) -> dict[str, Params]:
        if self.method.report == "none":
            return {}
        made: dict[str, Params] = {}
        for name, params in updates.items():
            draw = torch.Generator().manual_seed(CLIENTS.index(name))
            made[name] = {
                key: (torch.rand(schema.shape, generator=draw, dtype=torch.float64) + 1).to(schema.dtype)
                for key, schema in self.method.report_tensors(params, classes=len(params["head.weight"])).items()
            }
        return made


def _model(seed: int, rank: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    model = {}
    for layer in (0, 1):
        model[f"layer.{layer}.q.lora_A"] = torch.randn(rank, 6, generator=draw)
        model[f"layer.{layer}.q.lora_B"] = torch.randn(5, rank, generator=draw)
    return {**model, "head.weight": torch.randn(LABELS, 6, generator=draw)}


def _federation(names: Sequence[str], tasks: Sequence[str]) -> Federation:
    n = len(names)
    clusters = np.array([0 if task == "movie" else 1 for task in tasks])
    edges = (clusters[:, None] == clusters[None, :]) & ~np.eye(n, dtype=bool)
    return Federation(
        clients=tuple(names),
        weights=np.array([200.0, 100.0, 300.0, 50.0, 150.0])[[CLIENTS.index(name) for name in names]],
        clusters=clusters,
        adjacency=edges.astype(float),
        head_groups=tuple(tasks),
        importance=np.full((n, 2), 0.5),
        layer_of={"layer.0.q": 0, "layer.1.q": 1},
    )


def _some(trial: Trial) -> dict[str, Params]:
    return {name: trial.updates[name] for name in ("a", "b", "c")}


def _distance(one: Params, other: Params) -> float:
    """The distance of two models, of whatever ranks, in product space."""
    models, options = {"one": one, "other": other}, StrategyOptions(scale=lambda _: 1.0)
    squares = (squared_distances(models, list(models), options, head=head)[0, 1] for head in (False, True))
    return math.sqrt(sum(map(float, squares)))


def _same_tensors(one: ByClient, other: ByClient) -> bool:
    return all(digest(one[name]) == digest(other[name]) for name in one)


def _shapes(trial: Trial) -> str:
    """Every client gets a model of the tensors, shapes and types that it has."""
    done = trial.step(_some(trial)).client_models
    for name, params in trial.before.items():
        if name not in done:
            return f"client {name} gets no model; return one for every client of the federation"
        for key, tensor in params.items():
            got = done[name].get(key)
            if got is None or got.shape != tensor.shape or got.dtype != tensor.dtype:
                shape = None if got is None else tuple(got.shape)
                return (
                    f"{key} of client {name} is {shape}, and its model has {tuple(tensor.shape)}; keep names and shapes"
                )
    return ""


def _rows(trial: Trial) -> str:
    """Rows of the mixing matrix sum to one, and heads mix inside a task."""
    if type(trial.method).rule is Method.rule:
        return ""
    state = trial.step(trial.updates).server_state
    updates = _some(trial)
    models = RoundModels(before=trial.before, after={**trial.before, **updates}, server_state=state)
    matrices = trial.method.matrices(trial.federation, [name in updates for name in CLIENTS], round=2, models=models)
    for key in ("layer.0.q.lora_A", "head.weight"):
        matrix = np.asarray(matrices(key))
        if matrix.shape != (5, 5) or not np.allclose(matrix.sum(axis=1), 1, atol=1e-9):
            sums = matrix.sum(axis=1).round(3).tolist() if matrix.ndim == 2 else matrix.shape
            return f"the rows for {key} sum to {sums}; each must sum to 1"
        apart = np.array([[one != other for other in TASKS] for one in TASKS])
        if key.startswith(HEAD) and np.abs(matrix[apart]).max() > 0:
            return "heads of different tasks mix; keep clients of different step.groups apart"
    return ""


def _untouched(trial: Trial) -> str:
    """Inputs stay as they are."""
    kept, sent = deepcopy(trial.before), deepcopy(trial.updates)
    trial.step(trial.updates)
    same = _same_tensors(kept, trial.before) and _same_tensors(sent, trial.updates)
    return "" if same else "it changes the models that it is given; make new tensors"


def _deterministic(trial: Trial) -> str:
    """The same inputs give the same bits."""
    one, other = (trial.step(_some(trial)) for _ in range(2))
    return "" if _same_tensors(one.client_models, other.client_models) else "two equal steps give different models"


def _alone(trial: Trial) -> str:
    """One client alone keeps what it trained, unless the method says that its server steps on from it."""
    if trial.method.steps_on:
        return ""
    alone = _federation(("a",), TASKS[:1])
    update = {"a": trial.updates["a"]}
    done = trial.step(update, before={"a": trial.before["a"]}, federation=alone)
    whole = _whole(trial.method, done, "a")
    if _distance(whole, update["a"]) < ATOL:
        return ""
    return "a client alone does not keep what it trained; where the method's formula says so, set steps_on = True"


def _whole(method: Method, done: Aggregated, name: str) -> Params:
    """The model that a client predicts with."""
    state = RoundStart(
        round=3,
        clients=(name,),
        tasks=dict(zip(CLIENTS, TASKS)),
        client_models=done.client_models,
        server_models=done.client_models,
        server_state=done.server_state,
    )
    return (method.predict(state) or done.client_models)[name]


def _identical(trial: Trial) -> str:
    """Clients that all have trained the same model keep it."""
    same = {name: _model(20, 4) for name in CLIENTS}
    start = {name: _model(21, 4) for name in CLIENTS}
    done = trial.step(same, before=start, federation=_federation(CLIENTS, ("movie",) * 5))
    kind = type(trial.method)
    if kind.aggregate is not Method.aggregate or kind.complete is not Method.complete:
        return ""  # a step of the server need not end where clients agree
    worst = max(_distance(_whole(trial.method, done, name), same[name]) for name in CLIENTS)
    return "" if worst < ATOL else f"clients that agree are moved by {worst:.2g}; rows of 1 leave them where they are"


def _permuted(trial: Trial) -> str:
    """The order of the clients decides nothing."""
    updates = _some(trial)
    done = trial.step(updates)
    order = ("d", "b", "e", "a", "c")
    tasks = dict(zip(CLIENTS, TASKS))
    federation = _federation(order, [tasks[name] for name in order])
    before = {name: trial.before[name] for name in order}
    again = trial.step({name: updates[name] for name in order if name in updates}, before=before, federation=federation)
    worst = max(_distance(done.client_models[name], again.client_models[name]) for name in CLIENTS)
    return "" if worst < ATOL else f"another order of the clients moves a model by {worst:.2g}"


def _newcomer(trial: Trial) -> str:
    """A client that nobody has heard of takes part, and one that is new gets a model."""
    first = trial.step({name: trial.updates[name] for name in ("a", "b")})
    trial.step({name: trial.updates[name] for name in ("c", "e")}, before=first.client_models, state=first.server_state)
    if trial.method.takes_newcomers:
        known = {name: params for name, params in trial.before.items() if name != "e"}
        fresh = {"e": trial.before["e"]}
        state = trial.method.init(known)
        made = trial.method.initial_models(state, known, fresh, trial.federation)
        trial.method.extend_state(state, made)
        if made.keys() != {"e"}:
            return f"initial_models gives models of {sorted(made)}, and e is new"
    return ""


def _remembers(trial: Trial) -> str:
    """The server state is tensors, and after a restart from them the next round has the same bits."""
    first = trial.step(trial.updates)
    leaves = flatten_state(first.server_state)
    if wrong := [path for path, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)]:
        return f"{wrong[0]} of its state is no tensor; a state is nested mappings with tensors at their ends"
    again = trial.step(trial.updates)
    one, other = (
        trial.step(_some(trial), before=done.client_models, state=done.server_state) for done in (first, again)
    )
    same = _same_tensors(one.client_models, other.client_models)
    return "" if same else "the next round differs after a restart: it remembers something outside of its state"


LAWS: Mapping[str, Callable[[Trial], str]] = {
    "shapes": _shapes,
    "rows": _rows,
    "inputs": _untouched,
    "determinism": _deterministic,
    "one client": _alone,
    "identical clients": _identical,
    "order": _permuted,
    "clients without a state": _newcomer,
    "state": _remembers,
}
"""The laws by name."""
