"""Settings that contradict each other, a row of `conflicts.tsv` for one, two or three: `atlas list conflicts`.

A row has settings with the values that do not go together, the reason and the remedy. In both sentences `{0}`, `{1}`
and `{2}` stand for the flags with their values, and `{candidates}` for the ranks of `--candidates`. Values are `set`
(other than the default), `chosen` (other than the preset, too), `typed` (given by a user, even the default), `above`,
`below`, `at least` or `no multiple of` a number or another setting, one or several joined by `or`, `other than` these,
or a name of `NAMED`. `@ranks` is any setting of this group, `@OF_SGD` any with this mark. `FACTS` are what follows from
the settings.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from csv import QUOTE_NONE, DictReader
from dataclasses import fields
from functools import cache
from typing import Any

from atlas_fl.config.methods import last_aggregation, method_class, method_of, rule_of, settings_read
from atlas_fl.config.presets import preset_of
from atlas_fl.config.schema import AUTO, NONE, Config, cuts_by_name
from atlas_fl.config.settings import flag_words, settings, value_of
from atlas_fl.config.values import Mark, from_text, to_words
from atlas_fl.errors import ConfigError
from atlas_fl.frozen import Frozen
from atlas_fl.methods.knobs import knobs_class
from atlas_fl.packaged import packaged_text
from atlas_fl.plugins import registrations

LEAVE_ONE = "leave one of them out"
MULTILABEL = "several labels"
TYPED = "typed"
"""Given by a user, with whatever value; no config says so (`check_read`)."""
HALVES = "that compares halves"
"""Strategies that compare halves. One is the default, so their rows come last, after all that a user typed."""


def kinds_of(config: Config) -> Mapping[str, str]:
    """By task `images`, `text to write`, `regression`, `several labels` or `classes`."""
    from atlas_fl.data.registry import find_tasks

    kinds = {}
    for task in find_tasks(config.data.tasks, config.data.task):
        # each client calls some ratings positive
        has_classes = task.has_classes or (task.is_regression and bool(config.data.rating_cuts))
        written = "text to write" if task.writes else "regression"
        kind = MULTILABEL if task.multilabel else "classes" if has_classes else written
        kinds[task.name] = "images" if task.images else kind
    return kinds


def _own_clients(config: Config) -> str:
    """`all`, `some` or `none`: tasks whose data name their clients."""
    from atlas_fl.data.registry import find_tasks

    named = [bool(task.clients) for task in find_tasks(config.data.tasks, config.data.task)]
    return "all" if all(named) else "some" if any(named) else "none"


def _has_images(config: Config) -> bool:
    return "images" in kinds_of(config).values()


def _takes_reports(config: Config) -> bool:
    method = method_class(config)
    return method.report != "none" and not method.models_in_report


def _uses_clusters(config: Config) -> bool:
    from atlas_fl.aggregation.rules import StrategyOptions

    return method_class(config)(StrategyOptions(within=config.robust.within)).clustered


RULE = "rule"
FACTS: Mapping[str, tuple[str, Callable[[Config], Any]]] = {
    RULE: ("--strategy", rule_of),
    "communicates": ("--strategy", lambda config: method_class(config).communicates),
    "holds_frozen": ("--strategy", lambda config: method_class(config).holds_frozen),
    "takes_newcomers": ("--strategy", lambda config: method_class(config).takes_newcomers),
    "reads_classes": ("--strategy", lambda config: method_class(config).needs_classes),
    "report": ("--strategy", lambda config: method_class(config).report),
    "takes_reports": ("--strategy", _takes_reports),
    "compares_halves": ("--strategy", lambda config: method_class(config).report == "halves"),
    "needs_one_rank": ("--strategy", lambda one: method_class(one).equal_ranks or method_of(one).equal_ranks),
    "uses_clusters": ("--strategy", _uses_clusters),
    "kinds": ("--tasks", lambda config: tuple(kinds_of(config).values())),
    "own_clients": ("--task", _own_clients),
    "weights": ("--trainable", lambda config: config.trainable(images=_has_images(config))),
    "steps": ("--optimizer", lambda config: config.optimizer(images=_has_images(config))),
    "last_aggregation": ("--rounds", last_aggregation),
    "terms": ("--plugin", lambda config: [name for one in config.run.plugin for name in registrations(one, "term")]),
}
"""Facts that follow from a config: the flag that decides each, and its value."""

NAMED: Mapping[str, Callable[[Any], bool]] = {
    TYPED: lambda _: False,
    **dict.fromkeys(
        ("of one rank", "that takes reports", "that reads classes", "with clusters", "with terms", HALVES), bool
    ),
    "that holds factors frozen": bool,
    **dict.fromkeys(("that shares nothing", "that takes no late clients", "without clusters"), lambda value: not value),
    "not a number": lambda value: not value.isdecimal(),
    "without a cut": lambda value: set(cuts_by_name(value).values()) == {NONE},
    "with auto": lambda value: AUTO in cuts_by_name(value).values(),
    "A without B, or B without A": lambda value: ("A" in value) != ("B" in value),
    "with A and B": lambda value: {"A", "B"} <= set(value),
    "without A or B": lambda value: not {"A", "B"} <= set(value),
    "other than A B head": lambda value: set(value) != {"A", "B", "head"},
    "without a clip at its end": lambda words: not [*words[-1:]] or not words[-1].startswith("clip="),
    "without head": lambda value: "head" not in value,
    "with images": lambda kinds: "images" in kinds,
    "of texts alone": lambda kinds: "images" not in kinds,
    "with text to write": lambda kinds: "text to write" in kinds,
    "with images or text to write": lambda kinds: bool({"images", "text to write"} & set(kinds)),
    "with several labels": lambda kinds: MULTILABEL in kinds,
    "without classes of texts": lambda kinds: set(kinds) != {"classes"},
}
"""Conditions on a value beside equality and order."""

ORDERS: Mapping[str, Callable[[Any, float], bool]] = {
    "above": lambda value, bound: value > bound,
    "below": lambda value, bound: value < bound,
    "at least": lambda value, bound: value >= bound,
    "no multiple of": lambda value, bound: bool(value % bound),
}


class Conflict(Frozen):
    """Up to three settings with the values that contradict each other."""

    values: tuple[tuple[str, str], ...]
    """(setting, value) of each."""
    reason: str
    remedy: str

    def applies(self, config: Config) -> bool:
        """Return true for a config with all values."""
        return all(_matching(config, name, words) for name, words in self.values)

    def message(self, config: Config) -> str:
        """One line with the values, the reason and the remedy."""
        names = [(*_matching(config, name, words), *_meant(name))[0] for name, words in self.values]
        flags = [
            flag_of(setting) if name[0] == "@" else _flag_words(config, setting)
            for setting, (name, _) in zip(names, self.values, strict=True)
        ]
        remedy = self.remedy
        strategy = config.mixing.strategy
        if remedy == LEAVE_ONE and names[0] in method_of(config).settings:
            remedy = f"leave {{1}} out, or take another strategy than {strategy}, which sets {flags[0].split()[0]}"
        return f"{self.reason}; {remedy}".format(*flags, candidates=", ".join(map(str, config.ranks.candidates)))


_VALUES = (("setting", "value"), ("other", "other_value"), ("third", "third_value"))
"""Columns of the settings and of their values."""


@cache
def conflicts(table: str = "conflicts.tsv") -> tuple[Conflict, ...]:
    """All rows of this table, in the order in which they are checked."""
    rows = DictReader(packaged_text(__package__, table).splitlines(), delimiter="\t", quoting=QUOTE_NONE, restval="")
    return tuple(
        Conflict(
            values=tuple((row[name], row[words]) for name, words in _VALUES if row[name]),
            reason=row["reason"],
            remedy=row["remedy"],
        )
        for row in rows
    )


def check_conflicts(config: Config, *, of_halves: bool = False) -> None:
    """Raise ConfigError for the first conflict of the config, of rules that compare halves or of all others."""
    for conflict in conflicts():
        if any(words == HALVES for _, words in conflict.values) is of_halves and conflict.applies(config):
            raise ConfigError(conflict.message(config))


def check_read(names: Collection[str], *, configs: Sequence[Config]) -> None:
    """Raise ConfigError for a setting among these, given by a user, that has an effect in none of the configs.

    It is that of a row whose first value is `TYPED`, or of single methods.
    """
    from atlas_fl.methods.registry import RULES

    for row in conflicts():
        (name, words), *others = row.values
        if words == TYPED and name in names and all(_matching(config, *one) for config in configs for one in others):
            raise ConfigError(row.message(configs[0]))
    of_methods = {"eta", "eta_decay", "layer_weighting", "within", *(one.name for one in fields(knobs_class()))}
    unread = of_methods.intersection(names)
    is_loaded = all(rule_of(config) in RULES for config in configs)  # a plug-in's method may not be yet
    if unread and is_loaded and (unread := unread.difference(*map(settings_read, configs))):
        strategies = dict.fromkeys(config.mixing.strategy for config in configs)
        raise ConfigError(
            f"{settings()[min(unread)].flag} does nothing with --strategy {', '.join(strategies)}; leave it out"
            f" (`atlas list strategies {next(iter(strategies))}` shows what has an effect)"
        )


def _meant(name: str) -> Sequence[str]:
    """The settings that a row names: one, or all of a group or with a mark."""
    mark = Mark.__members__.get(name[1:])
    known = settings().values()
    return [one.name for one in known if f"@{one.group}" == name or mark in one.marks] if name[0] == "@" else [name]


def _matching(config: Config, name: str, words: str) -> Sequence[str]:
    """The settings among them that have such a value."""
    return [one for one in _meant(name) if _has(config, one, words)]


def _value(config: Config, name: str) -> Any:
    return FACTS[name][1](config) if name in FACTS else value_of(config, name)


def _has(config: Config, name: str, words: str) -> bool:
    value = _value(config, name)
    if words in ("set", "chosen"):
        usual = [Config()] if words == "set" else [Config(), preset_of(config)]
        return all(value != value_of(one, name) for one in usual)
    if words in NAMED:
        return NAMED[words](value)
    order, _, bound = words.rpartition(" ")
    if order in ORDERS:
        number = _value(config, bound) if bound in (*FACTS, *settings()) else float(bound)
        return ORDERS[order](value, number)
    kind = str if name in FACTS else settings()[name].kind
    listed = [from_text(word, kind) for word in words.removeprefix("other than ").split(" or ")]
    return (value in listed) is not words.startswith("other than ")


def flag_of(name: str) -> str:
    """The flag of a setting, or of what decides a fact; words for several settings."""
    if name[0] == "@":
        return f"any setting of {name[1:].lower().removeprefix('of_').replace('_', ' ')}"
    return FACTS[name][0] if name in FACTS else settings()[name].flag


def _flag_words(config: Config, name: str) -> str:
    if name == "kinds":
        return ", ".join(f"{task} ({kind})" for task, kind in kinds_of(config).items())
    if name == "terms":
        return ", ".join(_value(config, name))
    if name in settings():
        return flag_words(settings()[name], value_of(config, name))
    value = config.mixing.strategy if flag_of(name) == "--strategy" else _value(config, name)
    return " ".join([flag_of(name), *to_words(value)])
