"""Predicted seconds of runs on this machine: a few measured steps of a preset's clients, times the tokens of a run.

Steps and evaluations are those of a run: packs of all clients through the engine of one process.

    T = t_load + trained tokens c_train + evaluated tokens c_evaluate

Tokens are those of fingerprints and importance, of local training in all rounds, and of the two passes more where
halves are measured. Mixing and files are left out: on text presets they are a few hundredths. It holds for the load of
the moment: other work on the machine makes a run longer.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from atlas_fl.client.job import ClientTokens, Job
from atlas_fl.client.local_training import batches, num_steps
from atlas_fl.client.options import EvaluateOptions, TrainOptions
from atlas_fl.config import Config
from atlas_fl.events import ignore
from atlas_fl.methods.kriging import PASSES
from atlas_fl.planning.planner import local_engine
from atlas_fl.planning.ranks_and_cuts import IMPORTANCE_BATCHES
from atlas_fl.runtime.engine import Engine
from atlas_fl.setup.assembly import Assembly, assemble, load_clients, tokenise
from atlas_fl.setup.options import num_participants, strategy_of, train_options, warmup_rank

REPEATS = 3
"""Steps are repeated so often; the first one, in which memory is taken, is not counted."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Measured speed of this machine."""

    device: str
    """A device of torch."""
    load_seconds: float
    """Seconds until libraries, data, model and tokens are loaded."""
    token_seconds: float
    """Seconds of a token in a training step."""
    evaluate_seconds: float
    """Seconds of a token in an evaluation."""


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Predicted seconds of a run."""

    loading: float
    planning: float
    round: float
    """One round with its evaluation, in the mean over rounds."""
    rounds: int

    @property
    def total(self) -> float:
        """Seconds from start to end."""
        return self.loading + self.planning + self.rounds * self.round


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The speed, and the predicted time of runs."""

    speed: Speed
    runs: Mapping[str, RunTime]


def measure_runs(config: Config, others: Mapping[str, Config], *, start_time: float) -> Measurement:
    """The speed of this machine with this config's clients, and predictions for others with the same model.

    `start_time`, of `time.perf_counter`, is when loading began.
    Raises an `AtlasError` for what the config names that is not to be had, such as the embedded model.
    """
    assembly = assemble(config)
    load_seconds = time.perf_counter() - start_time
    speed = measure_speed(assembly, local_engine(assembly, ignore), load_seconds=load_seconds)
    runs = {}
    for name, other in others.items():
        clients = load_clients(other)
        tokens = [tokenise(client, assembly.site.backbone, other.data) for client in clients]
        runs[name] = predict(other, tokens, speed)
    return Measurement(speed=speed, runs=runs)


def measure_speed(assembly: Assembly, engine: Engine, *, load_seconds: float) -> Speed:
    """The seconds of a token in a training step of all clients at the lowest rank, and in an evaluation."""
    options = replace(train_options(assembly.config, with_images=assembly.has_images), epochs=1, max_steps=1)
    steps = _jobs(assembly, options)
    engine.run("train", steps)
    data = assembly.site.data
    trained = sum(
        int(batch.lengths.sum())
        for job in steps
        for batch in batches(data[job.client].splits["train"], job, secret=None)
    )
    evaluated = sum(int(tokens.splits["validation"].lengths.sum()) for tokens in data.values())
    scoring = _jobs(assembly, EvaluateOptions(split="validation"))
    return Speed(
        device=str(assembly.site.backbone.device),
        load_seconds=load_seconds,
        token_seconds=sum(_seconds_of(engine, "train", steps) for _ in range(REPEATS)) / REPEATS / trained,
        evaluate_seconds=_seconds_of(engine, "evaluate", scoring) / evaluated,
    )


def predict(config: Config, clients: Sequence[ClientTokens], speed: Speed) -> RunTime:
    """The seconds of a run of this config, whose clients have these tokens, at this speed."""
    training, clustering = config.training, config.clustering
    options = train_options(config, with_images=False)
    everyone = sum(_trained_tokens(client, options) for client in clients) * speed.token_seconds
    share = num_participants(len(clients), training.participation) / len(clients)
    evaluated = sum(int(client.splits[split].lengths.sum()) for client in clients for split in ("validation", "test"))
    evaluations = -(-training.rounds // training.eval_every)
    halves = PASSES * everyone if strategy_of(config).asks_once else 0.0
    planning_steps = IMPORTANCE_BATCHES
    if clustering.fingerprint == "delta":
        planning_steps += 2 * clustering.fingerprint_steps
    elif strategy_of(config).clustered:
        planning_steps += 2 * clustering.fingerprint_batches
    texts = sum(float(client.splits["train"].lengths.mean()) for client in clients)
    return RunTime(
        loading=speed.load_seconds,
        planning=planning_steps * training.batch_size * texts * speed.token_seconds,
        round=share * everyone + (evaluated * speed.evaluate_seconds * evaluations + halves) / training.rounds,
        rounds=training.rounds,
    )


def _jobs(assembly: Assembly, options: TrainOptions | EvaluateOptions) -> list[Job]:
    ranks = (warmup_rank(assembly.config),) * assembly.shape.num_layers
    return [
        Job(client=client.name, params=assembly.initial_params(client, ranks), round=1, options=options)
        for client in assembly.clients
    ]


def _seconds_of(engine: Engine, action: str, jobs: list[Job]) -> float:
    start_time = time.perf_counter()
    engine.run(action, jobs)
    return time.perf_counter() - start_time


def _trained_tokens(client: ClientTokens, options: TrainOptions) -> float:
    """Tokens that a client trains on in one round."""
    data = client.splits["train"]
    examples = min(options.epochs * len(data), num_steps(len(data), options) * options.batch_size)
    return examples * float(data.lengths.mean())
