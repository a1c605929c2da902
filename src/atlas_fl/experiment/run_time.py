"""Predicted seconds of runs on this machine: a few measured steps of a preset's clients, times the steps of a run.

Steps and evaluations are those of a run: packs of all clients through the engine of one process. A step has a cost for
each client and one for each token, which two sizes of batches give:

    t(step) = clients c_client + tokens c_token
    T       = t_load + sum over steps of t(step) + evaluated tokens c_evaluate

The steps are those of fingerprints and importance, of local training in all rounds, and of the two passes more where
halves are measured. Mixing and files are left out: on text presets they are a few hundredths. It holds for the load of
the moment: other work on the machine makes a run longer.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from atlas_fl.client.job import ClientTokens, Job
from atlas_fl.client.local_training import batches, num_steps
from atlas_fl.client.options import EvaluateOptions, TrainOptions
from atlas_fl.config import Config
from atlas_fl.events import ignore
from atlas_fl.methods.kriging import PASSES
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.planning.planner import local_engine
from atlas_fl.planning.ranks_and_cuts import IMPORTANCE_BATCHES
from atlas_fl.runtime.engine import Engine
from atlas_fl.setup.assembly import Assembly, assemble, load_clients, tokenise
from atlas_fl.setup.options import strategy_of, train_options, warmup_rank
from atlas_fl.setup.participation import num_participants

MEASURED_SECONDS, MOST_REPEATS = 3.0, 3
"""Steps are repeated for so long, and so often; the first one, in which memory is taken, is not counted."""
SMALL_BATCH = 4
"""Examples of a client in the smaller of the two steps."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Measured speed of this machine."""

    device: str
    """A device of torch."""
    load_seconds: float
    """Seconds until libraries, data, model and tokens are loaded."""
    client_seconds: float
    """Seconds of a client in a training step, apart from its tokens."""
    token_seconds: float
    """Seconds of a token in a training step."""
    evaluate_seconds: float
    """Seconds of a token in an evaluation."""

    def seconds(self, *, steps: float, tokens: float) -> float:
        """Seconds of so many training steps of single clients, with so many tokens together."""
        return steps * self.client_seconds + tokens * self.token_seconds


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Predicted seconds of a run."""

    loading: float
    planning: float
    round: float
    """One round with its evaluation."""
    rounds: int
    halves: float
    """Extra seconds of the round in which halves are measured."""

    @property
    def total(self) -> float:
        """Seconds from start to end."""
        return self.loading + self.planning + self.rounds * self.round + self.halves


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The speed, and the predicted time of runs."""

    speed: Speed
    runs: Mapping[str, RunTime]


def measure_runs(config: Config, others: Mapping[str, Config], *, start_time: float | None = None) -> Measurement:
    """The speed of this machine with this config's clients, and predictions for others with the same model.

    `start_time`, of `time.perf_counter`, is when loading began, where that was before this call.
    Raises an `AtlasError` for what the config names that is not to be had, such as the embedded model.
    """
    start_time = time.perf_counter() if start_time is None else start_time
    assembly = assemble(config)
    load_seconds = time.perf_counter() - start_time
    speed = measure_speed(assembly, local_engine(assembly, ignore), load_seconds=load_seconds)
    return Measurement(
        speed=speed,
        runs={name: predict(other, tokens_of(other, assembly), speed) for name, other in others.items()},
    )


def tokens_of(config: Config, assembly: Assembly) -> Mapping[str, ClientTokens]:
    """The tokens of this config's clients, by the tokenizer of the assembly."""
    return {
        client.name: tokenise(client, assembly.site.backbone, config.data, trainable=assembly.site.trainable)
        for client in load_clients(config)
    }


def measure_speed(assembly: Assembly, engine: Engine, *, load_seconds: float) -> Speed:
    """The seconds of a client and of a token in training steps at the lowest rank, and of a token in evaluation."""
    options = replace(train_options(assembly.config, with_images=assembly.has_images), epochs=1, max_steps=1)
    steps = [_jobs(assembly, replace(options, batch_size=size)) for size in (SMALL_BATCH, options.batch_size)]
    engine.run("train", steps[-1])
    seconds, repeats, begin = [0.0, 0.0], 0, time.perf_counter()
    while repeats < MOST_REPEATS and (not repeats or time.perf_counter() - begin < MEASURED_SECONDS):
        seconds = [before + _seconds_of(engine, "train", jobs) for before, jobs in zip(seconds, steps, strict=True)]
        repeats += 1
    small, large = (
        (taken / repeats, sum(_batch_tokens(assembly.site.data[job.client], job) for job in jobs))
        for taken, jobs in zip(seconds, steps, strict=True)
    )
    client_seconds, token_seconds = cost_of_a_step(small, large, clients=len(assembly.clients))
    evaluated = sum(int(data.splits["validation"].lengths.sum()) for data in assembly.site.data.values())
    return Speed(
        device=str(assembly.site.backbone.device),
        load_seconds=load_seconds,
        client_seconds=client_seconds,
        token_seconds=token_seconds,
        evaluate_seconds=_seconds_of(engine, "evaluate", _jobs(assembly, EvaluateOptions(split="validation")))
        / evaluated,
    )


def cost_of_a_step(small: tuple[float, int], large: tuple[float, int], *, clients: int) -> tuple[float, float]:
    """(seconds of each client, seconds of each token) from the (seconds, tokens) of two steps of so many clients.

    Where noise leaves no such costs above zero, a step costs its tokens alone.

    >>> cost_of_a_step((3.0, 100), (5.0, 300), clients=4)
    (0.5, 0.01)
    >>> cost_of_a_step((9.0, 100), (6.0, 300), clients=4)
    (0.0, 0.02)
    """
    token_seconds = (large[0] - small[0]) / (large[1] - small[1])
    client_seconds = (large[0] - large[1] * token_seconds) / clients
    return (client_seconds, token_seconds) if min(client_seconds, token_seconds) > 0 else (0.0, large[0] / large[1])


def predict(config: Config, tokens: Mapping[str, ClientTokens], speed: Speed) -> RunTime:
    """The seconds of a run of this config, whose clients have these tokens, at this speed."""
    training = config.training
    clients = list(tokens.values())
    options = train_options(config, with_images=False)
    everyone = sum(_training_seconds(client, options, speed) for client in clients)
    share = num_participants(len(clients), training.participation) / len(clients)
    evaluated = sum(int(client.splits[split].lengths.sum()) for client in clients for split in ("validation", "test"))
    evaluations = -(-training.rounds // training.eval_every)
    return RunTime(
        loading=speed.load_seconds,
        planning=_planning_seconds(config, clients, speed),
        round=share * everyone + evaluated * speed.evaluate_seconds * evaluations / training.rounds,
        rounds=training.rounds,
        halves=PASSES * everyone if strategy_of(config).asks_once else 0.0,
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


def _batch_tokens(client: ClientTokens, job: Job) -> int:
    return sum(int(batch.lengths.sum()) for batch in batches(client.splits["train"], job, secret=None))


def _planning_seconds(config: Config, clients: list[ClientTokens], speed: Speed) -> float:
    """Seconds of fingerprints, of both halves, and of importance, on examples of the mean length."""
    clustering = config.clustering
    steps = IMPORTANCE_BATCHES
    if clustering.fingerprint == "delta":
        steps += 2 * clustering.fingerprint_steps
    elif strategy_of(config).clustered:
        steps += 2 * clustering.fingerprint_batches
    tokens = steps * config.training.batch_size * sum(_mean_length(client.splits["train"]) for client in clients)
    return speed.seconds(steps=steps * len(clients), tokens=tokens)


def _training_seconds(client: ClientTokens, options: TrainOptions, speed: Speed) -> float:
    """Seconds of one client in one round."""
    data = client.splits["train"]
    steps = num_steps(len(data), options)
    examples = min(options.epochs * len(data), steps * options.batch_size)
    return speed.seconds(steps=steps, tokens=examples * _mean_length(data))


def _mean_length(data: EncodedExamples) -> float:
    return float(data.lengths.mean())
