"""How a round ends: what every client is left with, its scores, and whether the run is over.

The last round of a run does more than the others: clients may keep their own models, everyone is brought the newest
one, and text is written for ROUGE. Whether a round is the last is known beforehand, or with `--patience` from its own
validation scores; then what only last rounds do is done after them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from atlas_fl.assemble import Assembly
from atlas_fl.clients.base import Job, Update
from atlas_fl.clients.evaluate import EvaluateOptions
from atlas_fl.config import Config
from atlas_fl.engines.base import Engine
from atlas_fl.options import strategy_of
from atlas_fl.split.step import Cut
from atlas_fl.state import State, mean_score
from atlas_fl.stopping import best_rounds, has_stopped
from atlas_fl.types import ByClient, Params, Split

Scores = Mapping[Split, Mapping[str, Update]]


@dataclass(frozen=True, kw_only=True)
class End:
    """What a round comes to."""

    start: ByClient
    """What every client goes on with."""
    kept: tuple[str, ...]
    """Who keeps its own model."""
    scores: Scores
    """Of these models; empty in a round without evaluation."""
    evaluated: tuple[Update, ...]
    """Every answer to an evaluation."""
    final: bool
    """Whether the run is over."""
    stopped: bool = False
    """Whether it is over before its last round."""


def end_round(
    assembly: Assembly,
    engine: Engine,
    *,
    state: State,
    mixed: ByClient,
    trained: ByClient,
    cuts: Mapping[str, Cut],
    is_mixed: bool,
) -> End:
    """What the round after this state comes to, whose server step left these models.

    A run stops only where the rule has been applied: between two aggregations the server holds older models.
    """
    config, round = assembly.config, state.round + 1
    last = round == config.training.rounds
    end = _delivered(config, engine, mixed, trained, round=round, cuts=cuts, final=last)
    met = mean_score(end.scores)
    if last or not is_mixed or met is None:
        return end
    training = config.training
    known = {**state.history, round: met}
    if not has_stopped(known, patience=training.patience, min_delta=training.min_delta):
        return end
    if _chooses(config) or any(client.task.writes for client in assembly.clients):
        first = end.evaluated
        end = _delivered(config, engine, mixed, trained, round=round, cuts=cuts, final=True)
        end = replace(end, evaluated=(*first, *end.evaluated))
    return replace(end, final=True, stopped=True)


def stopped_line(history: Mapping[int, float], *, round: int, rounds: int) -> str:
    """That a run stopped early, and after which round it was best."""
    (best,) = best_rounds(history, 1)
    return f"stopped early after round {round} of {rounds}: validation {history[best]:.3f} in round {best} was the best"


def _delivered(
    config: Config,
    engine: Engine,
    mixed: ByClient,
    trained: ByClient,
    *,
    round: int,
    cuts: Mapping[str, Cut],
    final: bool,
) -> End:
    tried = _tried(engine, mixed, trained, round=round, cuts=cuts) if final and _chooses(config) else ()
    start, kept = best_of(mixed, trained, *tried) if tried else (mixed, ())
    scores: Scores = {}
    if final or round % config.training.eval_every == 0:
        # ROUGE is of what the clients end with: writing costs a pass a token
        new_tokens = config.data.new_tokens if final else 0
        scores = evaluate(engine, start, round=round, new_tokens=new_tokens, cuts=cuts)
    evaluated = (*_all(tried), *_all(tuple(scores.values())))
    return End(start=start, kept=kept, scores=scores, evaluated=evaluated, final=final)


def _chooses(config: Config) -> bool:
    return config.mixing.keep == "best" and strategy_of(config).communicates


def evaluate(
    engine: Engine, models: ByClient, *, round: int, new_tokens: int = 0, cuts: Mapping[str, Cut] = MappingProxyType({})
) -> dict[Split, dict[str, Update]]:
    """Scores of these models on their own clients' validation and test examples; of text too, if it may be written."""
    splits: tuple[Split, ...] = ("validation", "test")
    return {split: _scores(engine, models, split, round=round, new_tokens=new_tokens, cuts=cuts) for split in splits}


def _scores(
    engine: Engine, models: ByClient, split: Split, *, round: int, cuts: Mapping[str, Cut], new_tokens: int = 0
) -> dict[str, Update]:
    jobs = jobs_for(models, EvaluateOptions(split=split, new_tokens=new_tokens), round=round, cuts=cuts)
    return {update.client: update for update in engine.run("evaluate", jobs)}


def jobs_for(
    models: ByClient,
    options: Any,
    *,
    round: int,
    cuts: Mapping[str, Cut],
    momentum: ByClient = MappingProxyType({}),
) -> list[Job]:
    """A job for every one of these models; `momentum` is what clients kept of their optimizers."""
    return [
        Job(
            client=name,
            params=params,
            round=round,
            options=options,
            cut=cuts.get(name),
            momentum=momentum.get(name, {}),
        )
        for name, params in models.items()
    ]


def _all(scores: Sequence[Mapping[str, Update]]) -> list[Update]:
    return [update for by_client in scores for update in by_client.values()]


def _tried(
    engine: Engine, mixed: ByClient, trained: ByClient, *, round: int, cuts: Mapping[str, Cut]
) -> tuple[dict[str, Update], dict[str, Update]]:
    """Validation scores of the clients that trained: of their own models, and of the mixed ones."""
    own = _scores(engine, trained, "validation", round=round, cuts=cuts)
    return own, _scores(engine, {name: mixed[name] for name in trained}, "validation", round=round, cuts=cuts)


def best_of(
    mixed: ByClient, trained: ByClient, own: Mapping[str, Update], met: Mapping[str, Update]
) -> tuple[dict[str, Params], tuple[str, ...]]:
    """On every client that trained the better of mixed and own model by its validation loss; who kept its own."""
    # Who does not answer cannot say that its own is better.
    scored = [name for name in trained if name in own and name in met]
    kept = tuple(name for name in scored if own[name].metrics["loss"] < met[name].metrics["loss"])
    return {name: trained[name] if name in kept else params for name, params in mixed.items()}, kept
