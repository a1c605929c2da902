"""`atlas list`: the registries."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from rich.table import Table

from atlas_fl.cli import options as cli
from atlas_fl.cli.display import show
from atlas_fl.config import Config, settings, value_of
from atlas_fl.config.conflicts import conflicts, flag_of
from atlas_fl.config.methods import knobs_of, method_class, method_of, settings_read, with_method_settings
from atlas_fl.config.presets import presets
from atlas_fl.config.settings import replace_settings
from atlas_fl.config.values import describe, to_words
from atlas_fl.data.registry import TASKS
from atlas_fl.errors import ConfigError, check_known
from atlas_fl.methods.registry import ALIASES, METHODS, RULES, published
from atlas_fl.models.registry import MODELS
from atlas_fl.plugins import load_plugins
from atlas_fl.ranks.devices import DEVICES, PROFILES, REQUIRED
from atlas_fl.report.format import human_bytes

Lines: TypeAlias = Iterable[tuple[str, ...]]

WRAPPED = ("note", "what it does", "what it is", "reason and remedy")
"""Columns of sentences; every other one keeps its words on one line."""


def catalogue(options: cli.ListOptions) -> int:
    """Print the registry that these words name; 0."""
    if options.plugin:
        load_plugins(options.plugin)
    if options.name is not None and options.what != "strategies":
        raise ConfigError(f"unexpected words: {options.name}; a strategy alone can be named; see `atlas list --help`")
    if options.name is not None:
        show([_listing(_strategies(options.name)), _listing(_knobs(options.name))])
    else:
        kinds = (("atlas list", "what it is"), *((name, about) for name, (about, _) in CATALOGUES.items()))
        show([_listing(kinds if options.what is None else CATALOGUES[options.what][1]())])
    return 0


def _listing(rows: Lines) -> Table:
    header, *lines = rows
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in header:
        table.add_column(title, overflow="fold", no_wrap=title not in WRAPPED)
    for line in lines:
        table.add_row(*line)
    return table


def _knobs(name: str) -> Lines:
    """The settings that a strategy has an effect on, or fixes, with their values under it."""
    config = with_method_settings(replace_settings({"strategy": ALIASES.get(name, name)}, base=Config()))
    method = method_of(config)
    own = {*settings_read(config), *method.settings, *method.suggested}
    yield "flag", "value", "what it is"
    for setting in settings().values():
        if setting.name in own:
            note = "" if setting.name not in method.settings else " Fixed by the strategy."
            yield setting.flag, " ".join(to_words(value_of(config, setting.name))), setting.help + note
    for knob in knobs_of(method_class(config)).values():
        allowed = describe(knob.kind) if knob.range is None else knob.range.describe()
        yield knob.flag, " ".join(to_words(knob.default)), f"{knob.help} ({allowed})"


def _conflicts() -> Lines:
    yield "setting", "with", "reason and remedy"
    for row in conflicts():
        flags = [flag_of(name) for name, _ in row.values]
        first, *others = [f"{flag} {words}" for flag, (_, words) in zip(flags, row.values, strict=True)]
        yield first, " and ".join(others), f"{row.reason}; {row.remedy}".format(*flags, candidates="--candidates")


def _tasks() -> Lines:
    yield "task", "labels", "metric", "length", "note"
    for task in TASKS.values():
        labels = str(task.num_labels) if task.num_labels > 1 else "text" if task.writes else "number"
        yield task.name, labels, task.metric_name, "-" if task.images else str(task.max_length), task.note


def _strategies(alone: str | None = None) -> Lines:
    yield "strategy", "what it does"
    names = [*RULES, *METHODS] if alone is None else [ALIASES.get(alone, alone)]
    check_known("strategy", *names, among=[*RULES, *METHODS, *ALIASES])
    for name in names:
        method = published(name)
        rule = RULES[method.rule]
        aliases = [alias for alias, target in ALIASES.items() if target == name]
        also = f" Also {', '.join(aliases)}." if aliases else ""
        needs = ["equal ranks"] if rule.equal_ranks or method.equal_ranks else [rule.needs] if rule.needs else []
        own = {**method.settings, **method.suggested}
        needs += ["twice the training"] if "second_model" in own and "personal_models" not in own else []
        needs += [rule.extra_passes] if rule.extra_passes else []
        sets = " ".join(f"{setting}={' '.join(to_words(value))}" for setting, value in own.items())
        lines = [f"{method.summary}{also}", f"needs: {'; '.join(needs) or 'nothing'}"]
        lines += [f"rule: {rule.name}"] if name in METHODS else []
        lines += [f"differs from its paper: {method.differs}"] if method.differs else []
        yield name, "\n".join([*lines, *([f"sets: {sets}"] if sets else [])])


def _devices() -> Lines:
    # the words of --device, so that a line can be copied into a profile of one's own
    yield "device", *REQUIRED, "upload"
    for name, values in PROFILES.items():
        yield name, *(f"{values[key]:g}" for key in REQUIRED), human_bytes(DEVICES[name].adapter_bytes)


CATALOGUES: Mapping[cli.What, tuple[str, Callable[[], Lines]]] = {
    "tasks": ("data sets, their labels and metrics", _tasks),
    "models": (
        "pretrained models by their alias",
        lambda: (
            ("model", "size", "lr", "from", "note"),
            *((one.alias, one.parameters, f"{one.lr:g}", one.path, one.note) for one in MODELS.values()),
        ),
    ),
    "strategies": ("the server's rules and published methods; with a name, the settings of that one", _strategies),
    "devices": ("profiles of the clients' machines", _devices),
    "presets": (
        "recipes that all defaults come from",
        lambda: (("preset", "what it is"), *((name, preset.about) for name, preset in presets().items())),
    ),
    "conflicts": ("settings that contradict each other", _conflicts),
}
"""Summary and table of each list."""
