"""Clients alone: a `local` run of the same settings inside a federated run, and what each client gains over it.

The reference has the same examples, initial models, ranks, rounds and local training; nothing is mixed. Its clients are
all, or a sample where they are many (`--alone`). The gain of a client is its final test score minus the one it has
alone. Its interval is of a paired bootstrap of its test examples (Efron and Tibshirani, 1993): both models are scored
on the same draws. It says how much the test examples decide, and nothing of other seeds.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from atlas_fl.client.evaluation import OUTCOMES
from atlas_fl.client.job import Update, make_jobs
from atlas_fl.client.options import EvaluateOptions
from atlas_fl.config import Config, validate
from atlas_fl.config.methods import method_of
from atlas_fl.data.clients import group_by
from atlas_fl.data.metrics import predicted_classes, scores
from atlas_fl.data.task import Task
from atlas_fl.errors import AtlasError
from atlas_fl.params import ByClient, Params
from atlas_fl.rng import generator
from atlas_fl.runtime.engine import Engine
from atlas_fl.setup.assembly import NO_LATE_CLIENTS, Assembly, without_clients
from atlas_fl.setup.options import configured_attackers, strategy_of
from atlas_fl.split.channel import Cut
from atlas_fl.storage.run_folder import RunFolder

MOST_CLIENTS, MOST_WHOLE = 12, 4
"""Most clients of a sample: of those that train adapters, and whole models."""
RESAMPLES = 1000
LEVEL = 0.95


def reference_config(config: Config, folder: RunFolder) -> Config:
    """The settings of the clients alone, in the folder inside this run's; raises `ConfigError` where there are none.

    What the method sets of local training is at its default, and so is all that concerns the server.
    """
    method = method_of(config)
    training, usual = config.training, Config()
    names = {*method.settings, *method.suggested, "control_variates"} & vars(training).keys()
    if training.dp == "client":  # nothing leaves who is alone
        names |= {"dp", "epsilon", "delta"}
    reset = {name: getattr(usual.training, name) for name in names}
    # without early stopping nobody looks at scores between the rounds
    eval_every = training.eval_every if training.patience else training.rounds
    # a fingerprint that trains is where models begin; every other one is looked at by the server alone
    warmed = replace(config.clustering, recluster_every=0)
    reference = replace(
        config,
        data=replace(config.data, arrive=()),
        training=replace(training, **{**reset, "eval_every": eval_every}),
        clustering=warmed if config.clustering.fingerprint == "delta" else usual.clustering,
        ranks=replace(config.ranks, rerank=False),
        split=replace(config.split, topology="server"),
        mixing=replace(usual.mixing, strategy="local"),
        robust=usual.robust,
        attack=usual.attack,
        server=usual.server,
        run=replace(config.run, alone="none", name=folder.alone.name, runs_dir=str(folder.path), max_rounds=None),
    )
    return validate(reference)


def reference_assembly(assembly: Assembly, folder: RunFolder, *, at_sites: bool) -> tuple[Assembly | None, str]:
    """(the clients that train alone beside this run, a line on their number and cost, or on why there are none)."""
    config = assembly.config
    if at_sites or config.run.alone == "none" or not strategy_of(config).communicates:
        return None, ""
    if config.data.centralized:
        return None, "no client is trained alone for comparison: --centralized has one client a task"
    try:
        reference = reference_config(config, folder)
    except AtlasError as error:
        return None, f"no client is trained alone for comparison: alone, {error}"
    names = _reference_clients(assembly)
    alone = replace(
        without_clients(assembly, {*assembly.names} - {*names}),
        config=reference,
        join_queue=NO_LATE_CLIENTS,
        drawn_from=assembly.names,
    )
    cost = 100 * len(names) / len(assembly.names)
    number = f"{len(names)} clients" if len(names) > 1 else "1 client"
    return alone, f"also trains {number} alone for comparison, up to +{cost:.0f}% time; --alone none leaves it out"


def _reference_clients(assembly: Assembly) -> tuple[str, ...]:
    """The clients that train alone, without attackers; a sample is drawn by the seed, evenly over the tasks."""
    config = assembly.config
    attackers = configured_attackers(config, assembly.names)
    honest = [client for client in assembly.clients if client.name not in attackers] or list(assembly.clients)
    sample = MOST_WHOLE if assembly.is_full else MOST_CLIENTS
    most = sample if config.run.alone == "sample" else len(honest)
    shuffled = [honest[index] for index in generator(config.run.seed, "alone").permutation(len(honest))]
    of_task = group_by(shuffled, lambda client: client.task.name)
    place = {client.name: index for members in of_task.values() for index, client in enumerate(members)}
    chosen = sorted(place, key=lambda name: place[name])[:most]
    return tuple(name for name in assembly.names if name in chosen)


def score_examples(
    engine: Engine, config: Config, models: ByClient, cuts: Mapping[str, Cut], *, round: int
) -> dict[str, Update]:
    """The test scores of these models by client, with the outputs of every example."""
    options = EvaluateOptions(split="test", prior_correction=config.training.prior_correction, outcomes=True)
    updates = engine.run("evaluate", make_jobs(models, options, round=round, cuts=cuts))
    return {update.client: update for update in updates}


def summarise_gains(
    assembly: Assembly, together: Mapping[str, Update], alone: Mapping[str, Update], *, seconds: float
) -> dict[str, Any]:
    """The entry `alone` of a summary: by client the scores, the gain and its interval; their means; the cost."""
    first, second = (resample_clients(assembly, updates) for updates in (together, alone))
    clients: dict[str, dict[str, Any]] = {}
    for name, reference in alone.items():
        own, other = (update.metrics["primary"] for update in (together[name], reference))
        clients[name] = {"together": own, "alone": other, **_with_interval(own - other, first[name] - second[name])}
    mean = float(np.mean([entry["gain"] for entry in clients.values()]))
    return {
        "clients": clients,
        "mean": _with_interval(mean, np.mean([first[name] - second[name] for name in clients], axis=0)),
        "of": len(assembly.clients),
        "seconds": seconds,
    }


def _with_interval(gain: float, draws: np.ndarray) -> dict[str, Any]:
    return {"gain": gain, "interval": np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()}


def resample_clients(assembly: Assembly, updates: Mapping[str, Update]) -> dict[str, np.ndarray]:
    """Test scores of these clients over draws of their examples, (RESAMPLES,); every run draws alike, so they pair."""
    tasks = {client.name: client.task for client in assembly.clients}
    return {
        name: resample_scores(tasks[name], update.reported[OUTCOMES], rng=generator(0, "test examples", name))
        for name, update in updates.items()
    }


def resample_scores(task: Task, outcomes: Params, *, rng: np.random.Generator) -> np.ndarray:
    """Scores in the task's metric over draws of its test examples with replacement, (RESAMPLES,)."""
    labels, outputs, rows = (outcomes[name].numpy() for name in ("labels", "outputs", "rows"))
    size = len(rows)
    if task.writes or (task.has_classes and task.metric == "accuracy"):
        drawn = rng.multinomial(size, np.full(size, 1 / size), size=RESAMPLES)
        shares: np.ndarray = drawn @ _hits(task, labels, outputs, rows) / np.maximum(drawn @ rows, 1)
        return shares
    draws = rng.integers(size, size=(RESAMPLES, size))
    return np.array([scores(task, labels[draw], outputs[draw])["primary"] for draw in draws])


def _hits(task: Task, labels: np.ndarray, outputs: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Right answers of every example: one at most, or of text as many as it has tokens."""
    if not task.writes:
        return np.asarray(predicted_classes(outputs) == labels, np.float64)
    return np.bincount(np.repeat(np.arange(len(rows)), rows), weights=outputs[:, 1], minlength=len(rows))
