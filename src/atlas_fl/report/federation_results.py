"""Finished runs by federation and method: federations and rows of a method.

Runs belong to one federation where they agree in all settings but the method, what some method sets, the seed and what
tuning varies. Inside it a row is a method with its settings: what the method owns (`PublishedMethod.settings`), and
what it suggests where the run has that value, go without saying; runs of one method that differ in anything else are
different rows, with these settings beside the name.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from atlas_fl.config import Config, differences, identity_settings
from atlas_fl.config.presets import dial_of, federation_name, preset_of, presets
from atlas_fl.config.settings import value_of
from atlas_fl.config.values import LIST_SEPARATOR, to_words
from atlas_fl.data.clients import group_by
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.tuning import KNOBS, TunedMethod
from atlas_fl.frozen import Frozen
from atlas_fl.methods.registry import METHODS, published
from atlas_fl.report.finished_runs import FinishedRun
from atlas_fl.report.method_comparison import BASELINE, MethodComparison, compare_scores, default_control

OF_THE_METHOD = frozenset(name for method in METHODS.values() for name in (*method.settings, *method.suggested))
"""Settings that some method sets: in these the methods of one federation may differ."""
OF_THE_TUNING = frozenset({"lr", *(name for knobs in KNOBS.values() for name in knobs)}) - OF_THE_METHOD
"""Settings that tuning varies and no method sets."""
VARIED = OF_THE_METHOD | OF_THE_TUNING
"""Settings that may tell the rows of one federation apart."""
WHICH_RUN = frozenset({"strategy", "seed"})


class FederationResults(Frozen):
    """Results of one federation."""

    title: str
    words: str
    """Description of its dial."""
    changed: Mapping[str, Any]
    """Settings that all its runs share and that are not those of its preset; of what tuning varies, not the default."""
    own_settings: Mapping[str, str]
    """By method, those of its settings in which it differs from other methods, and which are not what it sets."""
    tuned: Mapping[str, TunedMethod]
    """By method, the record of tuning that all its runs have."""
    comparison: MethodComparison | None
    """None where the control lacks seeds that others have."""
    seeds: Mapping[str, tuple[int, ...]]
    """By method, those of its runs."""
    in_one_place: Mapping[str, tuple[float, ...]]
    """Mean test scores by seed of `centralized`, which has one client a task."""

    @property
    def incomplete(self) -> dict[str, tuple[int, ...]]:
        """By method, the seeds of others that it lacks; it is in no table. Empty without a comparison."""
        every = sorted({seed for seeds in self.seeds.values() for seed in seeds})
        missing = {name: tuple(seed for seed in every if seed not in seeds) for name, seeds in self.seeds.items()}
        return {name: seeds for name, seeds in missing.items() if seeds and self.comparison is not None}

    @property
    def seed_words(self) -> str:
        """`local 1, 2 and fedavg 3`: the seeds of each method."""
        words = [f"{name} {', '.join(map(str, seeds))}" for name, seeds in self.seeds.items()]
        return " and ".join(words) or "runs in one place alone"


def lines_in_one_place(result: FederationResults) -> list[str]:
    """A sentence on each method that has all examples in one place."""
    lines = []
    for name, scores in sorted(result.in_one_place.items()):
        seeds = f"{len(scores)} seed{'s' * (len(scores) > 1)}"
        lines.append(f"All examples of a task in one place ({name}): {fmean(scores):.3f} over {seeds}")
    return lines


def federation_results(runs: Sequence[FinishedRun], *, control: str | None) -> tuple[FederationResults, ...]:
    """The comparison of the methods of every federation, in the order of preset and dial.

    Without a control every federation takes the first of `CONTROLS` that it has, or its first method.

    Raises:
        ConfigError: a federation has no finished run of `control`, or two runs of one row have the same seed.
        DataError: the runs of two methods have other clients.
    """
    groups = group_by(runs, lambda run: _federation_key(run.config))
    results = [_compare_federation(groups[key], control=control) for key in sorted(groups)]
    counts = Counter(result.title for result in results)
    return tuple(
        replace(result, title=f"{result.title}, {setting_words(result.changed)}")
        if counts[result.title] > 1 and result.changed
        else result
        for result in results
    )


def _federation_key(config: Config) -> tuple[str, int, str]:
    """Equal of runs of one federation; preset and dial come first, by which federations are sorted."""
    values = {name: value for name, value in identity_settings(config).items() if name not in VARIED | WHICH_RUN}
    dial = -1 if config.run.dial is None else config.run.dial
    return config.run.preset, dial, repr(sorted(values.items(), key=lambda item: item[0]))


def _compare_federation(runs: Sequence[FinishedRun], *, control: str | None) -> FederationResults:
    central = [run for run in runs if run.config.data.centralized]
    by_client = [run for run in runs if not run.config.data.centralized]
    config = runs[0].config
    methods = method_rows(by_client)
    every_seed = {run.seed for run in by_client}
    complete = {
        name: [run.scores for run in by_seed.values()] for name, by_seed in methods.items() if {*by_seed} == every_seed
    }
    if control is None:
        control = default_control(list(complete or methods)) if methods else BASELINE
    if methods and control not in methods:
        raise ConfigError(f"--control is {control}, and {_title(config)} has {', '.join(methods)}; name one of these")
    return FederationResults(
        title=_title(config),
        words=_dial_words(config),
        changed=_changed_settings(by_client or runs),
        own_settings=_own_settings({name: methods[name] for name in _in_order(methods, control)}),
        tuned={name: record for name in _in_order(methods, control) if (record := _shared_record(methods[name]))},
        comparison=compare_scores(_in_order(complete, control), control=control) if control in complete else None,
        seeds={name: tuple(sorted(methods[name])) for name in _in_order(methods, control)},
        in_one_place={
            label: tuple(fmean(run.scores.scores.values()) for run in by_seed.values())
            for label, by_seed in method_rows(central).items()
        },
    )


def method_rows(runs: Sequence[FinishedRun]) -> dict[str, dict[int, FinishedRun]]:
    """The runs by row and seed; a method whose runs differ in what methods or tuning set is a row for each setting.

    Raises:
        ConfigError: two runs of one row have the same seed.
    """
    rows: dict[str, dict[int, FinishedRun]] = {}
    for method, members in group_by(runs, lambda run: run.method).items():
        telling = [name for name in sorted(VARIED) if len({value_of(run.config, name) for run in members}) > 1]
        for run in members:
            label = f"{method} {setting_words({name: value_of(run.config, name) for name in telling})}".rstrip()
            row = rows.setdefault(label, {})
            if run.seed in row:
                raise ConfigError(
                    f"{label} has two runs with seed {run.seed} in {_title(run.config)}, which no setting tells apart;"
                    " give the folder of one of them"
                )
            row[run.seed] = run
    return dict(sorted(rows.items()))


def setting_words(values: Mapping[str, Any]) -> str:
    """`lr=0.01 share=A+B`."""
    return " ".join(f"{name}={LIST_SEPARATOR.join(to_words(value))}" for name, value in values.items())


def _owns(config: Config, name: str) -> bool:
    """Return whether the value of this setting goes without saying for the method of this run."""
    method = published(config.mixing.strategy)
    return name in method.settings or (name in method.suggested and value_of(config, name) == method.suggested[name])


def _own_settings(methods: Mapping[str, Mapping[int, FinishedRun]]) -> dict[str, str]:
    """By row, the settings in which it differs from others and that are neither its method's nor in its label."""
    configs = {name: next(iter(by_seed.values())).config for name, by_seed in methods.items()}
    varied = [
        name
        for name in sorted(VARIED)
        if len({value_of(config, name) for config in configs.values() if not _owns(config, name)}) > 1
    ]
    words: dict[str, str] = {}
    for label, config in configs.items():
        values = {
            name: value_of(config, name)
            for name in varied
            if not _owns(config, name) and f" {name}=" not in label and _is_telling(config, name)
        }
        words |= {label: setting_words(values)} if values else {}
    return words


def _is_telling(config: Config, name: str) -> bool:
    """Return whether a row names its value of a setting: the rate always, others if they are not the preset's.

    A knob of one method is at its default for all others, and nobody is helped by reading so of each.
    """
    value = value_of(config, name)
    return value is not None and (name == "lr" or value != value_of(preset_of(config), name))


def _changed_settings(runs: Sequence[FinishedRun]) -> dict[str, Any]:
    changed = [differences(preset_of(run.config), run.config) for run in runs]
    shared: dict[str, Any] = {}
    for name in sorted({*OF_THE_TUNING, *(name for one in changed for name in one)} - WHICH_RUN):
        free = [run.config for run in runs if not _owns(run.config, name)]
        usual = Config() if name in OF_THE_TUNING else preset_of(runs[0].config)
        values = {value_of(config, name) for config in free}
        if len(values) == 1 and (value := values.pop()) != value_of(usual, name):
            shared[name] = value
    return shared


def _shared_record(runs: Mapping[int, FinishedRun]) -> TunedMethod | None:
    """The record of tuning that all these runs have; None where some have none, or another."""
    first, *others = [run.tuning for run in runs.values()]
    return first if all(record == first for record in others) else None


def _in_order(methods: Mapping[str, Any], control: str) -> dict[str, Any]:
    """Local training and the control first, then the others by name."""
    return {name: methods[name] for name in sorted(methods, key=lambda name: (name != BASELINE, name != control, name))}


def _title(config: Config) -> str:
    preset = federation_name(config) or "settings of a file"
    return preset if config.run.dial is None else f"{preset}, dial {config.run.dial}"


def _dial_words(config: Config) -> str:
    preset, dial = config.run.preset, config.run.dial
    if dial is None or preset not in presets():
        return ""
    turned = dial_of(preset, dial)
    return f"{turned.what}: {turned.words[dial]}"
