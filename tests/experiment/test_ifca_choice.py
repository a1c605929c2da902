"""IFCA's choice: the least loss wins, ties stay, and the models are those of the clusters."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from atlas_fl.aggregation.matrices import Federation
from atlas_fl.client.job import Job, Update
from atlas_fl.config import Config, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.experiment.rounds import choose_models
from atlas_fl.experiment.state import CurrentRun, FederationState
from atlas_fl.methods.cfl import CLUSTERS
from atlas_fl.methods.ifca import LOSSES, draw_clusters
from atlas_fl.methods.registry import find_method
from tests.aggregation.federations import server_step

TASKS = {"a": "movie", "b": "movie", "c": "movie", "d": "trec"}


BEFORE = {"a": 0, "b": 0, "c": 1, "d": 1}
"""Clusters before a choice."""
DEARER = {name: {0: 0.9, 1: 0.1} for name in TASKS}
"""Losses that are less with the second model, of all clients."""


@dataclass
class Losses:
    """An engine whose clients have these losses with a model: of each client a function of its A."""

    of: dict[str, Callable[[float], float]]
    splits: set[str] = field(default_factory=set)

    def run(self, action: str, jobs: list[Job]) -> list[Update]:
        assert action == "evaluate"
        self.splits |= {job.options.split for job in jobs}
        return [
            Update(client=job.client, params={}, examples=1, metrics={"loss": self.of[job.client](a_of(job.params))})
            for job in jobs
            if job.client in self.of
        ]


def table(losses: dict[str, dict[float, float]]) -> Losses:
    return Losses({name: own.__getitem__ for name, own in losses.items()})


def a_of(params: Any) -> float:
    return float(params["q.lora_A"])


def model(value: float, head: float) -> dict[str, torch.Tensor]:
    return {"q.lora_A": torch.tensor([value]), "head.w": torch.tensor([head])}


def assembly_of(config: Config, tasks: dict[str, str]) -> Any:
    clients = [SimpleNamespace(name=name, task=SimpleNamespace(name=task), train=()) for name, task in tasks.items()]
    return SimpleNamespace(config=config, clients=clients, names=tuple(tasks), drawn_from=())


def chosen(engine: Losses, **words: Any) -> Any:
    config = with_values(find_preset("smoke"), {"strategy": "ifca", "ranks": "8", "rounds": 5, **words})
    models = {name: model(float(BEFORE[name]), head=float(index)) for index, name in enumerate(TASKS)}
    labels = {CLUSTERS: {name: torch.tensor(label) for name, label in BEFORE.items()}}
    state = FederationState(round=1, server_models=models, client_models=models, server_state=labels)
    return Chosen(*choose(assembly_of(config, TASKS), engine, state)), models


def choose(assembly: Any, engine: Any, state: FederationState) -> tuple[FederationState, Any]:
    planned = [SimpleNamespace(name=name, predicted={"seconds": 1.0}) for name in assembly.names]
    plan: Any = SimpleNamespace(plan=SimpleNamespace(clients=planned))
    return choose_models(CurrentRun(assembly, plan, state), engine)


@dataclass
class Chosen:
    """The state after a choice, and its messages."""

    state: FederationState
    messages: Any

    @property
    def labels(self) -> dict[str, int]:
        """The cluster of each client."""
        return {name: int(label) for name, label in self.state.server_state[CLUSTERS].items()}  # type: ignore[union-attr, arg-type]


def test_everyone_takes_the_model_with_the_least_loss_on_its_validation_examples() -> None:
    engine = table({"a": {0: 0.5, 1: 0.4}, "b": {0: 0.3, 1: 0.9}, "c": {0: 0.7, 1: 0.6}, "d": {0: 0.1, 1: 0.8}})
    choice, models = chosen(engine)
    assert engine.splits == {"validation"}
    assert choice.labels == {"a": 1, "b": 0, "c": 1, "d": 0}
    now = choice.state.client_models
    assert now["a"] is models["c"], "adapters and head of a member of its task"
    assert (a_of(now["d"]), float(now["d"]["head.w"])) == (0.0, 3.0), "another task's adapters, and its own head"
    assert now["b"] is models["b"] and choice.state.server_models == now


def test_of_equal_losses_the_own_cluster_wins() -> None:
    choice, models = chosen(Losses(dict.fromkeys(TASKS, lambda _: 0.5)))
    assert choice.labels == BEFORE and choice.state.client_models == models


def test_who_does_not_answer_stays() -> None:
    choice, _ = chosen(table({name: DEARER[name] for name in "bcd"}))
    assert choice.labels == {**BEFORE, "b": 1}


@pytest.mark.parametrize(
    ("losses", "cluster", "kept"),
    [({0: nan, 1: 0.7}, 1, {"1"}), ({0: 0.7, 1: nan}, 0, {"0"}), ({0: inf, 1: nan}, 0, set())],
)
def test_a_loss_that_is_no_number_never_wins_and_is_not_remembered(
    losses: dict[float, float], cluster: int, kept: set[str]
) -> None:
    """One in the server state would undo the round of everyone."""
    choice, _ = chosen(table({**DEARER, "a": losses}))
    assert choice.labels == {"a": cluster, "b": 1, "c": 1, "d": 1}
    remembered = choice.state.server_state[LOSSES]
    assert set(remembered.get("a", {})) == kept
    assert all(tensor.isfinite() for by_label in remembered.values() for tensor in by_label.values())


@pytest.mark.parametrize("seed", range(4))
def test_a_planted_federation_is_found(seed: int) -> None:
    """Eight clients with losses (w - o)^2 and optima near +1 or -1; beside it, the algorithm in NumPy."""
    names, optima = [f"c{k}" for k in range(8)], np.array([0.9, -0.9, 1.0, -1.0, 1.1, -1.1, 0.95, -0.95])
    config = with_values(find_preset("smoke"), {"strategy": "ifca", "ranks": "8", "rounds": 9, "ifca_clusters": 2})
    config = replace(config, run=replace(config.run, seed=seed))
    federation = Federation(
        clients=tuple(names),
        weights=np.ones(8),
        clusters=np.zeros(8, np.int64),
        adjacency=np.zeros((8, 8)),
        head_groups=("t",) * 8,
    )
    assembly = assembly_of(config, dict.fromkeys(names, "t"))
    engine = Losses({name: lambda w, own=own: (w - own) ** 2 for name, own in zip(names, optima)})
    strategy = find_method("ifca", space="factors")
    start = {name: {"q.lora_A": torch.zeros(1, 1), "q.lora_B": torch.ones(1, 1)} for name in names}
    state = FederationState(round=0, server_models=start, client_models=start)
    drawn = draw_clusters(names, count=2, seed=seed)
    numpy_labels, centres = np.array([drawn[name] for name in names]), np.zeros(2)
    for round in range(5):
        state, _ = choose(assembly, engine, state)
        if round:
            numpy_labels = np.argmin((optima[:, None] - centres[None, :]) ** 2, axis=1)
        trained = (centres[numpy_labels] + optima) / 2
        centres = np.array([trained[numpy_labels == j].mean() for j in (0, 1)])
        updates = {
            name: {**state.client_models[name], "q.lora_A": (state.client_models[name]["q.lora_A"] + optimum) / 2}
            for name, optimum in zip(names, optima)
        }
        result = server_step(strategy, state.server_state, state.server_models, updates, federation, round=round + 1)
        after, kept = result.client_models, result.server_state
        state = replace(state, round=round + 1, server_models=after, client_models=after, server_state=kept)
        assert [a_of(after[name]) for name in names] == pytest.approx(centres[numpy_labels], abs=1e-6)
    found = [int(state.server_state[CLUSTERS][name]) for name in names]  # type: ignore[index, arg-type]
    assert len(set(found[::2])) == len(set(found[1::2])) == 1 and found[0] != found[1]


def test_the_models_of_the_other_clusters_are_counted() -> None:
    """Two values of four bytes: one other model of an A and a head to each of four clients."""
    choice, _ = chosen(table(DEARER))
    assert Counter((row.client, row.direction, row.kind, row.round) for row in choice.messages) == Counter(
        (name, *message, 2) for name in TASKS for message in (("down", "adapter"), ("down", "head"), ("up", "control"))
    )


@pytest.mark.parametrize(("count", "sizes"), [(1, [7]), (3, [2, 2, 3]), (9, [1] * 7)])
def test_the_first_clusters_are_as_even_as_can_be(count: int, sizes: list[int]) -> None:
    names = list("abcdefg")
    drawn = draw_clusters(names, count=count, seed=4)
    assert sorted(Counter(drawn.values()).values()) == sizes
    assert drawn == draw_clusters(names, count=count, seed=4)
    assert count == 1 or any(drawn != draw_clusters(names, count=count, seed=seed) for seed in range(5, 9))


def test_personal_rounds_and_other_rules_choose_nothing() -> None:
    for words in ({"strategy": "fedavg"}, {"personal_rounds": 4}):
        choice, _ = chosen(table(DEARER), **words)
        assert choice.labels == BEFORE and not choice.messages
