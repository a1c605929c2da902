"""Validation of a config: ranges of numbers, contradictions between settings; no data is read.

`RANGES` has the range of every number. The other checks find contradictions between settings, and names that no
registry has. Registries are imported inside the checks, because importing them takes seconds.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from atlas_fl.config.federations import check_turned
from atlas_fl.config.methods import METHODS, check_equal_ranks, rule_of, with_method_settings
from atlas_fl.config.schema import (
    ALL_CLASSES,
    AUTO,
    NONE,
    WILDCARD,
    ClusteringConfig,
    Config,
    DataConfig,
    MixingConfig,
    RanksConfig,
    RunConfig,
    SplitConfig,
    cuts_by_name,
    parse_arrivals,
)
from atlas_fl.config.settings import settings, value_of
from atlas_fl.config.training_checks import (
    check_class_features,
    check_cluster_choice,
    check_control_variates,
    check_dynamic_regularization,
    check_frozen_part,
    check_image_settings,
    check_kind,
    check_multitask,
    check_personal_models,
    check_precision,
    check_second_model,
    check_split_halves,
)
from atlas_fl.config.values import LARGEST, convert_value, invalid_value, parse_integer, wrong_kind
from atlas_fl.errors import ConfigError, unknown_name
from atlas_fl.plugins import load_plugins


@dataclass(frozen=True)
class AllowedRange:
    """Which numbers are allowed."""

    description: str
    """For the message."""
    contains: Callable[[float], bool]
    """Whether a number is one of them; false for NaN."""


ANY_NUMBER = AllowedRange("a number", lambda value: value == value)
ZERO_OR_MORE = AllowedRange("at least 0", lambda value: value >= 0)
ONE_OR_MORE = AllowedRange("at least 1", lambda value: value >= 1)
TWO_OR_MORE = AllowedRange("at least 2", lambda value: value >= 2)
POSITIVE = AllowedRange("above 0", lambda value: value > 0)
FRACTION = AllowedRange("above 0, at most 1", lambda value: 0 < value <= 1)
BETWEEN_MINUS_ONE_AND_ONE = AllowedRange("above -1, below 1", lambda value: -1 < value < 1)
BETWEEN_ZERO_AND_ONE = AllowedRange("above 0, below 1", lambda value: 0 < value < 1)
BELOW_ONE = AllowedRange("at least 0, below 1", lambda value: 0 <= value < 1)

RANGES: Mapping[str, AllowedRange] = {
    "clients_per_task": AllowedRange("1 to 1000000", lambda value: 1 <= value <= 10**6),
    "samples": TWO_OR_MORE,  # a fingerprint is made from each half
    "validation_samples": ONE_OR_MORE,
    "test_samples": ONE_OR_MORE,
    "dirichlet_alpha": AllowedRange("above 0, at most 1e+06", lambda value: 0 < value <= 1e6),
    "client_sizes": TWO_OR_MORE,
    "rating_cuts": ANY_NUMBER,
    "flipped_clients": AllowedRange("at least 0, at most 1", lambda value: 0 <= value <= 1),
    "own_share": FRACTION,
    "dial": AllowedRange("0 to 4", lambda value: 0 <= value <= 4),
    "max_length": AllowedRange("at least 4", lambda value: value >= 4),  # two special tokens take half of that
    "rouge_examples": ZERO_OR_MORE,
    "new_tokens": ONE_OR_MORE,
    "adapted_blocks": ONE_OR_MORE,
    "lora_alpha": POSITIVE,
    "dropout": BELOW_ONE,
    "rounds": ONE_OR_MORE,
    "local_epochs": ONE_OR_MORE,
    "batch_size": ONE_OR_MORE,
    "lr": POSITIVE,
    "warmup": BELOW_ONE,
    "weight_decay": ZERO_OR_MORE,
    "clip": ZERO_OR_MORE,
    "proximal_mu": ZERO_OR_MORE,
    "feature_alignment": ZERO_OR_MORE,
    "measure_round": ONE_OR_MORE,
    "participation": FRACTION,
    "eval_every": ONE_OR_MORE,
    "patience": ZERO_OR_MORE,
    "min_delta": ZERO_OR_MORE,
    "pack_tokens": ONE_OR_MORE,
    "pack_memory_gb": AllowedRange("above 0, at most 1e+06", lambda value: 0 < value <= 1e6),
    "prefix_cache_gb": AllowedRange("0 to 1e+06", lambda value: 0 <= value <= 1e6),
    "prefix_disk_gb": AllowedRange("0 to 1e+06", lambda value: 0 <= value <= 1e6),
    "fingerprint_batches": TWO_OR_MORE,
    "fingerprint_blocks": ONE_OR_MORE,
    "fingerprint_samples": TWO_OR_MORE,
    "fingerprint_steps": ONE_OR_MORE,
    "sketch_dim": AllowedRange("2 to 1000000", lambda value: 2 <= value <= 10**6),
    "pca_components": ONE_OR_MORE,
    "k_range": TWO_OR_MORE,
    "min_cluster_size": ONE_OR_MORE,
    "similarity_threshold": BETWEEN_MINUS_ONE_AND_ONE,
    "merge_similarity": BETWEEN_MINUS_ONE_AND_ONE,
    "min_reliability": BETWEEN_MINUS_ONE_AND_ONE,
    "recluster_every": ZERO_OR_MORE,
    "stability": BELOW_ONE,
    "candidates": ONE_OR_MORE,
    "adapter_bytes": ONE_OR_MORE,
    "alpha_base": BELOW_ONE,
    "alpha_act": BELOW_ONE,
    "alpha_opt": BELOW_ONE,
    "wire_noise": ZERO_OR_MORE,
    # a Laplacian scaled to a largest eigenvalue of 1 is stable below 2
    "eta": AllowedRange("at least 0, below 2", lambda value: 0 <= value < 2),
    "eta_decay": FRACTION,
    "alpha": POSITIVE,
    "neighbours": ZERO_OR_MORE,
    "singleton_neighbours": ZERO_OR_MORE,
    "graph_ema": BELOW_ONE,
    "aggregate_every": ONE_OR_MORE,
    "personal_rounds": ZERO_OR_MORE,
    "second_weight": ZERO_OR_MORE,
    "max_norm_ratio": AllowedRange("above 1", lambda value: value > 1),
    "max_share": FRACTION,
    "trim": AllowedRange("at least 0, below 0.5", lambda value: 0 <= value < 0.5),
    "byzantine": ZERO_OR_MORE,
    "server_lr": POSITIVE,
    "server_beta1": BELOW_ONE,
    "server_beta2": BELOW_ONE,
    "server_tau": POSITIVE,
    "gram_alpha": POSITIVE,
    "attention_alpha": FRACTION,
    "attention_sigma": POSITIVE,
    "ifca_clusters": ONE_OR_MORE,
    "bipartition_ratio": FRACTION,
    "tree_step": ONE_OR_MORE,
    "tree_threshold": BELOW_ONE,
    "attack_scale": POSITIVE,
    "validation_share": BETWEEN_ZERO_AND_ONE,
    "image_size": AllowedRange("at least 8", lambda value: value >= 8),
    "frozen_blocks": ZERO_OR_MORE,
    "ridge": POSITIVE,
    "local_steps": ONE_OR_MORE,
    "momentum": BELOW_ONE,
    "label_smoothing": BELOW_ONE,
    "crop": ZERO_OR_MORE,
    "sparsity": BETWEEN_ZERO_AND_ONE,
    "calibration_rounds": ONE_OR_MORE,
    "calibration_clients": ONE_OR_MORE,
    "calibration_examples": ONE_OR_MORE,
    "seed": ZERO_OR_MORE,
    "max_rounds": ONE_OR_MORE,
    "checkpoint_every": ONE_OR_MORE,
    "keep_checkpoints": ONE_OR_MORE,
    "keep_best": ZERO_OR_MORE,
    "workers": ONE_OR_MORE,
}


def check_ranges(config: Config) -> None:
    """Nothing where every number is finite and in its range.

    Raises:
        ConfigError: one is not.
    """
    for name, allowed in RANGES.items():
        value = value_of(config, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not (_is_usable(number) and allowed.contains(number)):
                # only where that is what is wrong: nobody reads 10^15 in every line
                bound = f", at most {LARGEST:.0e}" if allowed.contains(number) else ""
                raise invalid_value(settings()[name].flag, value, allowed.description + bound)


def _is_usable(number: Any) -> bool:
    # Beyond 10^15 a float no longer holds every whole number, and no setting means anything there.
    # NaN and infinity fail the comparison too, and unlike `math.isfinite` it takes whole numbers of any size.
    return bool(abs(number) <= LARGEST)


def check_cluster_counts(clustering: ClusteringConfig, *, clients: int | None) -> None:
    """Nothing where so many clients, or a number that is not known yet, can be in clusters as these settings say.

    Raises:
        ConfigError: they cannot.
    """
    clusters, number = clustering.clusters, parse_integer(clustering.clusters) or 0
    if clusters not in ("auto", "oracle") and not 1 <= number <= (number if clients is None else clients):
        allowed = "1" if clients is None else f"1 to {clients}, the number of clients"
        raise invalid_value("--clusters", clusters, f"auto, oracle, or a number from {allowed}")
    if clients is not None and clustering.min_cluster_size > clients:
        raise invalid_value(
            "--min-cluster-size", clustering.min_cluster_size, f"at most {clients}, the number of clients"
        )


def check_names(config: Config, *, at_sites: bool = False) -> None:
    """Nothing where model, tasks, devices, strategy and allocator are known, and the clients unless they are at sites.

    Raises:
        AtlasError: one is not; the message has the nearest known name.
    """
    _check_strategy(config)
    _check_partition(config.data.partition)
    _check_allocator(config.ranks.ranks)
    _check_devices(config.data.devices, config.data.device)
    _check_tasks(config)
    if not at_sites:
        _check_cut_names(config)
    check_kind(config)
    check_precision(config)
    _check_model(config.model.model)
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", config.run.preset):
        raise invalid_value(
            "--preset", config.run.preset, "a name of small letters, digits, - and _ (`atlas list presets`)"
        )


def _check_strategy(config: Config) -> None:
    from atlas_fl.aggregation.registry import ALIASES, STRATEGIES, StrategyOptions, find_strategy

    name, every = config.mixing.strategy, config.clustering.recluster_every
    if name not in STRATEGIES and name not in ALIASES and name not in METHODS:
        raise unknown_name("strategy", name, [*STRATEGIES, *METHODS, *ALIASES])
    check_equal_ranks(config)
    strategy = find_strategy(rule_of(config), StrategyOptions(within=config.robust.within))
    if config.split.server_adapters == "per_cluster" and not strategy.communicates:
        raise ConfigError(
            f"--server-adapters per_cluster trains one set by several clients, and --strategy {name} shares nothing;"
            " take per_client, or another strategy"
        )
    if config.data.arrive and not strategy.takes_newcomers:
        raise ConfigError(
            f"--strategy {name} tells from earlier updates who belongs together, and a client of --arrive has sent"
            " none; leave --arrive out, or take another strategy"
        )
    if every > 0 and strategy.state_by_cluster:
        raise ConfigError(
            f"--strategy {name} --within clusters has moments of each cluster, and --recluster-every {every} may change"
            " who that is; set it to 0, or take --within all"
        )


def _check_partition(name: str) -> None:
    from atlas_fl.data.partition import PARTITIONS

    if name not in PARTITIONS:
        raise unknown_name("name in --partition", name, PARTITIONS)


def _check_allocator(name: str) -> None:
    from atlas_fl.ranks.allocation import ALLOCATORS

    if parse_integer(name) is None and name not in ALLOCATORS:
        raise unknown_name("allocator for --ranks", name, [*ALLOCATORS, "one of --candidates"])


def _check_devices(names: tuple[str, ...], definitions: tuple[str, ...]) -> None:
    from atlas_fl.ranks.devices import find_devices

    find_devices(names, definitions)


def _check_cut_names(config: Config) -> None:
    from atlas_fl.data.heterogeneity import joint_name
    from atlas_fl.ranks.devices import find_devices

    data = config.data
    tasks = [*data.tasks, *(definition.partition("=")[0] for definition in data.task)]
    clients = [f"{task}-{index}" for task in tasks for index in range(data.clients_per_task)]
    if data.one_task:
        tasks = [joint_name(tasks)]
    check_cut_names(
        config.split.split, {*tasks, *clients, *(device.name for device in find_devices(data.devices, data.device))}
    )


def check_cut_names(split: str, names: Collection[str]) -> None:
    """Nothing where `--split` names these clients, tasks and devices alone.

    Raises:
        ConfigError: it names another; the message has the nearest.
    """
    if missing := unknown_cut_names(split, names):
        raise unknown_name("name in --split", missing[0], names)


def unknown_cut_names(split: str, names: Collection[str]) -> list[str]:
    """What `--split` names beside these clients, tasks and devices."""
    return sorted(set(cuts_by_name(split)) - {WILDCARD, *names})


def _check_tasks(config: Config) -> None:
    from atlas_fl.data.heterogeneity import check_heterogeneity
    from atlas_fl.data.registry import find_tasks

    data, tasks = config.data, find_tasks(config.data.tasks, config.data.task)
    check_class_features(config)
    check_heterogeneity(
        tasks,
        rating_cuts=data.rating_cuts,
        flipped_clients=data.flipped_clients,
        one_task=data.one_task,
        test_mix=data.test_mix,
    )


def _check_model(name: str) -> None:
    from atlas_fl.models.registry import MODELS, locate_model

    # an alias is known even before its files are there; any other name must lead somewhere
    if name not in MODELS:
        locate_model(name)


MAX_NAME_BYTES = 200
"""Bytes of a run's name: file systems allow 255, and files beside it are named after it."""


def validate(config: Config, *, at_sites: bool = False) -> Config:
    """The same config, if every setting has its type and range, contradicts no other and names what there is.

    The settings of a method of the literature are written into it (`config.methods`), as are the digests of its
    plug-ins, which are loaded.

    With `at_sites` the clients are those who come, whoever that is: nothing is held against the config's own.

    Raises:
        AtlasError: the first setting that does not; one line with its value, what is allowed and the remedy.
    """
    check_types(config)
    plugins = load_plugins(config.run.plugin)
    if plugins != config.run.plugin:
        config = replace(config, run=replace(config.run, plugin=plugins))
    config = with_method_settings(config)
    check_ranges(config)
    _check_data(config.data)
    _check_heterogeneity(config)
    if not at_sites:
        check_turned(config)
    _check_arrivals(config)
    _check_clusters(config, at_sites=at_sites)
    _check_ranks(config.ranks)
    _check_split(config.split)
    _check_mixing(config.mixing)
    _check_run(config.run)
    _check_rerank(config)
    _check_patience(config)
    _check_personal_rounds(config)
    check_personal_models(config)
    check_control_variates(config)
    check_dynamic_regularization(config)
    check_second_model(config)
    check_frozen_part(config)
    check_cluster_choice(config)
    check_multitask(config)
    _check_shared_adapters(config)
    check_image_settings(config)
    _check_attack(config)
    check_names(config, at_sites=at_sites)
    check_split_halves(config)
    return config


def check_types(config: Config) -> None:
    """Nothing where every value has the type that its setting declares, and every text is printable.

    Raises:
        ConfigError: one has not.
    """
    for setting in settings().values():
        value = value_of(config, setting.name)
        try:
            # a list is unequal to the tuple that it should be; NaN, unequal to itself, is a matter of ranges
            is_valid = bool(convert_value(value, setting.kind) == value or value != value)
        except ValueError:
            is_valid = False
        if not is_valid:
            raise wrong_kind(setting.flag, value, setting.kind)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not (text and text.isprintable()):
                raise invalid_value(setting.flag, text, "printable text that is not empty")


def _check_data(data: DataConfig) -> None:
    if not data.tasks and not data.task:
        raise ConfigError("--tasks is empty; a federation needs at least one task; see `atlas list tasks`")
    if duplicate := _first_duplicate(data.tasks):
        raise ConfigError(f"--tasks names {duplicate!r} twice; name a task once and raise --clients-per-task")


def _check_heterogeneity(config: Config) -> None:
    data = config.data
    if data.own_share != 1 and not data.one_task:
        raise ConfigError(
            f"--own-share {data.own_share:g} mixes the sources of one task; set --one-task, or leave --own-share out"
        )
    if data.own_share != 1 and data.test_mix == "balanced":
        raise ConfigError(
            f"--own-share {data.own_share:g} exchanges rows of any class, and --test-mix balanced would not stay so;"
            " take --test-mix task, or --own-share 1"
        )
    if data.client_sizes and (data.partition == "quantity" or config.images.nc != ALL_CLASSES):
        other = "--partition quantity" if data.partition == "quantity" else f"--nc {config.images.nc}"
        raise ConfigError(f"--client-sizes and {other} both say how much a client has; leave one of them out")
    if data.centralized and data.arrive:
        raise ConfigError(f"--arrive {data.arrive[0]} comes later, and --centralized has no clients; leave one out")
    if (data.client_sizes or data.one_task) and data.arrive:
        raise ConfigError(
            f"--arrive {data.arrive[0]} comes later, and {'--client-sizes' if data.client_sizes else '--one-task'} is"
            " of clients who are there from the start; leave one of them out"
        )


def _check_arrivals(config: Config) -> None:
    for client, join_round in parse_arrivals(config.data.arrive).items():
        if join_round > config.training.rounds:
            raise ConfigError(
                f"--arrive lets {client} join before round {join_round}, and the run has {config.training.rounds};"
                " choose an earlier round"
            )


def _check_clusters(config: Config, *, at_sites: bool) -> None:
    tasks = {*config.data.tasks, *(definition.partition("=")[0] for definition in config.data.task)}
    check_cluster_counts(config.clustering, clients=None if at_sites else len(tasks) * config.data.clients_per_task)
    low, high = config.clustering.k_range
    if low > high:
        raise invalid_value("--k-range", (low, high), "the smaller number first")


def _check_ranks(ranks: RanksConfig) -> None:
    candidates = ranks.candidates
    if not candidates or list(candidates) != sorted(set(candidates)):
        raise invalid_value("--candidates", candidates, "at least one rank, each larger than the one before it")
    rank = parse_integer(ranks.ranks)
    if rank is not None and rank not in candidates:
        listed = ", ".join(map(str, candidates))
        raise ConfigError(
            f"--ranks is {rank}, a rank that is no candidate; the candidates are {listed}; "
            "choose one of them, or add it to --candidates"
        )
    if (total := ranks.alpha_base + ranks.alpha_act + ranks.alpha_opt) >= 1:
        raise ConfigError(
            f"--alpha-base, --alpha-act and --alpha-opt add up to {total:g}; allowed: below 1, or nothing is left "
            "for the adapters; lower one of them"
        )


def _check_split(split: SplitConfig) -> None:
    if set(cuts_by_name(split.split).values()) != {NONE}:
        return
    if split.server_adapters != "per_client":
        raise ConfigError(
            f"--server-adapters {split.server_adapters} is about the parts above cuts, and --split {split.split} cuts"
            " none; choose cuts, such as --split auto, or leave --server-adapters out"
        )
    if split.topology != "server":
        raise ConfigError(
            f"--topology {split.topology} says who computes the upper parts of cut models, and --split {split.split}"
            " cuts none; choose cuts, such as --split auto, or leave --topology out"
        )
    if split.leakage:
        raise ConfigError(
            f"--leakage tells what the cuts give away, and --split {split.split} makes none; choose cuts, or see"
            " `atlas leakage` for every one that there could be"
        )


def _check_mixing(mixing: MixingConfig) -> None:
    share = mixing.share
    if not share or _first_duplicate(share):
        raise invalid_value("--share", share, "one or more of A, B, head, each once")
    if mixing.space == "product" and ("A" in share) != ("B" in share):
        raise ConfigError(
            f"--share {' '.join(share)} leaves out one factor of the update s B A, which --space product mixes as a "
            "whole; share both A and B, or choose --space factors"
        )


def _check_run(run: RunConfig) -> None:
    name = run.name
    if name is not None and ("/" in name or name.startswith(".") or len(name.encode()) > MAX_NAME_BYTES):
        allowed = f"the name of a folder of at most {MAX_NAME_BYTES} bytes, without / and not starting with a dot"
        raise invalid_value("--name", name[:MAX_NAME_BYTES], allowed)


def _check_rerank(config: Config) -> None:
    recluster_every, aggregate_every = config.clustering.recluster_every, config.mixing.aggregate_every
    if config.ranks.rerank and recluster_every == 0:
        raise ConfigError(
            "--rerank chooses ranks again when clients are clustered again, and --recluster-every is 0; set it to 1 or "
            "more, or leave --rerank out"
        )
    if config.ranks.rerank and AUTO in cuts_by_name(config.split.split).values():
        raise ConfigError(
            f"--rerank may move the cut that --split {config.split.split} chooses, and cuts stay where they are; give"
            " the number of blocks that `atlas plan` shows, or leave --rerank out"
        )
    if config.ranks.rerank and recluster_every % aggregate_every:
        raise ConfigError(
            f"--rerank changes the models that the server holds, and --recluster-every is {recluster_every}, no "
            f"multiple of --aggregate-every {aggregate_every}; make it one"
        )


def _check_attack(config: Config) -> None:
    attack = config.attack
    if attack.attack == "none":
        if attack.attackers or attack.attack_scale is not None:
            raise ConfigError(
                "--attackers and --attack-scale say who attacks and how, and --attack is none; choose one"
            )
        return
    if not attack.attackers:
        raise ConfigError(f"--attack {attack.attack} needs --attackers: clients by name, or how many")
    if config.data.arrive:
        raise ConfigError(
            f"--attack is of those who are there from the start; leave --arrive {config.data.arrive[0]} out"
        )
    if config.split.server_adapters != "per_client":
        raise ConfigError(
            f"--attack {attack.attack} alters what a client sends, and --server-adapters {config.split.server_adapters}"
            " are the server's; take per_client"
        )


def _check_patience(config: Config) -> None:
    training = config.training
    if training.patience and config.mixing.personal_rounds:
        raise ConfigError(
            f"--patience {training.patience} ends a run before its last rounds, which --personal-rounds"
            f" {config.mixing.personal_rounds} are; leave one of them out"
        )
    if training.min_delta and not training.patience:
        raise ConfigError(
            f"--min-delta is {training.min_delta} and says what is better for --patience, which is 0; set --patience to"
            " a number of rounds, or leave --min-delta out"
        )


def _check_personal_rounds(config: Config) -> None:
    """Nothing where what trains, and in which rounds, fits the rounds, the model and its cuts."""
    training, personal = config.training, config.mixing.personal_rounds
    if personal >= training.rounds:
        raise ConfigError(
            f"--personal-rounds is {personal}; allowed: below --rounds, which is {training.rounds}; raise --rounds, or"
            " set it lower"
        )
    if training.prior_correction and config.split.split != NONE:
        raise ConfigError(
            f"--prior-correction needs the labels where the logits are, and --split {config.split.split} parts them;"
            " leave one of them out"
        )
    if training.trained_parts in ("B", "alternate") and training.trainable == "full":
        raise ConfigError(
            f"--trained-parts {training.trained_parts} is of adapters, and --trainable full has none; leave it out"
        )
    if training.trained_parts not in ("all", "B") and config.split.split != NONE:
        raise ConfigError(
            f"--trained-parts {training.trained_parts} changes what trains during a run, and a cut model (--split"
            f" {config.split.split}) trains the same parts in every step; leave one of them out"
        )
    if training.trained_parts == "B" and "A" in config.mixing.share and config.mixing.space == "product":
        raise ConfigError(
            "--trained-parts B leaves A as drawn, and --space product would change it; set --space factors and --share"
            " B head"
        )


def _check_shared_adapters(config: Config) -> None:
    split = config.split
    if split.server_adapters == "per_client":
        return
    if split.topology != "server":
        raise ConfigError(
            f"--server-adapters {split.server_adapters} moves one set by all of a cluster at once, and --topology"
            f" {split.topology} puts its clients on several hosts; leave one of them out"
        )
    if (every := config.clustering.recluster_every) > 0:
        raise ConfigError(
            f"--server-adapters {split.server_adapters} belong to a cluster, and --recluster-every {every} may change"
            " who that is; set it to 0, or take per_client"
        )
    if config.data.arrive:
        raise ConfigError(
            f"--server-adapters {split.server_adapters} belong to those who were there when the plan was made, and"
            f" --arrive {config.data.arrive[0]} comes later; leave one of them out"
        )


def _first_duplicate(names: tuple[str, ...]) -> str | None:
    return next((name for index, name in enumerate(names) if name in names[:index]), None)
