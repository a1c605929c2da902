"""The study of a search, in a file of optuna's: what was tried, what it scored, and what to try next.

Tree-structured Parzen estimators: Bergstra, Bardenet, Bengio, Kegl, "Algorithms for Hyper-Parameter Optimization"
(NeurIPS 2011); the median rule: Golovin et al., "Google Vizier" (KDD 2017). What is tried next is a function of the
seed, the number of the trial and the trials before it. The file holds ended trials alone, each written in one step, so
a search that is killed tries the same again and goes on with the run that it had begun.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from atlas_fl.errors import CheckpointError, ConfigError
from atlas_fl.rng import seed_of
from atlas_fl.search.space import Space, Span

Pruner: TypeAlias = Literal["none", "median"]
SETTINGS = "settings"


def check_installed() -> None:
    """Nothing where optuna is there; else raises `ConfigError`."""
    _optuna()


def open_study(path: Path, *, settings: Mapping[str, Any]) -> Any:
    """The study in this file, made where there is none.

    Raises:
        CheckpointError: the file is damaged, or its study is of other settings.
    """
    optuna = _optuna()
    from sqlalchemy.exc import SQLAlchemyError

    try:
        study = optuna.create_study(
            storage=f"sqlite:///{path.absolute()}", study_name="search", direction="maximize", load_if_exists=True
        )
        if SETTINGS not in study.user_attrs:
            study.set_user_attr(SETTINGS, dict(settings))
        begun = study.user_attrs[SETTINGS]
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", error)).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read as a study ({reason}); restore it, or remove it: runs that are finished stay"
        ) from None
    for name in [name for name in {**settings, **begun} if settings.get(name) != begun.get(name)]:
        raise CheckpointError(
            f"the search in {path.parent} was begun with {name} = {begun.get(name)!r}, not {settings.get(name)!r};"
            " choose another --name or --runs-dir"
        )
    return study


def next_trial(study: Any, space: Space, *, seed: int, pruner: Pruner) -> Any:
    """What to try next, as a trial that is nowhere written: of a study in memory with all ended trials."""
    optuna = _optuna()
    ended = study.get_trials(deepcopy=False)
    draft = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed_of(seed, "search", len(ended)) % 2**32),
        pruner=optuna.pruners.MedianPruner() if pruner == "median" else optuna.pruners.NopPruner(),
    )
    draft.add_trials(ended)
    return draft.ask(_distributions(space))


def remember(
    study: Any, space: Space, params: Mapping[str, Any], *, scores: Mapping[int, float], pruned: bool, run: str
) -> None:
    """Write an ended trial: its settings, its validation scores by round, and the name of its run."""
    optuna = _optuna()
    states = optuna.trial.TrialState
    study.add_trial(
        optuna.trial.create_trial(
            state=states.PRUNED if pruned else states.COMPLETE,
            params=dict(params),
            distributions=_distributions(space),
            value=None if pruned else max(scores.values()),
            intermediate_values=dict(scores),
            user_attrs={"run": run},
        )
    )


def _distributions(space: Space) -> dict[str, Any]:
    return {name: _distribution(choices) for name, choices in space.items()}


def _distribution(choices: Span | tuple[str, ...]) -> Any:
    distributions = _optuna().distributions
    if isinstance(choices, tuple):
        return distributions.CategoricalDistribution(choices)
    if choices.whole:
        return distributions.IntDistribution(int(choices.low), int(choices.high), log=choices.log)
    return distributions.FloatDistribution(choices.low, choices.high, log=choices.log)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError("atlas search needs optuna, which is not installed; pip install 'atlas-fl[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
