"""Table of the settings that contradict each other, two a row: `atlas list conflicts` prints it.

A row has two settings with the values that do not go together, the reason and the remedy. In both sentences `{0}` and
`{1}` stand for the two flags with the values that they have, and `{candidates}` for the ranks that there are. `rule` is
the server's rule, which the strategy names or, if it is a published method, is made of.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from atlas_fl.config.methods import METHODS, rule_of
from atlas_fl.config.schema import AUTO, NONE, Config, SparseConfig, cuts_by_name
from atlas_fl.config.settings import settings, value_of
from atlas_fl.config.values import to_words
from atlas_fl.errors import ConfigError

RULE = "rule"


@dataclass(frozen=True)
class Values:
    """Set of values of a setting."""

    words: str
    contains: Callable[[Any, Any], bool]
    """Return true for a value in the set, given the default of the setting as well."""


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else " ".join(to_words(value))


def one_of(*values: Any) -> Values:
    """These values."""
    return Values(" or ".join(map(_words, values)), lambda value, _: value in values)


def other_than(*values: Any) -> Values:
    """All values but these."""
    return Values(f"other than {' or '.join(map(_words, values))}", lambda value, _: value not in values)


SET = Values("set", lambda value, default: value != default)
POSITIVE = Values("above 0", lambda value, _: value > 0)
ABOVE_ONE = Values("above 1", lambda value, _: value > 1)
BELOW_ONE = Values("below 1", lambda value, _: value < 1)
RANKS_BY_CLIENT = Values("not a number", lambda value, _: not value.isdecimal())
NO_CUT = Values("without a cut", lambda value, _: set(cuts_by_name(value).values()) == {NONE})
CHOSEN_CUT = Values("with auto", lambda value, _: AUTO in cuts_by_name(value).values())
ONE_FACTOR = Values("A without B, or B without A", lambda value, _: ("A" in value) != ("B" in value))
NOT_BOTH_FACTORS = Values("without A or B", lambda value, _: not {"A", "B"} <= set(value))
NOT_ALL_PARTS = Values("other than A B head", lambda value, _: set(value) != {"A", "B", "head"})
WITHOUT_HEAD = Values("without head", lambda value, _: "head" not in value)
NO_FACTORS = other_than("factors")
SEVERAL = other_than(None, 1)
LEAVE_ONE = "leave one of them out"


@dataclass(frozen=True)
class Conflict:
    """Two settings with the values that contradict each other."""

    name: str
    value: Values
    other: str
    other_value: Values
    reason: str
    remedy: str

    def applies(self, config: Config) -> bool:
        """Return true for a config with both values."""
        return _has(config, self.name, self.value) and _has(config, self.other, self.other_value)

    def message(self, config: Config) -> str:
        """One line with both values, the reason and the remedy."""
        flags = [_flag_words(config, self.name), _flag_words(config, self.other)]
        candidates = ", ".join(map(str, config.ranks.candidates))
        remedy = self.remedy
        strategy = config.mixing.strategy
        if remedy == LEAVE_ONE and strategy in METHODS and self.name in METHODS[strategy].settings:
            remedy = f"leave {{1}} out, or take another strategy than {strategy}, which sets {flags[0].split()[0]}"
        return f"{self.reason}; {remedy}".format(*flags, candidates=candidates)


def check_conflicts(config: Config, conflicts: tuple[Conflict, ...]) -> None:
    """Raise ConfigError for the first of the conflicts that the config has."""
    for conflict in conflicts:
        if conflict.applies(config):
            raise ConfigError(conflict.message(config))


def _has(config: Config, name: str, values: Values) -> bool:
    if name == RULE:
        return values.contains(rule_of(config), None)
    return values.contains(value_of(config, name), value_of(Config(), name))


def flag_of(name: str) -> str:
    """The flag of a setting, or of the rule."""
    return "--strategy" if name == RULE else settings()[name].flag


def _flag_words(config: Config, name: str) -> str:
    if name == RULE:
        return f"--strategy {config.mixing.strategy}"
    value = value_of(config, name)
    if isinstance(value, bool):
        return settings()[name].flag.replace("--", "--" if value else "--no-", 1)
    return f"{settings()[name].flag} {_words(value)}"


ON = one_of(True)
CUT = ("split", SET)
RERANK = ("rerank", ON)
ARRIVE = ("arrive", SET)
WHOLE = ("trainable", one_of("full"))
PERSONAL = ("personal_models", ON)
SECOND = ("second_model", SET)
CARRIES = ("carry_momentum", ON)
RARE = ("aggregate_every", ABOVE_ONE)
Part = tuple[str, Values]


def _apart(
    part: Part, others: tuple[Part, ...], *, reason: str = "{0} and {1} do not go together", remedy: str = LEAVE_ONE
) -> Iterator[Conflict]:
    """Rows of one setting that goes with none of several others."""
    return (Conflict(*part, *other, reason, remedy) for other in others)


def _plain_only(name: str, value: Values) -> Iterator[Conflict]:
    """Rows of a setting that needs adapters, whole models, all clients from the first round on, and one process."""
    yield from _apart(
        (name, value),
        (WHOLE, CUT, RERANK, ("keep", one_of("best")), ARRIVE, CARRIES),
        reason="{0} and {1} do not go together so far",
    )
    yield from _apart(
        (name, value),
        (("engine", SET), ("workers", SEVERAL)),
        reason="{0} has a second set of tensors beside the model, which no message of --workers or --engine ray holds"
        " yet",
    )


CONFLICTS = (
    Conflict(
        *("own_share", SET, "one_task", one_of(False)),
        "{0} mixes the sources of one task",
        "set --one-task, or leave --own-share out",
    ),
    Conflict(
        *("own_share", SET, "test_mix", one_of("balanced")),
        "{0} exchanges rows of any class, and {1} would not stay so",
        "take --test-mix task, or --own-share 1",
    ),
    *_apart(
        ("client_sizes", SET),
        (("partition", one_of("quantity")), ("nc", SET)),
        reason="--client-sizes and {1} both say how much a client has",
    ),
    Conflict(*("arrive", SET, "centralized", ON), "{0} comes later, and --centralized has no clients", "leave one out"),
    *_apart(
        ARRIVE,
        (("client_sizes", SET), ("one_task", ON)),
        reason="{0} comes later, and {1} is of clients who are there from the start",
    ),
    Conflict(
        *("server_adapters", SET, "split", NO_CUT),
        "{0} is about the parts above cuts, and {1} cuts none",
        "choose cuts, such as --split auto, or leave --server-adapters out",
    ),
    Conflict(
        *("topology", SET, "split", NO_CUT),
        "{0} says who computes the upper parts of cut models, and {1} cuts none",
        "choose cuts, such as --split auto, or leave --topology out",
    ),
    Conflict(
        *("leakage", ON, "split", NO_CUT),
        "{0} tells what the cuts give away, and {1} makes none",
        "choose cuts, or see `atlas leakage` for every one that there could be",
    ),
    Conflict(
        *("share", ONE_FACTOR, "space", one_of("product")),
        "{0} leaves out one factor of the update s B A, which {1} mixes as a whole",
        "share both A and B, or choose --space factors",
    ),
    Conflict(
        *("rerank", ON, "recluster_every", one_of(0)),
        "{0} chooses ranks again when clients are clustered again, and --recluster-every is 0",
        "set it to 1 or more, or leave --rerank out",
    ),
    Conflict(
        *("rerank", ON, "split", CHOSEN_CUT),
        "{0} may move the cut that {1} chooses, and cuts stay where they are",
        "give the number of blocks that `atlas plan` shows, or leave --rerank out",
    ),
    Conflict(
        "patience", SET, "personal_rounds", SET, "{0} ends a run before its last rounds, which {1} are", LEAVE_ONE
    ),
    Conflict(
        *("min_delta", SET, "patience", one_of(0)),
        "{0} says what is better for --patience, which is 0",
        "set --patience to a number of rounds, or leave --min-delta out",
    ),
    Conflict(
        *("prior_correction", ON, "split", SET),
        "{0} needs the labels where the logits are, and {1} parts them",
        LEAVE_ONE,
    ),
    Conflict(
        *("trained_parts", one_of("B", "alternate"), "trainable", one_of("full")),
        "{0} is of adapters, and {1} has none",
        "leave it out",
    ),
    Conflict(
        *("trained_parts", other_than("all", "B"), "split", SET),
        "{0} changes what trains during a run, and a cut model ({1}) trains the same parts in every step",
        LEAVE_ONE,
    ),
    *_apart(
        PERSONAL,
        (("space", NO_FACTORS), ("ranks", RANKS_BY_CLIENT), ("share", NOT_ALL_PARTS)),
        reason="{0} pulls A and B to those of the others, which needs --space factors, --share A B head and one rank"
        " for all",
        remedy="set these, and --ranks to one of {candidates}",
    ),
    *_plain_only(*PERSONAL),
    *_apart(
        ("control_variates", ON),
        (("space", NO_FACTORS), ("ranks", RANKS_BY_CLIENT)),
        reason="{0} averages gradients of A and B, which needs --space factors and one rank for all",
        remedy="set both, --ranks to one of {candidates}",
    ),
    Conflict(
        *("control_variates", ON, "personal_models", ON),
        "{0} is for one shared model, and {1} has none",
        "leave one out",
    ),
    Conflict(
        *("control_variates", ON, RULE, other_than("fedavg")),
        "{0} corrects by the gradients of all, and {1} mixes otherwise",
        "take --strategy scaffold, or leave it out",
    ),
    Conflict(
        *("control_variates", ON, "share", NOT_ALL_PARTS),
        "{0} corrects by the gradients of all, and {1} keeps some parameters to each client",
        "share A B head, or leave it out",
    ),
    *_plain_only("control_variates", ON),
    *_apart(
        (RULE, one_of("fedavg_dynamic")),
        (("space", NO_FACTORS), ("ranks", RANKS_BY_CLIENT)),
        reason="{0} sums changes of A and B, which needs --space factors and one rank for all",
        remedy="set both, --ranks to one of {candidates}",
    ),
    Conflict(
        *(RULE, one_of("fedavg_dynamic"), "proximal_mu", one_of(0)),
        "--proximal-mu is 0; allowed: above 0 with {0}, whose alpha it is",
        "set it to that, or take another strategy",
    ),
    *_apart((RULE, one_of("fedavg_dynamic")), (PERSONAL, RARE, SECOND)),
    *_plain_only(RULE, one_of("fedavg_dynamic")),
    *_apart(
        (RULE, one_of("fedavg_stacked", "fedavg_with_residual")),
        (("share", NOT_BOTH_FACTORS), ("space", NO_FACTORS)),
        reason="{0} takes products apart into factors, which needs --space factors and --share with A and B",
        remedy="set both, or take flexlora",
    ),
    Conflict(
        *(RULE, one_of("fedavg_with_residual"), "ranks", RANKS_BY_CLIENT),
        "{0} averages factors of one rank, and {1} may give clients different ones",
        "set --ranks to one of {candidates}, or take flora",
    ),
    *_apart(
        (RULE, one_of("fedavg_stacked", "fedavg_with_residual")),
        (PERSONAL, SECOND, ("trained_parts", one_of("alternate"))),
    ),
    *_plain_only(RULE, one_of("fedavg_stacked", "fedavg_with_residual")),
    Conflict(
        *("second_gate", SET, "second_model", other_than("stacked")),
        "{0} weighs two adapters in one layer, and there is {1}",
        "set it to stacked, or leave --second-gate out",
    ),
    *_apart(
        ("second_model", one_of("proximal", "interpolated")),
        (("space", NO_FACTORS), ("ranks", RANKS_BY_CLIENT)),
        reason="{0} compares A and B with those of the shared model, which needs --space factors and one rank for all",
        remedy="set both, --ranks to one of {candidates}",
    ),
    Conflict(
        *("second_weight", ABOVE_ONE, "second_model", one_of("interpolated", "stacked")),
        "{0} is a share with {1}; allowed: at most 1",
        "set it to that, or leave it out",
    ),
    Conflict(
        *("personal_models", ON, "second_model", one_of("proximal", "interpolated")),
        "{0} has one model a client, and {1} a second",
        "take stacked, or leave one of them out",
    ),
    *_apart(
        SECOND,
        (("share", NOT_BOTH_FACTORS), (RULE, one_of("local"))),
        reason="{0} stands beside a shared model, and --strategy local and --share without A or B have none",
    ),
    *_plain_only(*SECOND),
    *_apart(
        (RULE, one_of("ifca")),
        (("ranks", RANKS_BY_CLIENT), ("share", NOT_ALL_PARTS)),
        reason="{0} lets a client take the model of others, which needs one rank for all and --share A B head",
        remedy="set both, --ranks to one of {candidates}",
    ),
    *_apart(
        (RULE, one_of("ifca")),
        (WHOLE, CUT, RERANK, ARRIVE, PERSONAL, RARE),
        reason="{0} and {1} do not go together so far",
    ),
    *_apart(
        ("multitask", ON),
        (("centralized", one_of(False)), (RULE, other_than("local"))),
        reason="{0} trains one adapter on the examples of all clients in one place",
        remedy="take --strategy multitask, or leave --multitask out",
    ),
    Conflict(
        *("multitask", ON, "ranks", RANKS_BY_CLIENT),
        "{0} trains one adapter, and {1} may give tasks different ranks",
        "set --ranks to one of {candidates}",
    ),
    *_apart(("multitask", ON), (WHOLE, ("trained_parts", SET), CUT, RERANK, CARRIES, PERSONAL)),
    Conflict(
        *("server_adapters", SET, "topology", SET),
        "{0} moves one set by all of a cluster at once, and {1} puts its clients on several hosts",
        LEAVE_ONE,
    ),
    Conflict(
        *("server_adapters", SET, "recluster_every", POSITIVE),
        "{0} belong to a cluster, and {1} may change who that is",
        "set it to 0, or take per_client",
    ),
    Conflict(
        *("server_adapters", SET, "arrive", SET),
        "{0} belong to those who were there when the plan was made, and {1} comes later",
        LEAVE_ONE,
    ),
    Conflict(
        *("nc", SET, "partition", SET),
        "{0} and {1} are two ways to deal out classes",
        LEAVE_ONE,
    ),
    *(
        Conflict(
            field.name, SET, "mask_file", SET, "{0} says how a mask is made, and --mask-file brings one", LEAVE_ONE
        )
        for field in fields(SparseConfig)
        if field.name != "mask_file"
    ),
    *(
        Conflict(
            *(name, SET, "head_first", one_of("none")),
            "{0} freezes the head, and with {1} that is a random one",
            f"leave --head-first at ridge, or {flag} out",
        )
        for name, flag in (("mask", "--mask"), ("mask_file", "--mask-file"))
    ),
    *(
        Conflict(
            *(name, SET, "share", one_of(("head",))),
            "a mask freezes the head, and {1} shares nothing else",
            "share A B head, or no mask",
        )
        for name in ("mask", "mask_file")
    ),
    Conflict(
        *("carry_momentum", ON, "momentum", one_of(0)),
        "{0} has nothing to carry with --momentum 0",
        "set it, or leave the other out",
    ),
    Conflict(
        *("carry_momentum", ON, "participation", BELOW_ONE),
        "{0} keeps what a client did in the round before, and with {1} that is mostly an older one",
        "take --participation 1, or leave --carry-momentum out",
    ),
    *_apart(
        CARRIES,
        (("engine", SET), ("workers", SEVERAL)),
        reason="{0} keeps what clients did in one process, and --workers and --engine ray have several",
    ),
    *(
        Conflict(
            *(name, SET, "attack", one_of("none")),
            "--attackers and --attack-scale say who attacks and how, and --attack is none",
            "choose one",
        )
        for name in ("attackers", "attack_scale")
    ),
    Conflict(
        *("attack", SET, "attackers", one_of(())),
        "{0} needs --attackers: clients by name, or how many",
        "set it, or leave --attack out",
    ),
    Conflict(*("attack", SET, "arrive", SET), "{0} is of those who are there from the start", "leave {1} out"),
    Conflict(
        *("attack", SET, "server_adapters", SET),
        "{0} alters what a client sends, and {1} are the server's",
        "take per_client",
    ),
    Conflict(
        *("feature_alignment", SET, RULE, other_than("classifier_collaboration")),
        "--feature-alignment pulls to class means that {1} does not gather",
        "take fedpac or classifier_collaboration, or leave it out",
    ),
    Conflict(
        *(RULE, one_of("classifier_collaboration"), "share", WITHOUT_HEAD),
        "{0} combines heads, and {1} keeps them at the clients",
        "add head, or take fedper",
    ),
    *_apart(
        (RULE, one_of("classifier_collaboration")),
        (CUT, PERSONAL, ("control_variates", ON), SECOND),
        reason="{0} and {1} do not go together so far",
    ),
)
"""In the order in which they are looked for."""

_HALVES = (RULE, one_of("atlas", "kriging"))
CONFLICTS_OF_HALVES = (
    Conflict(
        *(*_HALVES, "share", NOT_ALL_PARTS),
        "{0} compares all that clients train, and {1} leaves a part of it out",
        "take --share A B head, or --strategy atlas_laplacian",
    ),
    *_apart(
        _HALVES,
        (PERSONAL, SECOND, WHOLE, RERANK, ("server_adapters", SET), CARRIES),
        reason="{0} compares what clients train on either half of their examples, and {1} does not go with that so far",
        remedy="leave it out, or take --strategy atlas_laplacian",
    ),
)
"""Looked for after the names, so that who takes the default strategy reads first what else is wrong."""
