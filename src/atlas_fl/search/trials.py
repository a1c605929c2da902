"""A search from its first trial to its best settings: ordinary runs, and the study beside them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

from atlas_fl.config import Config, identity, pinned, run_folder, to_toml
from atlas_fl.config.toml import load_values
from atlas_fl.errors import ConfigError
from atlas_fl.events import Event, OnEvent, RoundFinished, ignore
from atlas_fl.io.atomic import write_atomic
from atlas_fl.io.folder import RunFolder
from atlas_fl.io.lock import DRAFTS, run_lock
from atlas_fl.io.results import from_json, read_rows, to_json
from atlas_fl.io.scores import histories, mean_series
from atlas_fl.search.space import Space, check_space, plain, text_of
from atlas_fl.search.study import Pruner, check_installed, next_trial, open_study, remember
from atlas_fl.stopping import best_rounds
from atlas_fl.sweep import Point, RunState, grid, run_all

STUDY, BEST, TABLE = "study.sqlite3", "best.toml", "trials.csv"
OnTrial = Callable[[int, Point, RunState], None]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial that has ended."""

    number: int
    """From 0."""
    changes: Mapping[str, str]
    """What was chosen, as text."""
    run: str
    """The name of its run."""
    scores: Mapping[int, float]
    """The mean validation score of every evaluated round."""
    pruned: bool
    """Whether it was given up before its end."""

    @property
    def score(self) -> float:
        """The score of its best round."""
        return max(self.scores.values())

    @property
    def best_round(self) -> int:
        """That round."""
        return best_rounds(self.scores, 1)[0]


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search has come to."""

    folder: Path
    """Where its study and `best.toml` lie."""
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The trial with the highest score of those that were not given up, the first of equals."""
        return max((trial for trial in self.trials if not trial.pruned), key=lambda trial: trial.score)


class _Pruned(Exception):  # noqa: N818
    """A trial that is given up: its run stays as it is after the round."""


def search(
    base: Config,
    *,
    space: Space,
    trials: int,
    pruner: Pruner = "none",
    on_trial: OnTrial = lambda *_: None,
    on_event: OnEvent = ignore,
) -> Search:
    """Try settings until the study has so many trials, and write the best ones' as `best.toml`.

    The criterion is the mean validation score over clients of a trial's best round. Runs that are finished are not run
    again, and begun ones go on. `on_trial` is told a trial's number, point and the state of its run before it is run.

    Raises:
        AtlasError: a trial's settings cannot be run, or what lies in the folder is of another search.
    """
    if trials < 1:
        raise ConfigError(f"--trials is {trials}; allowed: at least 1; give the number of trials")
    if base.run.max_rounds is not None:
        raise ConfigError(f"--max-rounds is {base.run.max_rounds}; here every run goes to its end; leave it out")
    check_installed()
    check_space(base, space)
    base = pinned(base)
    settings = from_json(to_json({**identity(base), "over": plain(space), "pruner": pruner}))
    folder = search_folder(base, settings)
    with run_lock(folder):
        study = open_study(folder / STUDY, settings=settings)
        for number in range(len(study.get_trials(deepcopy=False)), trials):
            draft = next_trial(study, space, seed=base.run.seed, pruner=pruner)
            point = _point(base, draft.params)
            run, pruned = _run(point, draft, tell=partial(on_trial, number, point), on=on_event)
            remember(study, space, draft.params, scores=_scores(run), pruned=pruned, run=run.name)
        found = Search(folder=folder, trials=tuple(_ended(trial) for trial in study.get_trials(deepcopy=False)))
        best = _point(base, found.best.changes).config
        named = replace(best, run=replace(best.run, name=_best_name(folder)))
        write_atomic(folder / BEST, to_toml(named).encode())
    return found


def search_folder(base: Config, settings: Mapping[str, Any]) -> Path:
    """Where a search's study lies: under its own name beside the runs, or one made of what is searched.

    Raises:
        ConfigError: a run lies there, or something else that is no search.
    """
    digest = sha256(to_json(settings).encode()).hexdigest()[:8]
    path = Path(base.run.runs_dir) / (base.run.name or f"search-{base.run.preset}-{digest}")
    if RunFolder(path).is_begun() or (path.exists() and not path.is_dir()):
        raise ConfigError(f"{path} is taken; choose another --name or --runs-dir for the search")
    if base.run.name is not None and path.exists() and not (path / STUDY).is_file():
        _check_remains(path)
    return path


def _check_remains(folder: Path) -> None:
    """Nothing where a folder without a study is empty, or holds what a search has left whose study was removed.

    Raises:
        ConfigError: it holds something else, which would be written over.
    """
    written = folder / BEST
    try:
        left = {BEST, TABLE} if load_values(written)["name"] == _best_name(folder) else set()
    except (ConfigError, KeyError):
        left = set()
    if strange := sorted(path.name for path in folder.iterdir() if path.name not in DRAFTS | left):
        raise ConfigError(
            f"{folder} exists, is no search and holds {strange[0]}; choose another --name or --runs-dir for the search"
        )


def _best_name(folder: Path) -> str:
    """The name that `best.toml` gives to a run."""
    return f"{folder.name}-best"


def _point(base: Config, params: Mapping[str, Any]) -> Point:
    over = {name: (text_of(value),) for name, value in params.items()}
    (point,) = grid(base, over=over, seeds=(base.run.seed,))
    return point


def _run(point: Point, draft: Any, *, tell: Callable[[RunState], None], on: OnEvent) -> tuple[Path, bool]:
    """(the folder of the trial's run, whether it was given up before its end)."""
    folder = run_folder(point.config).path

    def watch(event: Event) -> None:
        on(event)
        if isinstance(event, RoundFinished) and event.scores:
            _report(draft, {event.round: fmean(event.scores.values())})

    try:
        _report(draft, {} if (folder / "summary.json").exists() else _scores(folder))
        run_all([point], on_run=lambda _, __, state: tell(state), on_event=watch)
    except _Pruned:
        return folder, True
    return folder, False


def _report(draft: Any, scores: Mapping[int, float]) -> None:
    for at, score in scores.items():
        draft.report(score, at)
        if draft.should_prune():
            raise _Pruned


def _scores(run: Path) -> dict[int, float]:
    return mean_series(list(histories(read_rows(RunFolder(run).metrics)).values()), "validation")


def _ended(trial: Any) -> Trial:
    return Trial(
        number=trial.number,
        changes={name: text_of(value) for name, value in trial.params.items()},
        run=trial.user_attrs["run"],
        scores=trial.intermediate_values,
        pruned=trial.state.name == "PRUNED",
    )
