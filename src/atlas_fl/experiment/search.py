"""Hyperparameter search: search spaces and trials, which Optuna proposes.

Trials are ordinary runs, and nothing else is kept: a proposal is a function of the seed and the trials before it, so
the same search proposes the same trials again, passes by finished runs and resumes the one that was interrupted.
Sampler: tree-structured Parzen estimators, Bergstra, Bardenet, Bengio, Kegl, "Algorithms for
Hyper-Parameter Optimization" (NeurIPS 2011).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from atlas_fl.config import Config, identity_settings, pin_mask_file, to_toml, validate, with_values
from atlas_fl.config.presets import federation_name
from atlas_fl.config.settings import Setting, find_setting, parse_setting
from atlas_fl.config.values import Mark, parse_integer, unwrap_optional
from atlas_fl.errors import ConfigError
from atlas_fl.events import OnEvent, ignore
from atlas_fl.experiment.summary import LOWEST, best_rounds, histories, mean_series
from atlas_fl.experiment.sweep import OnRun, Point, RunState, grid, parse_over, run_all
from atlas_fl.rng import derive_seed
from atlas_fl.storage import extras, folder_access, jsonl
from atlas_fl.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    SearchSpace: TypeAlias = Mapping[str, BaseDistribution]

LOG = "log"
MAX_CHECKED = 256


def parse_space(texts: Sequence[str]) -> "SearchSpace":
    """The search space of texts such as `lr=1e-4..1e-2:log`, `local-steps=4..16` and `weight-decay=0,1e-4`.

    Raises:
        ConfigError: a text is no sweep (`experiment.sweep.parse_over`), its range has no numbers or a wrong end, or
            optuna is not installed.
    """
    return {name: _parse_choices(find_setting(name), parts) for name, parts in parse_over(texts).items()}


def check_space(base: Config, space: "SearchSpace") -> None:
    """Check that every combination of values and ends of ranges is a valid config.

    Raises:
        AtlasError: a combination is invalid; only the first `MAX_CHECKED` are checked.
    """
    ends = [own.choices if hasattr(own, "choices") else (own.low, own.high) for own in space.values()]
    for values in islice(product(*ends), MAX_CHECKED):
        validate(with_values(base, dict(zip(space, map(format_value, values)))))


def format_value(value: Any) -> str:
    """A chosen value as a command line spells it, to the last digit."""
    return value if isinstance(value, str) else repr(value)


def _parse_choices(setting: Setting, parts: tuple[str, ...]) -> "BaseDistribution":
    """The range of a setting that takes numbers, or its values: texts, as on a command line."""
    distributions = _optuna().distributions
    kind = int if Mark.WORD_OR_NUMBER in setting.marks else unwrap_optional(setting.kind) or setting.kind
    spans = [part for part in parts if kind in (int, float) and ".." in part]
    if not spans:
        return distributions.CategoricalDistribution(parts)
    span, _, scale = spans[0].partition(":")
    low, high = (_parse_end(setting, end) for end in span.split("..", 1))
    is_log = scale == LOG
    rises = None not in (low, high) and low < high and (low > 0 or not is_log)
    if len(parts) > 1 or scale not in ("", LOG) or not rises:
        raise ConfigError(
            f"--over {setting.name}={','.join(parts)} is no range; allowed: one range of numbers that rises, above 0 on"
            f" a log scale; write {setting.name}=LOW..HIGH, or {setting.name}=LOW..HIGH:log"
        )
    if kind is int:
        return distributions.IntDistribution(low, high, log=is_log)
    return distributions.FloatDistribution(low, high, log=is_log)


def _parse_end(setting: Setting, text: str) -> Any:
    return parse_integer(text) if Mark.WORD_OR_NUMBER in setting.marks else parse_setting(setting, text)


def _optuna() -> Any:
    optuna = extras.import_extra("optuna", extra="search", asked="atlas search needs")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The outcome of a search."""

    settings: Path
    """The file of the best settings, beside the runs."""
    trials: Sequence[Mapping[str, Any]]
    """Number of every trial, its values as a command line spells them, the mean validation score of its best round
    (the earliest of equals), this round (None where no outputs are numbers), its evaluated rounds and its run."""

    @property
    def best(self) -> Mapping[str, Any]:
        """The trial with the highest score, the first of equals."""
        return max(self.trials, key=lambda trial: trial["validation"])


def run_search(
    base: Config, *, space: "SearchSpace", trials: int, on_trial: OnRun = lambda *_: None, on_event: OnEvent = ignore
) -> SearchResult:
    """Run so many trials, and write the best settings to a file beside the runs.

    The objective is the mean validation score over clients in a trial's best round. Finished runs are not repeated, and
    unfinished ones are resumed. `on_trial` is called with a trial's number, point and the state of its run beforehand.

    Raises:
        AtlasError: a trial's settings cannot be run.
    """
    if trials < 1:
        raise ConfigError(f"--trials is {trials}; allowed: at least 1; give the number of trials")
    check_space(base, space)
    base = pin_mask_file(base)
    optuna = _optuna()
    sampler = optuna.samplers.TPESampler(seed=derive_seed(base.run.seed, "search") % 2**32)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    finished: list[dict[str, Any]] = []
    points: list[Point] = []

    def announce(_: int, point: Point, state: RunState) -> None:
        on_trial(len(finished), point, state)

    for number in range(trials):
        proposed = study.ask(dict(space))
        changes = {name: format_value(value) for name, value in proposed.params.items()}
        points += grid(base, over={name: (value,) for name, value in changes.items()}, seeds=(base.run.seed,))
        (run,) = run_all(points[-1:], on_run=announce, on_event=on_event)
        scores = mean_series(list(histories(jsonl.read_rows(RunFolder(run).metrics)).values()), "validation")
        best_round = next(iter(best_rounds(scores, 1)), None)
        score = LOWEST if best_round is None else scores[best_round]
        study.tell(proposed, score)
        outcome = {"validation": score, "best_round": best_round, "rounds": max(scores, default=0), "run": run.name}
        finished.append({"trial": number, **changes, **outcome})
    # a digest of all that is searched is in the name, so that no two searches share a file
    searched = {**identity_settings(base), "over": {name: str(choices) for name, choices in space.items()}}
    digest = sha256(jsonl.to_json(searched).encode()).hexdigest()[:8]
    stem = base.run.name or f"search-{federation_name(base)}"
    result = SearchResult(settings=Path(base.run.runs_dir) / f"{stem}-{digest}.toml", trials=finished)
    if result.best["best_round"] is None:
        raise ConfigError(
            f"the models of all {trials} trials give outputs that are NaN or infinite; search lower rates in --over"
        )
    best = points[result.best["trial"]].config
    named = replace(best, run=replace(best.run, name=f"{result.settings.stem}-best"))
    folder_access.write_atomic(result.settings, to_toml(named).encode())
    return result
