"""Predicted seconds of a run on this machine: measured steps of all its clients, times the steps of the run.

A step and an evaluation are those of a run: packs of all clients through the engine of one process. Steps are those of
fingerprints and importance, of local training in all rounds, and of the two passes more where halves are measured.
Mixing and files are left out: on text presets they are a few hundredths. It holds for the load of the moment: other
work on the machine makes a run longer.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from atlas_fl.client.job import Job
from atlas_fl.client.local_training import num_steps
from atlas_fl.client.options import EvaluateOptions, TrainOptions
from atlas_fl.config import Config
from atlas_fl.events import ignore
from atlas_fl.experiment.alone import num_alone
from atlas_fl.planning.planner import local_engine
from atlas_fl.planning.ranks_and_cuts import IMPORTANCE_BATCHES
from atlas_fl.setup.assembly import assemble
from atlas_fl.setup.options import num_participants, strategy_of, train_options, warmup_rank

REPEATS = 3
"""Steps are repeated so often; the first one, in which memory is taken, is not counted."""


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Predicted seconds of a run."""

    loading: float
    planning: float
    round: float
    """One round with its evaluation, in the mean over rounds."""
    rounds: int
    alone: float = 0.0
    """Training clients alone for comparison."""

    @property
    def total(self) -> float:
        """Seconds from start to end."""
        return self.loading + self.planning + self.rounds * self.round + self.alone


def measure_run(config: Config, *, start_time: float) -> RunTime:
    """The seconds of a run of this text preset, by some steps of its clients at the lowest rank.

    `start_time`, of `time.perf_counter`, is when loading began.
    Raises an `AtlasError` for what the config names that is not to be had, such as the embedded model.
    """
    assembly = assemble(config)
    loading = time.perf_counter() - start_time
    engine = local_engine(assembly, ignore)
    ranks = (warmup_rank(config),) * assembly.shape.num_layers

    def seconds_of(action: str, options: TrainOptions | EvaluateOptions) -> float:
        jobs = [
            Job(client=client.name, params=assembly.initial_params(client, ranks), round=1, options=options)
            for client in assembly.clients
        ]
        begin = time.perf_counter()
        engine.run(action, jobs)
        return time.perf_counter() - begin

    step = replace(train_options(config, with_images=False), epochs=1, max_steps=1)
    seconds_of("train", step)
    return predict(
        config,
        [len(client.train) for client in assembly.clients],
        loading=loading,
        step=fmean(seconds_of("train", step) for _ in range(REPEATS)),
        evaluation=seconds_of("evaluate", EvaluateOptions(split="validation"))
        + seconds_of("evaluate", EvaluateOptions(split="test")),
    )


def predict(config: Config, num_examples: Sequence[int], *, loading: float, step: float, evaluation: float) -> RunTime:
    """The seconds of a run whose clients have so many examples, by those of a step and an evaluation of all of them."""
    training, clustering = config.training, config.clustering
    options = train_options(config, with_images=False)
    everyone = step * fmean(num_steps(count, options) for count in num_examples)
    share = num_participants(len(num_examples), training.participation) / len(num_examples)
    num_evaluations = -(-training.rounds // training.eval_every)
    halves = 2 * everyone if strategy_of(config).asks_once else 0.0
    planning_steps = IMPORTANCE_BATCHES
    if clustering.fingerprint == "delta":
        planning_steps += 2 * clustering.fingerprint_steps
    elif strategy_of(config).clustered:
        planning_steps += 2 * clustering.fingerprint_batches
    alone = num_alone(config, len(num_examples), is_full=False) if strategy_of(config).communicates else 0
    own_rounds = training.rounds * share * everyone + IMPORTANCE_BATCHES * step + 2 * evaluation
    return RunTime(
        loading=loading,
        planning=planning_steps * step,
        round=share * everyone + (evaluation * num_evaluations + halves) / training.rounds,
        rounds=training.rounds,
        alone=own_rounds * alone / len(num_examples),
    )
