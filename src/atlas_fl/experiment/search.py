"""Hyperparameter search: search spaces, trials, and the Optuna study that stores them.

Trials are ordinary runs. The study is a file that holds finished trials alone, each written in one step: a search that
is killed proposes the same trial again and resumes its run. A proposal is a function of the seed, the number of the
trial and the trials before it. Sampler: tree-structured Parzen estimators, Bergstra, Bardenet, Bengio, Kegl,
"Algorithms for Hyper-Parameter Optimization" (NeurIPS 2011). Median pruning: Golovin et al., "Google Vizier" (KDD
2017).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import islice, product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from atlas_fl.config import Config, identity_settings, pin_mask_file, run_folder, to_toml, validate, with_values
from atlas_fl.config.files import load_values
from atlas_fl.config.settings import Setting, find_setting, parse_setting
from atlas_fl.config.values import Mark, parse_integer, unwrap_optional
from atlas_fl.errors import CheckpointError, ConfigError
from atlas_fl.events import Event, OnEvent, RoundFinished, ignore
from atlas_fl.experiment.early_stopping import best_rounds
from atlas_fl.experiment.parallel_runs import run_all
from atlas_fl.experiment.summary import histories, mean_series
from atlas_fl.experiment.sweep import Point, RunState, grid, parse_over
from atlas_fl.rng import derive_seed
from atlas_fl.storage.extras import install_command
from atlas_fl.storage.files import is_left_of_beginning, run_lock
from atlas_fl.storage.folder_access import list_folder, open_to_append, remove_drafts, write_atomic
from atlas_fl.storage.jsonl import from_json, read_rows, to_json
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
    ends = {name: _range_ends(choices) for name, choices in space.items()}
    for values in islice(product(*ends.values()), MAX_CHECKED):
        validate(with_values(base, dict(zip(ends, values))))


def format_value(value: Any) -> str:
    """A chosen value as a command line spells it, to the last digit."""
    return value if isinstance(value, str) else repr(value)


def _range_ends(choices: "BaseDistribution") -> list[str]:
    values = choices.choices if hasattr(choices, "choices") else (choices.low, choices.high)
    return [format_value(value) for value in values]


def _parse_choices(setting: Setting, parts: tuple[str, ...]) -> "BaseDistribution":
    """The range of a setting that takes numbers, or its values: texts, as on a command line."""
    distributions = _optuna().distributions
    kind = int if Mark.WORD_OR_NUMBER in setting.marks else unwrap_optional(setting.kind) or setting.kind
    spans = [part for part in parts if kind in (int, float) and ".." in part]
    if not spans:
        return distributions.CategoricalDistribution(parts)
    text = f"--over {setting.name}={','.join(parts)}"
    if len(parts) > 1:
        raise ConfigError(f"{text} has a range beside other values; give one range, or values with commas between")
    span, colon, scale = spans[0].partition(":")
    low, high = (_parse_number(setting, end, kind=kind) for end in span.split("..", 1))
    if colon and scale != LOG:
        raise ConfigError(f"{text} ends in :{scale}; allowed: :log, or nothing; write {setting.name}=LOW..HIGH:log")
    if not low < high:
        raise ConfigError(f"{text} does not rise; allowed: the low end first; write {setting.name}=LOW..HIGH")
    if scale and low <= 0:
        raise ConfigError(f"{text} begins at {low:g}; allowed on a log scale: above 0; raise the low end")
    if kind is int:
        return distributions.IntDistribution(low, high, log=bool(scale))
    return distributions.FloatDistribution(low, high, log=bool(scale))


def _parse_number(setting: Setting, text: str, *, kind: type) -> Any:
    value = parse_integer(text) if Mark.WORD_OR_NUMBER in setting.marks else parse_setting(setting, text)
    if value is None:
        raise ConfigError(
            f"--over {setting.name} has {text!r} as an end of its range; allowed: a{' whole' if kind is int else ''}"
            f" number; write {setting.name}=LOW..HIGH"
        )
    return value


Pruner: TypeAlias = Literal["none", "median"]
SETTINGS = "settings"


def open_study(path: Path, *, settings: Mapping[str, Any]) -> Any:
    """Open the study in this file, or create it.

    Raises:
        CheckpointError: the file is damaged, or its study is of other settings.
    """
    optuna = _optuna()
    from sqlalchemy.exc import SQLAlchemyError

    open_to_append(path).close()  # the database takes an empty file for a new one, and would follow a link
    try:
        study = optuna.create_study(
            storage=f"sqlite:///{path.absolute()}", study_name="search", direction="maximize", load_if_exists=True
        )
        if SETTINGS not in study.user_attrs:
            study.set_user_attr(SETTINGS, dict(settings))
        recorded = study.user_attrs[SETTINGS]
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", error)).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read as a study ({reason}); restore it, or remove it: runs that are finished stay"
        ) from None
    for name in [name for name in {**settings, **recorded} if settings.get(name) != recorded.get(name)]:
        raise CheckpointError(
            f"the search in {path.parent} was begun with {name} = {recorded.get(name)!r}, not {settings.get(name)!r};"
            " choose another --name or --runs-dir"
        )
    return study


def next_trial(study: Any, space: "SearchSpace", *, seed: int, pruner: Pruner) -> Any:
    """Propose the next trial, of a study in memory with all finished trials; nothing is written."""
    optuna = _optuna()
    finished = study.get_trials(deepcopy=False)
    draft = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=derive_seed(seed, "search", len(finished)) % 2**32),
        pruner=optuna.pruners.MedianPruner() if pruner == "median" else optuna.pruners.NopPruner(),
    )
    draft.add_trials(finished)
    return draft.ask(dict(space))


def record_trial(
    study: Any, space: "SearchSpace", params: Mapping[str, Any], *, scores: Mapping[int, float], pruned: bool, run: str
) -> None:
    """Write a finished trial: its settings, its validation scores by round, and the name of its run."""
    optuna = _optuna()
    states = optuna.trial.TrialState
    study.add_trial(
        optuna.trial.create_trial(
            state=states.PRUNED if pruned else states.COMPLETE,
            params=dict(params),
            distributions=dict(space),
            value=None if pruned else max(scores.values()),
            intermediate_values=dict(scores),
            user_attrs={"run": run},
        )
    )


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError(f"atlas search needs optuna, which is not installed; {install_command('search')}") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


STUDY, BEST, TABLE = "study.sqlite3", "best.toml", "trials.csv"
OnTrial = Callable[[int, Point, RunState], None]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A finished trial."""

    number: int
    """Its number, from 0."""
    changes: Mapping[str, str]
    """The chosen values, as text."""
    run: str
    """The name of its run."""
    scores: Mapping[int, float]
    """The mean validation score of every evaluated round."""
    pruned: bool
    """True for one that was pruned before its last round."""

    @property
    def score(self) -> float:
        """The score of its best round."""
        return max(self.scores.values())

    @property
    def best_round(self) -> int:
        """The round with the highest score, the earliest of equals."""
        return best_rounds(self.scores, 1)[0]


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The outcome of a search."""

    folder: Path
    """The folder of its study and of `best.toml`."""
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The trial with the highest score that was not pruned, the first of equals."""
        return max((trial for trial in self.trials if not trial.pruned), key=lambda trial: trial.score)


class _TrialPruned(Exception):  # noqa: N818
    """A trial is pruned; its run stays as it is after the round."""


def run_search(
    base: Config,
    *,
    space: "SearchSpace",
    trials: int,
    pruner: Pruner = "none",
    on_trial: OnTrial = lambda *_: None,
    on_event: OnEvent = ignore,
) -> SearchResult:
    """Run trials until the study has `trials` of them, and write the best settings as `best.toml`.

    The objective is the mean validation score over clients in a trial's best round. Finished runs are not repeated, and
    unfinished ones are resumed. `on_trial` is called with a trial's number, point and the state of its run beforehand.

    Raises:
        AtlasError: a trial's settings cannot be run, or what lies in the folder is of another search.
    """
    if trials < 1:
        raise ConfigError(f"--trials is {trials}; allowed: at least 1; give the number of trials")
    if base.run.max_rounds is not None:
        raise ConfigError(f"--max-rounds is {base.run.max_rounds}; here every run goes to its end; leave it out")
    optuna = _optuna()
    check_space(base, space)
    base = pin_mask_file(base)
    over = {name: optuna.distributions.distribution_to_json(choices) for name, choices in space.items()}
    settings = from_json(to_json({**identity_settings(base), "over": over, "pruner": pruner}))
    folder = search_folder(base, settings)
    with run_lock(folder):
        remove_drafts(folder, of=re.compile(re.escape(BEST)))
        study = open_study(folder / STUDY, settings=settings)
        for number in range(len(study.get_trials(deepcopy=False)), trials):
            draft = next_trial(study, space, seed=base.run.seed, pruner=pruner)
            point = _trial_point(base, draft.params)
            run, pruned = _run_trial(point, draft, on_state=partial(on_trial, number, point), on_event=on_event)
            record_trial(study, space, draft.params, scores=_validation_scores(run), pruned=pruned, run=run.name)
        result = SearchResult(
            folder=folder, trials=tuple(_read_trial(trial) for trial in study.get_trials(deepcopy=False))
        )
        best = _trial_point(base, result.best.changes).config
        named_best = replace(best, run=replace(best.run, name=_best_name(folder)))
        write_atomic(folder / BEST, to_toml(named_best).encode())
    return result


def search_folder(base: Config, settings: Mapping[str, Any]) -> Path:
    """The folder of a search beside the runs, under its `--name` or one with a hash of its settings.

    Raises:
        ConfigError: a run lies there, or something else that is no search.
    """
    digest = sha256(to_json(settings).encode()).hexdigest()[:8]
    path = Path(base.run.runs_dir) / (base.run.name or f"search-{base.run.preset}-{digest}")
    if RunFolder(path).is_resumable() or (path.exists() and not path.is_dir()):
        raise ConfigError(f"{path} is taken; choose another --name or --runs-dir for the search")
    if base.run.name is not None and path.exists() and not (path / STUDY).is_file():
        _check_leftovers(path)
    return path


def _check_leftovers(folder: Path) -> None:
    """Check that a folder without a study is empty, or holds only the other files of a search.

    Raises:
        ConfigError: it holds something else, which would be written over.
    """
    best_file = folder / BEST
    try:
        leftovers = {BEST, TABLE} if load_values(best_file, within=folder)["name"] == _best_name(folder) else set()
    except (ConfigError, KeyError):
        leftovers = set()
    names = [name for name in list_folder(folder) if not is_left_of_beginning(name)]
    if others := [name for name in names if name not in leftovers]:
        raise ConfigError(
            f"{folder} exists, is no search and holds {others[0]}; choose another --name or --runs-dir for the search"
        )


def _best_name(folder: Path) -> str:
    """The name that `best.toml` gives to a run."""
    return f"{folder.name}-best"


def _trial_point(base: Config, params: Mapping[str, Any]) -> Point:
    over = {name: (format_value(value),) for name, value in params.items()}
    (point,) = grid(base, over=over, seeds=(base.run.seed,))
    return point


def _run_trial(
    point: Point, draft: Any, *, on_state: Callable[[RunState], None], on_event: OnEvent
) -> tuple[Path, bool]:
    """(the folder of the trial's run, true where it was pruned)."""
    folder = run_folder(point.config).path

    def watch(event: Event) -> None:
        on_event(event)
        if isinstance(event, RoundFinished) and event.scores:
            _report_scores(draft, {event.round: fmean(event.scores.values())})

    try:
        _report_scores(draft, {} if (folder / "summary.json").exists() else _validation_scores(folder))
        run_all([point], on_run=lambda _, __, state: on_state(state), on_event=watch)
    except _TrialPruned:
        return folder, True
    return folder, False


def _report_scores(draft: Any, scores: Mapping[int, float]) -> None:
    for round, score in scores.items():
        draft.report(score, round)
        if draft.should_prune():
            raise _TrialPruned


def _validation_scores(run: Path) -> dict[int, float]:
    return mean_series(list(histories(read_rows(RunFolder(run).metrics)).values()), "validation")


def _read_trial(trial: Any) -> Trial:
    return Trial(
        number=trial.number,
        changes={name: format_value(value) for name, value in trial.params.items()},
        run=trial.user_attrs["run"],
        scores=trial.intermediate_values,
        pruned=trial.state.name == "PRUNED",
    )
