"""Membership inference with shadow clients, and an audit of epsilon by canaries.

Membership: the likelihood ratio attack of Carlini et al. 2022, "Membership inference attacks from first principles",
arXiv:2112.03570 (section 5, online, with one variance a side). Each shadow client trains on a random half of one
client's examples. With phi = log(p / (1 - p)) of an example's label under a model,

    score = log N(phi; mean_in, var_in) - log N(phi; mean_out, var_out)

over the other shadow clients with the example in their half, and without. Halves are drawn independently, so that
scores of models that know nothing order members and others by chance alone.

Audit: Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run", arXiv:2305.08846, theorem 5.2.
Canaries are the client's texts with labels drawn at random, each in or out by a fair coin. Every shadow client is a
run of its own with coins of its own, so the coins of all are those of one run. Half of the shadow clients are the
reference, whose coins the attacker knows; the coins of the other half are guessed where the score is most certain. The
epsilon under which so many right guesses have a chance of 5% is a lower bound of what was spent. A low bound proves
nothing.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import binom

from atlas_fl.client.batching import in_order
from atlas_fl.client.evaluation import OUTCOMES
from atlas_fl.client.job import make_jobs
from atlas_fl.client.options import EvaluateOptions
from atlas_fl.data.clients import ClientData
from atlas_fl.data.metrics import auroc
from atlas_fl.errors import ConfigError
from atlas_fl.events import OnEvent
from atlas_fl.frozen import Frozen
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import Params, Split
from atlas_fl.planning.planner import local_engine
from atlas_fl.rng import generator
from atlas_fl.runtime.engine import Engine
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import train_options, warmup_rank

FALSE_POSITIVES = (0.01, 0.1)
RESAMPLES = 300
LEVEL = 0.95
GUESSED = 4
"""One coin of so many is guessed."""
LEAST_SHADOWS = 4


class Shadows(Frozen, eq=False):
    """Shadow clients after training."""

    confidence: np.ndarray
    """phi of every example by the model of every shadow client, (shadows, examples) float64."""
    score: float
    epsilon: float | None


def initial_model(assembly: Assembly, client: ClientData) -> Params:
    """The model that this client begins with alone: whole, or with adapters of the smallest rank of the settings."""
    if assembly.is_full:
        return assembly.full_models()[client.name]
    return assembly.initial_params(client, (warmup_rank(assembly.config),) * assembly.shape.num_layers)


def label_confidence(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """phi = log(p / (1 - p)), p the probability of the label, (n,) float64 of logits (n, classes).

    >>> label_confidence(np.array([0]), np.log([[0.8, 0.1, 0.1]])).round(3)
    array([1.386])
    """
    is_label = np.arange(logits.shape[1]) == labels[:, None]
    wide = logits.astype(np.float64)
    phi: np.ndarray = wide[is_label] - logsumexp(np.where(is_label, -np.inf, wide), axis=1)
    return phi


def shadow_engine(
    assembly: Assembly,
    client: ClientData,
    made: Mapping[str, EncodedExamples],
    *,
    on_event: OnEvent,
    test: EncodedExamples | None = None,
) -> Engine:
    """An engine for clients of these training examples, whose validation is on the client's test examples."""
    own = assembly.site.data[client.name]
    others: dict[Split, EncodedExamples] = {"validation": own.splits["test"], "test": test or own.splits["test"]}
    data = {name: replace(own, splits={**others, "train": train}, prompts={}) for name, train in made.items()}
    return local_engine(replace(assembly, site=replace(assembly.site, data=data, secrets={})), on_event)


def train_shadows(
    assembly: Assembly, client: ClientData, pool: EncodedExamples, is_member: np.ndarray, *, on_event: OnEvent
) -> Shadows:
    """Train a shadow client on each row of members, (shadows, examples) bool, alone and in all rounds."""
    made = {f"shadow-{index}": pool.take(np.flatnonzero(members)) for index, members in enumerate(is_member)}
    engine = shadow_engine(assembly, client, made, on_event=on_event, test=pool)
    options = train_options(assembly.config, with_images=client.task.images)
    models = dict.fromkeys(made, initial_model(assembly, client))
    spent: list[float] = []
    for number in range(1, options.rounds + 1):
        updates = engine.run("train", make_jobs(models, options, round=number))
        models = {update.client: update.params for update in updates}
        spent = [update.metrics["epsilon"] for update in updates if "epsilon" in update.metrics]
    looks = EvaluateOptions(split="test", outcomes=True)
    outcomes = [update.reported[OUTCOMES] for update in engine.run("evaluate", make_jobs(models, looks, round=0))]
    held_out = engine.run("evaluate", make_jobs(models, EvaluateOptions(split="validation"), round=0))
    place = np.argsort(in_order(pool.lengths)) if not assembly.is_full else np.arange(len(pool))
    return Shadows(
        confidence=np.stack([label_confidence(pool.labels, one["outputs"].numpy()[place]) for one in outcomes]),
        score=float(np.mean([update.metrics["primary"] for update in held_out])),
        epsilon=max(spent, default=None),
    )


def likelihood_ratios(phi: np.ndarray, confidence: np.ndarray, is_member: np.ndarray) -> np.ndarray:
    """Score of every example by one model's phi, (examples,), against reference models, (models, examples) each.

    An example that all of them have, or none, scores 0.
    """
    logs = []
    counts = [side.sum(0) for side in (is_member, ~is_member)]
    for side, count in zip((is_member, ~is_member), counts, strict=True):
        mean = (confidence * side).sum(0) / np.maximum(count, 1)
        variance = (np.square(confidence - mean) * side).sum() / max(1, (count - 1).clip(min=0).sum())
        variance = max(variance, 1e-12)
        logs.append(-np.square(phi - mean) / (2 * variance) - np.log(variance) / 2)
    return np.where((counts[0] > 0) & (counts[1] > 0), logs[0] - logs[1], 0.0)


def attack_rates(scores: np.ndarray, is_member: np.ndarray) -> tuple[float, ...]:
    """(AUC, and the share of members found at each rate of `FALSE_POSITIVES`) of scores over all models."""
    flat, truth = scores.ravel(), is_member.ravel()
    area = auroc(truth.astype(np.int64), np.stack([-flat, flat], axis=1))
    assert area is not None, "there are members and others"
    return area, *(float((flat[truth] > np.quantile(flat[~truth], 1 - rate)).mean()) for rate in FALSE_POSITIVES)


def infer_membership(assembly: Assembly, client: ClientData, *, shadows: int, on_event: OnEvent) -> dict[str, Any]:
    """Attack the membership of the client's training examples in the model of each of so many shadow clients.

    The row has the epsilon that each spends, their mean test score, the AUC, and `tpr_1` and `tpr_10`, the shares of
    the members that are found at 1% and 10% false positives; intervals of 95% are a bootstrap of the shadow clients.
    """
    pool, seed = assembly.site.data[client.name].splits["train"], assembly.config.run.seed
    check_shadows(client, shadows=shadows)
    size = len(pool)
    is_member = np.zeros((shadows, size), dtype=bool)
    for index in range(shadows):
        is_member[index, generator(seed, "attack", "half", index).permutation(size)[: size // 2]] = True
    trained = train_shadows(assembly, client, pool, is_member, on_event=on_event)
    scores = np.stack(
        [
            likelihood_ratios(phi, trained.confidence[rest], is_member[rest])
            for phi, rest in zip(trained.confidence, ~np.eye(shadows, dtype=bool), strict=True)
        ]
    )
    draws = generator(seed, "attack", "bootstrap").integers(shadows, size=(RESAMPLES, shadows))
    resampled = np.array([attack_rates(scores[index], is_member[index]) for index in draws])
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0).tolist()
    row: dict[str, Any] = {"client": client.name, "epsilon": trained.epsilon, "score": trained.score}
    for name, *values in zip(("auc", "tpr_1", "tpr_10"), attack_rates(scores, is_member), low, high, strict=True):
        row |= zip((name, f"{name}_low", f"{name}_high"), values, strict=True)
    return row


def audit_epsilon(assembly: Assembly, client: ClientData, *, shadows: int, on_event: OnEvent) -> dict[str, Any]:
    """Bound the epsilon of the client's training from below by canaries in so many shadow clients.

    The row has the accountant's upper bound as `epsilon` and the lower `bound`, at a level of 95%.
    """
    own, seed = assembly.site.data[client.name].splits["train"], assembly.config.run.seed
    check_shadows(client, shadows=shadows)
    labels = generator(seed, "attack", "labels").integers(client.task.num_labels, size=len(own))
    canaries = replace(own, labels=labels, taken_from=None)
    is_member = generator(seed, "attack", "coins").random((shadows, len(own))) < 0.5
    trained = train_shadows(assembly, client, canaries, is_member, on_event=on_event)
    known = shadows // 2
    reference = trained.confidence[:known], is_member[:known]
    scores = np.concatenate([likelihood_ratios(phi, *reference) for phi in trained.confidence[known:]])
    coins = is_member[known:].ravel()
    guessed = np.argsort(-np.abs(scores), kind="stable")[: len(coins) // GUESSED]
    correct = int(((scores > 0) == coins)[guessed].sum())
    training, count = assembly.config.training, len(guessed)
    delta = is_member.sum(1).min() ** -1.1 if training.delta is None else training.delta
    bound = epsilon_bound(coins=coins.size, guesses=count, correct=correct, delta=delta * (training.dp == "example"))
    row = {"client": client.name, "epsilon": trained.epsilon, "score": trained.score, "bound": bound}
    return {**row, "correct": correct, "guesses": count, "coins": coins.size}


def epsilon_bound(*, coins: int, guesses: int, correct: int, delta: float) -> float:
    """The largest epsilon under which so many right guesses have a chance of at most 5%; 0 where there is none.

    By hand, without delta: all of m guesses are right with a chance of q^m, q = 1 / (1 + exp(-epsilon)).

    >>> q = 0.05 ** (1 / 100)
    >>> round(epsilon_bound(coins=100, guesses=100, correct=100, delta=0.0), 3) == round(float(np.log(q / (1 - q))), 3)
    True
    """

    def excess(epsilon: float) -> float:
        return _chance_of(coins, guesses, correct, epsilon=epsilon, delta=delta) - (1 - LEVEL)

    return float(brentq(excess, 0.0, 50.0)) if excess(0.0) < 0 else 0.0


def _chance_of(coins: int, guesses: int, correct: int, *, epsilon: float, delta: float) -> float:
    """Most that the chance of at least v = `correct` right guesses is under (epsilon, delta):

        P[V >= v] + 2 m delta max_i P[v > V >= v - i] / i

    V is binomial over the guesses, right with probability 1 / (1 + exp(-epsilon)); m are the coins.
    """
    right = 1 / (1 + np.exp(-epsilon))
    below = binom.pmf(np.arange(correct - 1, -1, -1), guesses, right)
    slope = float((np.cumsum(below) / np.arange(1, correct + 1)).max(initial=0.0))
    return float(binom.sf(correct - 1, guesses, right)) + 2 * coins * delta * slope


def check_shadows(client: ClientData, *, shadows: int) -> None:
    """Raise `ConfigError` unless there are shadow clients enough and labels are classes."""
    if not client.task.has_classes:
        raise ConfigError(
            f"task {client.task.name!r} has no classes, which the attack is about; name a task with classes, such as"
            " --tasks movie"
        )
    if shadows < LEAST_SHADOWS:
        raise ConfigError(f"--shadows is {shadows}; allowed: at least {LEAST_SHADOWS}")


def others_of(assembly: Assembly, client: ClientData, *, least: int = 1) -> list[ClientData]:
    """The other clients of its task; raises `ConfigError` where there are fewer than these."""
    others = [one for one in assembly.clients if one.task.name == client.task.name and one.name != client.name]
    if len(others) < least:
        raise ConfigError(
            f"{client.name} is one of {len(others) + 1} clients of its task, and the attack needs {least + 1}; say"
            f" --clients-per-task {least + 1}"
        )
    return others
