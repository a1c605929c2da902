"""Validation of a config: types, ranges, contradictions between settings, unknown names; no data is read.

Ranges stand in `config.schema`, and settings that contradict each other in `config.conflicts`. The checks here compare
numbers, or need a registry; these are imported inside the checks, because importing them takes seconds.
"""

import re
from collections.abc import Collection
from dataclasses import replace

from atlas_fl.config.conflicts import check_conflicts
from atlas_fl.config.methods import check_equal_ranks, method_class, rule_of, with_method_settings
from atlas_fl.config.presets import check_dial
from atlas_fl.config.schema import (
    WILDCARD,
    ClusteringConfig,
    Config,
    RanksConfig,
    cuts_by_name,
    parse_arrivals,
)
from atlas_fl.config.settings import settings, value_of
from atlas_fl.config.training_checks import (
    check_classes,
    check_kind,
    check_measured_round,
    check_precision,
    check_task_features,
    check_trainer,
    check_whole_images,
)
from atlas_fl.config.values import convert_value, invalid_value, parse_integer, wrong_kind
from atlas_fl.errors import ConfigError, unknown_name
from atlas_fl.plugins import load_plugins


def check_ranges(config: Config) -> None:
    """Raise ConfigError unless every number is finite and in its range."""
    for setting in settings().values():
        value = value_of(config, setting.name)
        for number in value if isinstance(value, tuple) else (value,):
            if setting.range is not None and number is not None and not setting.range.contains(number):
                raise invalid_value(setting.flag, value, setting.range.describe(number))


def check_cluster_counts(clustering: ClusteringConfig, *, clients: int | None) -> None:
    """Raise ConfigError unless so many clients, or a number not known yet, can be in clusters as these settings say."""
    clusters, number = clustering.clusters, parse_integer(clustering.clusters) or 0
    if clusters not in ("auto", "oracle") and not 1 <= number <= (number if clients is None else clients):
        allowed = "1" if clients is None else f"1 to {clients}, the number of clients"
        raise invalid_value("--clusters", clusters, f"auto, oracle, or a number from {allowed}")
    if clients is not None and clustering.min_cluster_size > clients:
        raise invalid_value(
            "--min-cluster-size", clustering.min_cluster_size, f"at most {clients}, the number of clients"
        )


def _check_names(config: Config, *, at_sites: bool) -> None:
    """Raise AtlasError, with the nearest known name, for a name that no registry holds, or no client of the config."""
    from atlas_fl.clustering.fingerprints import FINGERPRINTS, WARM_UPS
    from atlas_fl.data.heterogeneity import check_heterogeneity, joint_name
    from atlas_fl.data.partition import PARTITIONS
    from atlas_fl.data.registry import find_tasks
    from atlas_fl.models.registry import MODELS, locate_model
    from atlas_fl.ranks.allocation import ALLOCATORS
    from atlas_fl.ranks.devices import find_devices

    data = config.data
    _check_strategy(config)
    if data.partition not in PARTITIONS:
        raise unknown_name("name in --partition", data.partition, PARTITIONS)
    if config.clustering.fingerprint not in (*FINGERPRINTS, *WARM_UPS):
        raise unknown_name("name in --fingerprint", config.clustering.fingerprint, [*FINGERPRINTS, *WARM_UPS])
    _check_filters(config)
    if parse_integer(config.ranks.ranks) is None and config.ranks.ranks not in ALLOCATORS:
        raise unknown_name("allocator for --ranks", config.ranks.ranks, [*ALLOCATORS, "one of --candidates"])
    devices = [device.name for device in find_devices(data.devices, data.device)]
    tasks = find_tasks(data.tasks, data.task)
    check_task_features(config)
    check_trainer(config)
    check_heterogeneity(
        tasks,
        rating_cuts=data.rating_cuts,
        flipped_clients=data.flipped_clients,
        one_task=data.one_task,
        test_mix=data.test_mix,
    )
    if not at_sites:
        names = [task.name for task in tasks]
        clients = [f"{name}-{index}" for name in names for index in range(data.clients_per_task)]
        cut = [joint_name(names)] if data.one_task else names
        check_cut_names(config.split.split, {*cut, *clients, *devices})
    check_kind(config)
    check_precision(config)
    if config.model.model not in MODELS:  # an alias is known before its files are there
        locate_model(config.model.model)
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", config.run.preset):
        raise invalid_value(
            "--preset", config.run.preset, "a name of small letters, digits, - and _ (`atlas list presets`)"
        )


def _check_strategy(config: Config) -> None:
    from atlas_fl.aggregation.rules import StrategyOptions
    from atlas_fl.methods.registry import find_method

    name, every = config.mixing.strategy, config.clustering.recluster_every
    strategy = find_method(rule_of(config), StrategyOptions(within=config.robust.within))
    check_equal_ranks(config)
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


def check_cut_names(split: str, names: Collection[str]) -> None:
    """Check that `--split` names these clients, tasks and devices alone.

    Raises:
        ConfigError: it names another; the message has the nearest.
    """
    if missing := unknown_cut_names(split, names):
        raise unknown_name("name in --split", missing[0], names)


def unknown_cut_names(split: str, names: Collection[str]) -> list[str]:
    """Names in `--split` beside these clients, tasks and devices."""
    return sorted(set(cuts_by_name(split)) - {WILDCARD, *names})


MAX_NAME_BYTES = 200
"""Bytes of a run's name: file systems allow 255, and files beside it are named after it."""


def validate(config: Config, *, at_sites: bool = False) -> Config:
    """The config with the settings of its strategy; every type, range, contradiction and name is checked.

    The settings of a published method are written into it (`config.methods`), as are the digests of its plug-ins, which
    are loaded. With `at_sites` the clients are those who join: names and numbers of clients are not checked.

    Raises:
        AtlasError: the first wrong setting; one line with its value, what is allowed and the remedy.
    """
    check_types(config)
    plugins = load_plugins(config.run.plugin)
    if plugins != config.run.plugin:
        config = replace(config, run=replace(config.run, plugin=plugins))
    config = with_method_settings(config)
    check_ranges(config)
    if not at_sites:
        check_dial(config)
    _check_data(config, at_sites=at_sites)
    _check_ranks(config.ranks)
    _check_rounds(config)
    _check_share(config.mixing.share)
    _check_run_name(config.run.name)
    check_conflicts(config)
    check_whole_images(config)
    check_classes(config.images.nc)
    _check_names(config, at_sites=at_sites)
    check_conflicts(config, of_halves=True)
    check_measured_round(config)
    return config


def _check_filters(config: Config) -> None:
    """Raise ConfigError unless every filter of updates is known, and sees all that a client's examples go into."""
    from atlas_fl.methods.update_filters import make_filter

    method = method_class(config)
    for word in config.training.update_filter:
        make_filter(word)
        if method.report != "none" and not method.models_in_report:
            raise ConfigError(
                f"--update-filter {word} is for updates, and --strategy {config.mixing.strategy} asks clients for"
                f" {method.report.replace('_', ' ')} beside them; leave it out, or take another strategy"
            )


def check_types(config: Config) -> None:
    """Raise ConfigError unless every value has the type that its setting declares, and every text is printable."""
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


def _check_data(config: Config, *, at_sites: bool) -> None:
    """Raise ConfigError unless tasks are named once each, and clients, arrivals and clusters fit each other."""
    data = config.data
    if not data.tasks and not data.task:
        raise ConfigError("--tasks is empty; a federation needs at least one task; see `atlas list tasks`")
    if duplicate := _first_duplicate(data.tasks):
        raise ConfigError(f"--tasks names {duplicate!r} twice; name a task once and raise --clients-per-task")
    for client, join_round in parse_arrivals(data.arrive).items():
        if join_round > config.training.rounds:
            raise ConfigError(
                f"--arrive lets {client} join before round {join_round}, and the run has {config.training.rounds};"
                " choose an earlier round"
            )
    tasks = {*data.tasks, *(definition.partition("=")[0] for definition in data.task)}
    check_cluster_counts(config.clustering, clients=None if at_sites else len(tasks) * data.clients_per_task)
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


def _check_share(share: tuple[str, ...]) -> None:
    if not share or _first_duplicate(share):
        raise invalid_value("--share", share, "one or more of A, B, head, each once")


def _check_run_name(name: str | None) -> None:
    if name is not None and ("/" in name or name.startswith(".") or len(name.encode()) > MAX_NAME_BYTES):
        allowed = f"the name of a folder of at most {MAX_NAME_BYTES} bytes, without / and not starting with a dot"
        raise invalid_value("--name", name[:MAX_NAME_BYTES], allowed)


def _check_rounds(config: Config) -> None:
    """Raise ConfigError unless rounds of one kind fit those of another."""
    recluster_every = config.clustering.recluster_every
    aggregate_every = config.mixing.aggregate_every
    personal = config.mixing.personal_rounds
    if config.ranks.rerank and recluster_every % aggregate_every:
        raise ConfigError(
            f"--rerank changes the models that the server holds, and --recluster-every is {recluster_every}, no "
            f"multiple of --aggregate-every {aggregate_every}; make it one"
        )
    if personal >= config.training.rounds:
        raise ConfigError(
            f"--personal-rounds is {personal}; allowed: below --rounds, which is {config.training.rounds}; raise"
            " --rounds, or set it lower"
        )


def _first_duplicate(names: tuple[str, ...]) -> str | None:
    return next((name for index, name in enumerate(names) if name in names[:index]), None)
