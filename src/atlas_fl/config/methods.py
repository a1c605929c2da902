"""METHODS: strategies of the literature as data: a rule of the server, and the settings that make it that method.

FedIT, FFA-LoRA, FedSA-LoRA, RoLoRA, FlexLoRA, FedPer, FedRep, FedBABU, FedAvg with fine-tuning, FedProx and others
differ in four choices: who is averaged with whom (`rule`), what is shared (`share`), where it is mixed (`space`,
`align`), and what a client trains (`trained_parts`, `personal_rounds`, `proximal_mu`). `with_method_settings` writes
the settings of a method into the config, so that the files of a run say all of them.
"""

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from atlas_fl.config.schema import Config
from atlas_fl.config.settings import replace_settings, settings, value_of
from atlas_fl.config.values import to_words
from atlas_fl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PublishedMethod:
    """One method of the literature."""

    summary: str
    """What it does, and its paper."""
    rule: str
    """The server's rule, a name of `aggregation.registry.STRATEGIES`."""
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """What makes it this method: settings by name, which no other value may contradict."""
    suggested: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Values of its own knobs, in the place of the defaults that switch it off."""
    equal_ranks: bool = False
    """Whether every client must have the same rank in every layer."""

    @property
    def relative_bytes(self) -> float:
        """Bytes of a round relative to FedAvg of the same adapters: half for each factor; corrections are as large.

        What does not train in a round is not sent.
        """
        if self.rule == "local":
            return 0.0
        share = self.settings.get("share", ("A", "B"))
        is_dynamic = self.rule == "fedavg_dynamic"  # one correction down, and no control up
        if self.settings.get("trained_parts") == "alternate":
            return 0.5
        copies = 1.5 if is_dynamic else 2 if self.settings.get("control_variates") else 1
        return copies * 0.5 * (("A" in share) + ("B" in share))

    @property
    def trains_twice(self) -> bool:
        """Whether a client trains a model of its own beside the shared one."""
        return "second_model" in self.settings and not self.settings.get("personal_models")


METHODS: Mapping[str, PublishedMethod] = {
    "fedit": PublishedMethod(
        summary="FedIT: A and B averaged apart (Zhang et al. 2024, arXiv:2305.05644).",
        rule="fedavg",
        settings={"space": "factors", "share": ("A", "B", "head")},
        equal_ranks=True,
    ),
    "flexlora": PublishedMethod(
        summary="FlexLoRA: the products B A averaged, each client's ranks by SVD (Bai et al. 2024, arXiv:2402.11505).",
        rule="fedavg",
        settings={"space": "product", "share": ("A", "B", "head")},
    ),
    "hetlora": PublishedMethod(
        summary="HetLoRA: padded A and B averaged by the norms of s B A (Cho et al. 2024, arXiv:2401.06432).",
        rule="fedavg_by_norm",
        settings={"space": "factors", "align": "pad", "share": ("A", "B", "head")},
    ),
    "fedpac": PublishedMethod(
        summary="FedPAC: heads combined by class means of features, to which these are pulled (arXiv:2306.11867).",
        rule="classifier_collaboration",
        settings={"share": ("A", "B", "head"), "trained_parts": "head_then_rest"},
        suggested={"feature_alignment": 1.0},
    ),
    "ffa": PublishedMethod(
        summary="FFA-LoRA: A frozen as drawn, B trained and averaged (Sun et al. 2024, arXiv:2403.12313).",
        rule="fedavg",
        settings={"space": "factors", "share": ("B", "head"), "trained_parts": "B"},
        equal_ranks=True,
    ),
    "rolora": PublishedMethod(
        summary="RoLoRA: B in odd rounds, A in even ones (Chen et al. 2025, arXiv:2502.01755).",
        rule="fedavg",
        settings={"space": "factors", "share": ("A", "B", "head"), "trained_parts": "alternate"},
        equal_ranks=True,
    ),
    "flora": PublishedMethod(
        summary="FLoRA: all products join a frozen part, adapters begin again (Wang et al. 2024, arXiv:2409.05976).",
        rule="fedavg_stacked",
        settings={"space": "factors", "share": ("A", "B", "head")},
    ),
    "fedex": PublishedMethod(
        summary="FedEx-LoRA: averaged factors, and a frozen rest that makes it exact (arXiv:2410.09432).",
        rule="fedavg_with_residual",
        settings={"space": "factors", "share": ("A", "B", "head")},
        equal_ranks=True,
    ),
    "fedsa": PublishedMethod(
        summary="FedSA-LoRA: A averaged; B and head stay (Guo et al. 2025, arXiv:2410.01463).",
        rule="fedavg",
        settings={"space": "factors", "share": ("A",)},
        equal_ranks=True,
    ),
    "fedper": PublishedMethod(
        summary="FedPer: all but the head averaged (Arivazhagan et al. 2019, arXiv:1912.00818).",
        rule="fedavg",
        settings={"share": ("A", "B")},
    ),
    "fedrep": PublishedMethod(
        summary="FedRep: FedPer whose clients train the head, then the rest (Collins et al. 2021, arXiv:2102.07078).",
        rule="fedavg",
        settings={"share": ("A", "B"), "trained_parts": "head_then_rest"},
    ),
    "fedbabu": PublishedMethod(
        summary="FedBABU: the head as drawn until the last rounds, which fine-tune (Oh et al. 2022, arXiv:2106.06042).",
        rule="fedavg",
        settings={"share": ("A", "B"), "trained_parts": "without_head"},
        suggested={"personal_rounds": 2},
    ),
    "fedavg_ft": PublishedMethod(
        summary="FedAvg, then rounds of local fine-tuning (Wang et al. 2019, arXiv:1910.10252).",
        rule="fedavg",
        suggested={"personal_rounds": 2},
    ),
    "fedavg_cluster_ft": PublishedMethod(
        summary="Clustered FedAvg, then rounds of local fine-tuning.",
        rule="fedavg_cluster",
        suggested={"personal_rounds": 2},
    ),
    "fedlease": PublishedMethod(
        summary="FedLEASE's clusters: cosines of B after a warm-up, k by silhouette (arXiv:2509.15087); no router.",
        rule="fedavg_cluster",
        settings={"fingerprint": "delta", "cluster_by": "silhouette"},
    ),
    "fedavg_oracle": PublishedMethod(
        summary="FedAvg inside the true tasks, which nobody knows in practice: a reference.",
        rule="fedavg_cluster",
        settings={"clusters": "oracle"},
    ),
    "centralized": PublishedMethod(
        summary="One model a task, trained on the examples of all its clients in one place: a reference.",
        rule="local",
        settings={"centralized": True},
    ),
    "multitask": PublishedMethod(
        summary="One adapter for all tasks and a head for each, trained in one place (Caruana 1997): a reference.",
        rule="local",
        settings={"centralized": True, "multitask": True},
        equal_ranks=True,
    ),
    "linear_probe": PublishedMethod(
        summary="Each client trains its head alone on the frozen model, and sends nothing: a reference.",
        rule="local",
        settings={"trained_parts": "head"},
    ),
    "hsplitlora": PublishedMethod(
        summary="HSplitLoRA: ranks by |weight x gradient|, cuts by device (Lin et al. 2025, arXiv:2505.02795).",
        rule="fedavg",
        settings={"space": "product", "ranks": "budget", "importance": "rngwp", "split": "auto"},
    ),
    "ditto": PublishedMethod(
        summary="Ditto: FedAvg, and own models pulled to it (Li et al. 2021, arXiv:2012.04221).",
        rule="fedavg",
        settings={"second_model": "proximal", "space": "factors", "share": ("A", "B", "head")},
        equal_ranks=True,
    ),
    "apfl": PublishedMethod(
        summary="APFL: FedAvg, and own models interpolated with it (Deng et al. 2020, arXiv:2003.13461).",
        rule="fedavg",
        settings={"second_model": "interpolated", "space": "factors", "share": ("A", "B", "head")},
        equal_ranks=True,
    ),
    "feddpa": PublishedMethod(
        summary="FedDPA: a shared adapter and one's own, stacked (Yang et al. 2024, arXiv:2403.19211).",
        rule="fedavg",
        settings={"second_model": "stacked"},
    ),
    "fedalt": PublishedMethod(
        summary="FedALT: an own adapter on the frozen mean of the others, weighed by a gate (arXiv:2503.11880).",
        rule="fedavg_of_others",
        settings={
            "personal_models": True,
            "second_model": "stacked",
            "second_gate": "input",
            "space": "factors",
            "share": ("A", "B", "head"),
        },
        equal_ranks=True,
    ),
    "fedalt_fixed": PublishedMethod(
        summary="FedALT without its gate: --second-weight is the weight of every token.",
        rule="fedavg_of_others",
        settings={
            "personal_models": True,
            "second_model": "stacked",
            "second_gate": "none",
            "space": "factors",
            "share": ("A", "B", "head"),
        },
        equal_ranks=True,
    ),
    "mr_mtl": PublishedMethod(
        summary="MR-MTL: own models, pulled to their mean (Liu et al. 2022, arXiv:2206.07902; Evgeniou & Pontil 2004).",
        rule="fedavg",
        settings={"personal_models": True, "space": "factors", "share": ("A", "B", "head")},
        suggested={"proximal_mu": 0.1},
        equal_ranks=True,
    ),
    "mr_mtl_cluster": PublishedMethod(
        summary="MR-MTL inside clusters: own models, pulled to the mean of their cluster.",
        rule="fedavg_cluster",
        settings={"personal_models": True, "space": "factors", "share": ("A", "B", "head")},
        suggested={"proximal_mu": 0.1},
        equal_ranks=True,
    ),
    "fedamp": PublishedMethod(
        summary="FedAMP: own models, pulled to a mixture in which the nearest count most (arXiv:2007.03797).",
        rule="fedavg_by_distance",
        settings={"personal_models": True, "space": "factors", "share": ("A", "B", "head")},
        suggested={"proximal_mu": 0.1},
        equal_ranks=True,
    ),
    "local_prior": PublishedMethod(
        summary="Local training with each client's own class frequencies in its logits, and nothing sent: a reference.",
        rule="local",
        settings={"prior_correction": True},
    ),
    "fedavg_prior": PublishedMethod(
        summary="FedAvg with each client's own class frequencies in its logits (Menon et al. 2021, arXiv:2007.07314).",
        rule="fedavg",
        settings={"prior_correction": True},
    ),
    "fedavg_cluster_prior": PublishedMethod(
        summary="Clustered FedAvg with each client's own class frequencies in its logits.",
        rule="fedavg_cluster",
        settings={"prior_correction": True},
    ),
    "scaffold": PublishedMethod(
        summary="SCAFFOLD: gradients corrected by the mean of all (Karimireddy et al. 2020, arXiv:1910.06378).",
        rule="fedavg",
        settings={"control_variates": True, "space": "factors", "share": ("A", "B", "head")},
        equal_ranks=True,
    ),
    "feddyn": PublishedMethod(
        summary="FedDyn: clients held and corrected by their own changes (Acar et al. 2021, arXiv:2111.04263).",
        rule="fedavg_dynamic",
        settings={"space": "factors", "share": ("A", "B", "head")},
        suggested={"proximal_mu": 0.1},
        equal_ranks=True,
    ),
    "fedprox": PublishedMethod(
        summary="FedProx: FedAvg of clients held near their start (Li et al. 2020, arXiv:1812.06127).",
        rule="fedavg",
        suggested={"proximal_mu": 0.01},
    ),
    "atlas_pad": PublishedMethod(
        summary="ATLAS as first described: the Laplacian on A and B apart, ranks padded with zeros.",
        rule="atlas_laplacian",
        settings={"space": "factors", "align": "pad"},
    ),
    "atlas_truncate": PublishedMethod(
        summary="ATLAS as first described: the Laplacian on A and B apart, only the ranks that all have.",
        rule="atlas_laplacian",
        settings={"space": "factors", "align": "truncate"},
    ),
}
"""Every method by the name that `--strategy` takes."""


def rule_of(config: Config) -> str:
    """The server's rule of this config: that of its method, or what `--strategy` says."""
    name = config.mixing.strategy
    return METHODS[name].rule if name in METHODS else name


def measures_halves(config: Config) -> bool:
    """Whether clients report models of either half of their examples (`client.split_halves`)."""
    return rule_of(config) in ("atlas", "kriging")


def first_measured_round(config: Config) -> int:
    """The round in which halves are first measured: `--measure-round`, or after a third of a run that is shorter."""
    last = max(1, config.training.rounds - config.mixing.personal_rounds)
    return config.server.measure_round if config.server.measure_round <= last else math.ceil(last / 3)


def has_frozen_part(config: Config) -> bool:
    """Whether everyone holds a frozen part beside its adapter (`aggregation.exact_average`)."""
    return rule_of(config) in ("fedavg_stacked", "fedavg_with_residual")


def reads_features(config: Config) -> bool:
    """Whether clients report class features (`client.class_features`) with their updates."""
    return rule_of(config) == "classifier_collaboration"


def with_method_settings(config: Config) -> Config:
    """The config with all settings of its method; the very same where `--strategy` is a rule or nothing is missing.

    Raises:
        ConfigError: a setting has another value than the method's, and that value is not the default.
    """
    if config.mixing.strategy not in METHODS:
        return config
    method, defaults = METHODS[config.mixing.strategy], Config()
    for name, value in method.settings.items():
        if value_of(config, name) not in (value, value_of(defaults, name)):
            raise _contradiction(config, name, value)
    suggested = {
        name: value for name, value in method.suggested.items() if value_of(config, name) == value_of(defaults, name)
    }
    missing = {
        name: value for name, value in {**method.settings, **suggested}.items() if value_of(config, name) != value
    }
    return replace_settings(missing, base=config) if missing else config


OF_LAPLACIAN = frozenset({"--eta", "--eta-decay", "--laplacian", "--layer-weighting"})
"""Flags that have a meaning under the Laplacian alone."""


def check_typed_settings(config: Config, flags: AbstractSet[str]) -> None:
    """Nothing where none of the flags that a user typed says another value than the method; raises `ConfigError` else.

    A typed value that is the default can be told from one that nobody chose here alone.
    """
    strategy = config.mixing.strategy
    if measures_halves(config) and (of_laplacian := sorted(flags & OF_LAPLACIAN)):
        raise ConfigError(
            f"{of_laplacian[0]} is a setting of the Laplacian, and --strategy {strategy} measures how much is shared;"
            " leave it out, or take the strategy atlas_laplacian"
        )
    if strategy == "atlas" and "--within" in flags:
        raise ConfigError(
            "--within says whether kriging asks clusters what to average, and --strategy atlas does;"
            " leave it out, or take --strategy kriging"
        )
    if strategy not in METHODS:
        return
    method, defaults = METHODS[strategy], Config()
    for name, value in method.settings.items():
        if settings()[name].flag in flags and value_of(config, name) != value:
            raise _contradiction(config, name, value)
    for name in method.suggested:
        if settings()[name].flag in flags and value_of(config, name) == value_of(defaults, name):
            raise _switched_off(config, name)


def check_swept_setting(config: Config, name: str) -> None:
    """Nothing where a sweep may give this setting the value that it has here; raises `ConfigError` else."""
    check_typed_settings(config, {settings()[name].flag})


def without_method_settings(config: Config) -> Config:
    """The config with the settings of its method at their defaults, as the base of runs of other strategies."""
    if config.mixing.strategy not in METHODS:
        return config
    method, defaults = METHODS[config.mixing.strategy], Config()
    return replace_settings({name: value_of(defaults, name) for name in method.settings}, base=config)


def check_equal_ranks(config: Config) -> None:
    """Nothing where the ranks are as equal as the method needs; raises `ConfigError` else."""
    name, ranks = config.mixing.strategy, config.ranks.ranks
    if name in METHODS and METHODS[name].equal_ranks and not ranks.isdecimal():
        raise ConfigError(
            f"--strategy {name} averages factors of one rank, and --ranks {ranks} may give clients different ones;"
            f" set --ranks to one of {', '.join(map(str, config.ranks.candidates))}, or take flexlora"
        )


def _contradiction(config: Config, name: str, value: Any) -> ConfigError:
    # the preset may have set the other value: leaving the flag out would not do
    flag, actual = settings()[name].flag, value_of(config, name)
    needed = _flag_words(flag, value)
    return ConfigError(
        f"{flag} is {_words(actual)}, and --strategy {config.mixing.strategy} is {needed}; set {needed}, or take"
        " another strategy"
    )


def _switched_off(config: Config, name: str) -> ConfigError:
    flag, strategy = settings()[name].flag, config.mixing.strategy
    return ConfigError(
        f"{flag} {_words(value_of(config, name))} switches off what --strategy {strategy} adds to"
        f" {METHODS[strategy].rule}; take --strategy {METHODS[strategy].rule}, or another value"
    )


def _words(value: Any) -> str:
    return " ".join(to_words(value))


def _flag_words(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return f"{flag} {_words(value)}"
