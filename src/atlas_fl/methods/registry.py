"""RULES and METHODS: every method by name, those that aggregate and the published ones that are settings of these.

A module of this package that defines a `Method` with a name is listed by that. Published methods, which are a rule with
settings, are rows of `published.toml`.
"""

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar

from atlas_fl import methods
from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.errors import unknown_name
from atlas_fl.methods.fedalt import PersonalAdapters
from atlas_fl.methods.method import Method, Part, PublishedMethod
from atlas_fl.methods.mr_mtl import PersonalModels
from atlas_fl.methods.scaffold import ControlVariates
from atlas_fl.methods.second_model import SecondModel
from atlas_fl.methods.shrinkage import ShrunkModels
from atlas_fl.packaged import packaged_tables

PartT = TypeVar("PartT", bound=Part)

MODULES = [
    import_module(f"{methods.__name__}.{one.name}") for one in iter_modules(methods.__path__) if one.name != "registry"
]
"""All modules of this package but this one."""


def _classes(base: type[PartT], named_by: str) -> dict[str, type[PartT]]:
    """The classes of the modules that have a name of their own, by it."""
    values = [value for module in MODULES for value in vars(module).values()]
    classes = [one for one in values if isinstance(one, type) and issubclass(one, base)]
    return {vars(one)[named_by]: one for one in classes if vars(one).get(named_by)}


RULES: dict[str, type[Method]] = _classes(Method, "name")
"""The methods that aggregate, by name: what `--strategy` takes, and what a published method is made of."""

_PUBLISHED = packaged_tables(__package__, "published.toml")
METHODS: dict[str, PublishedMethod] = {name: PublishedMethod(**row) for name, row in _PUBLISHED.items()}
"""Every published method that is a rule with settings, by the name that `--strategy` takes."""

ALIASES: dict[str, str] = {"local_only": "local", "standard_fl": "fedavg"}
"""Names that earlier descriptions of these rules used."""

SECOND_MODELS: Mapping[str, type[SecondModel]] = _classes(SecondModel, "kind")
"""Second models by kind, as `--second-model` says; `none` is a client's only one."""


PERSONAL_MODELS: Mapping[str, type[SecondModel]] = {
    "none": PersonalModels,
    "stacked": PersonalAdapters,
    "shrunk": ShrunkModels,
}
"""Models of one's own by the same kinds, where they are what is mixed (`--personal-models`)."""


def published(name: str) -> PublishedMethod:
    """The published method of this name; a rule without settings of its own, where there is none."""
    rule = RULES.get(name, Method)
    plain = PublishedMethod(summary=(rule.__doc__ or "").strip().partition("\n")[0], rule=name, differs=rule.differs)
    return METHODS.get(name, plain)


def rule_class(name: str) -> type[Method]:
    """The method of this name or alias that aggregates; raises ConfigError for an unknown name."""
    canonical = ALIASES.get(name, name)
    if canonical not in RULES:
        raise unknown_name("strategy", name, [*RULES, *METHODS, *ALIASES])
    return RULES[canonical]


def make(part: type[PartT], values: Mapping[str, Any]) -> PartT:
    """A part with these values of settings, of which it takes those that it has an effect of."""
    own = {one.name for one in fields(part)}
    common = {one.name for one in fields(StrategyOptions)}
    options = StrategyOptions(**{name: value for name, value in values.items() if name in common})
    return part(options, **{name: value for name, value in values.items() if name in own})


def find_method(name: str, **values: Any) -> Method:
    """The method with these values of settings; raises ConfigError for an unknown name."""
    return make(rule_class(name), values)


def parts_of(method: Method, values: Mapping[str, Any]) -> tuple[Part, ...]:
    """All that acts in a run: the method, and the parts that its settings switch on."""
    options = method.options
    parts: list[Part] = [method]
    if options.personal_models:
        parts.append(make(PERSONAL_MODELS[options.second_model], values))
    elif options.second_model != "none":
        parts.append(make(SECOND_MODELS[options.second_model], values))
    if options.control_variates:
        parts.append(make(ControlVariates, values))
    return tuple(parts)


def reporting(kind: str) -> type[Method]:
    """The method that asks for reports of this kind."""
    return next(method for method in RULES.values() if method.report == kind)
