"""Validation of a config: types, ranges, forms, contradictions between settings, unknown names; no data is read.

Ranges and forms stand in `config.schema`, settings that contradict each other in `config.conflicts`. Registries are
imported inside the checks, because importing them takes seconds.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from atlas_fl.config import conflicts, methods, presets, schema, values
from atlas_fl.config.settings import check_kind, check_range, settings, value_of
from atlas_fl.errors import ConfigError, check_known
from atlas_fl.plugins import load_plugins, registered_names

if TYPE_CHECKING:
    from atlas_fl.data.task import Task


def validate(config: schema.Config, *, at_sites: bool = False) -> schema.Config:
    """The config with the settings of its strategy; every type, range, contradiction and name is checked.

    The settings of a published method are written into it (`config.methods`), as are the digests of its plug-ins, which
    are loaded. With `at_sites` the clients are those who join: names and numbers of clients are not checked.

    Raises:
        AtlasError: the first wrong setting; one line with its value, what is allowed and the remedy.
    """
    for setting in settings().values():
        check_kind(setting, value_of(config, setting.name))
    plugins = load_plugins(config.run.plugin)
    if plugins != config.run.plugin:
        config = replace(config, run=replace(config.run, plugin=plugins))
    config = methods.with_method_settings(config)
    for setting in settings().values():
        check_range(setting, value_of(config, setting.name))
    if not at_sites:
        presets.check_dial(config)
    _check_clients(config, at_sites=at_sites)
    _check_ranks(config.ranks)
    _check_names(config)
    conflicts.check_conflicts(config)
    _check_tasks(config, at_sites=at_sites)
    conflicts.check_conflicts(config, of_halves=True)
    return config


def _check_clients(config: schema.Config, *, at_sites: bool) -> None:
    """Raise ConfigError unless there are tasks, and arrivals and clusters fit the clients."""
    data = config.data
    if not data.tasks and not data.task:
        raise ConfigError("--tasks is empty; a federation needs at least one task; see `atlas list tasks`")
    for client, join_round in schema.parse_arrivals(data.arrive).items():
        if join_round > config.training.rounds:
            raise ConfigError(
                f"--arrive lets {client} join before round {join_round}, and the run has {config.training.rounds};"
                " choose an earlier round"
            )
    if at_sites:
        check_cluster_counts(config.clustering, clients=None)


def check_cluster_counts(clustering: schema.ClusteringConfig, *, clients: int | None) -> None:
    """Raise ConfigError unless so many clients, or a number not known yet, can be in clusters as these settings say."""
    clusters, number = clustering.clusters, values.parse_integer(clustering.clusters) or 0
    if clusters not in ("auto", "oracle") and not 1 <= number <= (number if clients is None else clients):
        allowed = "1" if clients is None else f"1 to {clients}, the number of clients"
        raise values.invalid_value("--clusters", clusters, f"auto, oracle, or a number from {allowed}")
    if clients is not None and clustering.min_cluster_size > clients:
        allowed = f"at most {clients}, the number of clients"
        raise values.invalid_value("--min-cluster-size", clustering.min_cluster_size, allowed)


def _check_ranks(ranks: schema.RanksConfig) -> None:
    rank = values.parse_integer(ranks.ranks)
    if rank is not None and rank not in ranks.candidates:
        listed = ", ".join(map(str, ranks.candidates))
        raise ConfigError(
            f"--ranks is {rank}, a rank that is no candidate; the candidates are {listed}; "
            "choose one of them, or add it to --candidates"
        )
    if (total := ranks.alpha_base + ranks.alpha_act + ranks.alpha_opt) >= 1:
        raise ConfigError(
            f"--alpha-base, --alpha-act and --alpha-opt add up to {total:g}; allowed: below 1, or nothing is left "
            "for the adapters; lower one of them"
        )


def _registries(config: schema.Config) -> Iterator[tuple[str, str, Collection[str]]]:
    """(place, name, known names) of every setting that names an entry of a registry."""
    from atlas_fl.clustering.fingerprints import FINGERPRINTS, WITHOUT_GRADIENTS
    from atlas_fl.data.partition import NATURAL, PARTITIONS, PATHOLOGICAL
    from atlas_fl.ranks.allocation import ALLOCATORS

    yield "name in --partition", config.data.partition, [*PARTITIONS, NATURAL, PATHOLOGICAL]
    yield "name in --fingerprint", config.clustering.fingerprint, [*FINGERPRINTS, *WITHOUT_GRADIENTS]
    if config.training.trainer != schema.TrainingConfig().trainer:
        yield "name in --trainer", config.training.trainer, registered_names()["trainer"]
    if values.parse_integer(config.ranks.ranks) is None:
        yield "allocator for --ranks", config.ranks.ranks, [*ALLOCATORS, "one of --candidates"]


def _check_names(config: schema.Config) -> None:
    """Raise AtlasError, with the nearest known name, for a name that no registry holds."""
    from atlas_fl.data.registry import check_one_kind, find_tasks
    from atlas_fl.methods.update_filters import make_filter
    from atlas_fl.models.registry import MODELS, locate_model

    method = methods.method_class(config)
    if config.needs_sums and method.not_a_sum:
        flag, nearest = ("--dp client", "") if config.training.dp == "client" else ("--secure", "shrinkage, ")
        raise ConfigError(
            f"--strategy {config.mixing.strategy} {method.not_a_sum}, and {flag} is for sums alone; take"
            f" --strategy {nearest}fedit, ffa, rolora, fedsa, ditto or mr_mtl, or leave {flag} out"
        )
    methods.knob_values(config)
    for place, name, known in _registries(config):
        check_known(place, name, among=known)
    for word in config.training.update_filter:
        make_filter(word)
    check_one_kind(find_tasks(config.data.tasks, config.data.task))
    if config.model.model not in MODELS:  # an alias is known before its files are there
        locate_model(config.model.model)


def check_labels(tasks: Sequence["Task"], data: schema.DataConfig) -> None:
    """Raise ConfigError unless the tasks have the labels that these settings need. No data is read."""
    from atlas_fl.data.heterogeneity import common_task

    if data.one_task:
        common_task(tasks)
    for task in tasks:
        needs = (
            ("--rating-cuts", data.rating_cuts, task.is_regression, "values (movie_ratings, metric=pearson)"),
            ("--flipped-clients", data.flipped_clients and not data.rating_cuts, task.has_classes, "classes"),
            ("--test-mix balanced", data.test_mix == "balanced", task.has_classes, "classes of its own"),
        )
        for flag, is_set, fits, labels in needs:
            if is_set and not fits:
                raise ConfigError(f"{flag} needs tasks of {labels}, and {task.name!r} has none; take another task")


def _check_tasks(config: schema.Config, *, at_sites: bool) -> None:
    """Raise ConfigError unless the clients of these tasks can share what the settings deal out to them."""
    from atlas_fl.data.clients import client_names
    from atlas_fl.data.heterogeneity import joint_name
    from atlas_fl.data.partition import check_classes
    from atlas_fl.data.registry import find_tasks
    from atlas_fl.ranks.devices import find_devices

    data = config.data
    devices = [device.name for device in find_devices(data.devices, data.device)]
    tasks = find_tasks(data.tasks, data.task)
    check_labels(tasks, data)
    if not at_sites:
        names = [task.name for task in tasks]
        clients = [client for own in client_names(tasks, data.clients_per_task) for client in own]
        check_cluster_counts(config.clustering, clients=len(clients))
        cut = [joint_name(names)] if data.one_task else names
        check_cut_names(config.split.split, {*cut, *clients, *devices})
    if config.images.nc != schema.ALL_CLASSES:
        for task in tasks:
            check_classes(data.clients_per_task, task.num_labels, int(config.images.nc))


def check_cut_names(split: str, names: Collection[str]) -> None:
    """Raise ConfigError, with the nearest name, where `--split` names another client, task or device than these."""
    check_known("name in --split", *unknown_cut_names(split, names), among=names)


def unknown_cut_names(split: str, names: Collection[str]) -> list[str]:
    """Names in `--split` beside these clients, tasks and devices."""
    return sorted(set(schema.cuts_by_name(split)) - {schema.WILDCARD, *names})
