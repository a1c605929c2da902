"""RULES and METHODS: every method by name, those that aggregate and the published ones that are settings of these."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.errors import unknown_name
from atlas_fl.methods import (
    averages,
    ditto,
    fedalt,
    fedamp,
    feddpa,
    feddyn,
    fedex,
    fedpac,
    flora,
    hetlora,
    kriging,
    laplacian,
    mr_mtl,
    prior_correction,
    robust,
    scaffold,
    server_optimizers,
)
from atlas_fl.methods.apfl import APFL, Apfl
from atlas_fl.methods.cfl import Cfl
from atlas_fl.methods.fedtreelora import FedTreeLora
from atlas_fl.methods.frozen_part import FrozenCompanion
from atlas_fl.methods.ifca import Ifca
from atlas_fl.methods.method import Method, Part, PublishedMethod
from atlas_fl.methods.pfedgraph import PFedGraph
from atlas_fl.methods.second_model import SecondModel

PartT = TypeVar("PartT", bound=Part)

RULES: dict[str, type[Method]] = {
    method.name: method
    for method in (
        averages.Local,
        averages.FedAvg,
        hetlora.FedAvgByNorm,
        averages.FedAvgCluster,
        kriging.Atlas,
        laplacian.AtlasLaplacian,
        laplacian.AtlasNoLaplacian,
        robust.Median,
        robust.TrimmedMean,
        robust.Krum,
        robust.MultiKrum,
        robust.GeometricMedian,
        server_optimizers.FedAvgM,
        server_optimizers.FedAdagrad,
        server_optimizers.FedYogi,
        server_optimizers.FedAdam,
        PFedGraph,
        fedamp.FedAvgByDistance,
        fedalt.FedAvgOfOthers,
        feddyn.FedAvgDynamic,
        flora.FedAvgStacked,
        fedex.FedAvgWithResidual,
        Cfl,
        Ifca,
        FedTreeLora,
        fedpac.ClassifierCollaboration,
        kriging.Kriging,
    )
}
"""The methods that aggregate, by name: what `--strategy` takes, and what a published method is made of."""

METHODS: dict[str, PublishedMethod] = {
    "fedit": averages.FEDIT,
    "flexlora": averages.FLEXLORA,
    "hetlora": hetlora.HETLORA,
    "fedpac": fedpac.FEDPAC,
    "ffa": averages.FFA,
    "rolora": averages.ROLORA,
    "flora": flora.FLORA,
    "fedex": fedex.FEDEX,
    "fedsa": averages.FEDSA,
    "fedper": averages.FEDPER,
    "fedrep": averages.FEDREP,
    "fedbabu": averages.FEDBABU,
    "fedavg_ft": averages.FEDAVG_FT,
    "fedavg_cluster_ft": averages.FEDAVG_CLUSTER_FT,
    "fedlease": averages.FEDLEASE,
    "fedavg_oracle": averages.FEDAVG_ORACLE,
    "centralized": averages.CENTRALIZED,
    "multitask": averages.MULTITASK,
    "linear_probe": averages.LINEAR_PROBE,
    "hsplitlora": averages.HSPLITLORA,
    "ditto": ditto.DITTO,
    "apfl": APFL,
    "feddpa": feddpa.FEDDPA,
    "fedalt": fedalt.FEDALT,
    "fedalt_fixed": fedalt.FEDALT_FIXED,
    "mr_mtl": mr_mtl.MR_MTL,
    "mr_mtl_cluster": mr_mtl.MR_MTL_CLUSTER,
    "fedamp": fedamp.FEDAMP,
    "local_prior": prior_correction.LOCAL_PRIOR,
    "fedavg_prior": prior_correction.FEDAVG_PRIOR,
    "fedavg_cluster_prior": prior_correction.FEDAVG_CLUSTER_PRIOR,
    "scaffold": scaffold.SCAFFOLD,
    "feddyn": feddyn.FEDDYN,
    "fedprox": averages.FEDPROX,
    "atlas_pad": laplacian.ATLAS_PAD,
    "atlas_truncate": laplacian.ATLAS_TRUNCATE,
}
"""Every published method that is a rule with settings, by the name that `--strategy` takes."""

ALIASES: dict[str, str] = {"local_only": "local", "standard_fl": "fedavg"}
"""Names that earlier descriptions of these rules used."""

SECOND_MODELS: Mapping[str, type[SecondModel]] = {
    model.kind: model for model in (SecondModel, ditto.Ditto, Apfl, feddpa.FedDpa, FrozenCompanion)
}
"""Second models by kind, as `--second-model` says; `none` is a client's only one."""


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
        parts.append(make(mr_mtl.PersonalModels, values))
    elif options.second_model != "none":
        parts.append(make(SECOND_MODELS[options.second_model], values))
    if options.control_variates:
        parts.append(make(scaffold.ControlVariates, values))
    return tuple(parts)


def reporting(kind: str) -> type[Method]:
    """The method that asks for reports of this kind."""
    return next(method for method in RULES.values() if method.report == kind)
