"""IFCA's choice: the least loss wins, ties stay, and the models are those of the clusters."""

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atlas_fl.aggregation.cfl import CLUSTERS
from atlas_fl.client.job import Job, Update
from atlas_fl.config import with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.experiment.cluster_choice import choose_clusters, draw_clusters
from atlas_fl.experiment.state import FederationState

TASKS = {"a": "movie", "b": "movie", "c": "movie", "d": "trec"}


@dataclass
class Losses:
    """An engine whose clients have these losses with a model, by the value of its A."""

    table: dict[str, dict[float, float]]
    splits: set[str] = field(default_factory=set)
    silent: tuple[str, ...] = ()

    def run(self, action: str, jobs: list[Job]) -> list[Update]:
        assert action == "evaluate"
        self.splits |= {job.options.split for job in jobs}
        return [
            Update(client=job.client, params={}, examples=1, metrics={"loss": self.table[job.client][a_of(job.params)]})
            for job in jobs
            if job.client not in self.silent
        ]


def a_of(params: Any) -> float:
    return float(params["q.lora_A"])


def model(value: float, head: float) -> dict[str, torch.Tensor]:
    return {"q.lora_A": torch.tensor([value]), "head.w": torch.tensor([head])}


def chosen(engine: Losses, clusters: dict[str, int], **words: Any) -> Any:
    config = with_values(find_preset("smoke"), {"strategy": "ifca", "ranks": "8", "rounds": 5, **words})
    clients = [SimpleNamespace(name=name, task=SimpleNamespace(name=task)) for name, task in TASKS.items()]
    assembly = SimpleNamespace(config=config, clients=clients, names=tuple(TASKS))
    federation = SimpleNamespace(clients=tuple(TASKS))
    planned = SimpleNamespace(plan=SimpleNamespace(federation=lambda: federation))
    models = {name: model(float(clusters[name]), head=float(index)) for index, name in enumerate(TASKS)}
    state = FederationState(
        round=1,
        server_models=models,
        client_models=models,
        server_state={CLUSTERS: {name: torch.tensor(label) for name, label in clusters.items()}},
    )
    return choose_clusters(assembly, planned, engine, state, list(TASKS)), models  # type: ignore[arg-type]


def labels(choice: Any) -> dict[str, int]:
    return {name: int(label) for name, label in choice.state.server_state[CLUSTERS].items()}


def test_everyone_takes_the_model_with_the_least_loss_on_its_training_examples() -> None:
    table = {"a": {0: 0.5, 1: 0.4}, "b": {0: 0.3, 1: 0.9}, "c": {0: 0.7, 1: 0.6}, "d": {0: 0.1, 1: 0.8}}
    engine = Losses(table)
    choice, models = chosen(engine, {"a": 0, "b": 0, "c": 1, "d": 1})
    assert engine.splits == {"train"}
    assert labels(choice) == {"a": 1, "b": 0, "c": 1, "d": 0}
    assert choice.moved == {"a": 1, "d": 0}
    now = choice.state.client_models
    assert now["a"] is models["c"], "adapters and head of a member of its task"
    assert (a_of(now["d"]), float(now["d"]["head.w"])) == (0.0, 3.0), "another task's adapters, and its own head"
    assert now["b"] is models["b"] and choice.state.server_models == now


def test_of_equal_losses_the_own_cluster_wins() -> None:
    table = {name: {0: 0.5, 1: 0.5} for name in TASKS}
    choice, models = chosen(Losses(table), {"a": 0, "b": 0, "c": 1, "d": 1})
    assert choice.moved == {} and choice.state.client_models == models


def test_who_does_not_answer_stays() -> None:
    table = {name: {0: 0.9, 1: 0.1} for name in TASKS}
    choice, _ = chosen(Losses(table, silent=("a",)), {"a": 0, "b": 0, "c": 1, "d": 1})
    assert choice.moved == {"b": 1}


def test_the_models_of_the_other_clusters_are_counted() -> None:
    """Two values of four bytes: one other model of an A and a head to each of four clients."""
    table = {name: {0: 0.9, 1: 0.1} for name in TASKS}
    choice, _ = chosen(Losses(table), {"a": 0, "b": 0, "c": 1, "d": 1})
    assert Counter((row.client, row.direction, row.kind, row.round) for row in choice.messages) == Counter(
        {(name, "down", kind, 2): 1 for name in TASKS for kind in ("adapter", "head")}
    )


@pytest.mark.parametrize(("count", "sizes"), [(1, [7]), (3, [2, 2, 3]), (9, [1] * 7)])
def test_the_first_clusters_are_as_even_as_can_be(count: int, sizes: list[int]) -> None:
    names = list("abcdefg")
    drawn = draw_clusters(names, count=count, seed=4)
    assert sorted(Counter(drawn.values()).values()) == sizes
    assert drawn == draw_clusters(names, count=count, seed=4)
    assert count == 1 or any(drawn != draw_clusters(names, count=count, seed=seed) for seed in range(5, 9))


def test_personal_rounds_and_other_rules_choose_nothing() -> None:
    table = {name: {0: 0.9, 1: 0.1} for name in TASKS}
    for words in ({"strategy": "fedavg"}, {"personal_rounds": 4}):
        choice, _ = chosen(Losses(table), {"a": 0, "b": 0, "c": 1, "d": 1}, **words)
        assert choice.moved == {} and not choice.messages
