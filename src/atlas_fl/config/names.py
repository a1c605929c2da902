"""Whether the names in a config are in the registries; these are imported here, late, because they take seconds."""

import re
from collections.abc import Collection, Sequence

from atlas_fl.config.fields import Setting, settings, value_of
from atlas_fl.config.groups import Config
from atlas_fl.config.images import EVENLY, OF_ADAPTERS, OF_WHOLE, WHOLE
from atlas_fl.config.kinds import mistake, whole_number
from atlas_fl.config.splitting import EVERY, cuts_by_name
from atlas_fl.errors import ConfigError, unknown


def check_names(config: Config, *, at_sites: bool = False) -> None:
    """Nothing where model, tasks, devices, strategy and allocator are known, and the clients unless they are at sites.

    Raises:
        AtlasError: one is not; the message has the nearest known name.
    """
    _check_strategy(config.mixing.strategy)
    _check_allocator(config.ranks.ranks)
    _check_devices(config.data.devices, config.data.device)
    _check_tasks(config.data.tasks, config.data.task)
    if not at_sites:
        _check_cut_names(config)
    _check_sharing(config)
    _check_images(config)
    _check_precision(config)
    _check_model(config.model.model)
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", config.run.preset):
        raise mistake("--preset", config.run.preset, "a name of small letters, digits, - and _ (`atlas list presets`)")


def _check_strategy(name: str) -> None:
    from atlas_fl.strategies import ALIASES, STRATEGIES

    if name not in STRATEGIES and name not in ALIASES:
        raise unknown("strategy", name, [*STRATEGIES, *ALIASES])


def _check_allocator(name: str) -> None:
    from atlas_fl.ranks.allocate import ALLOCATORS

    if whole_number(name) is None and name not in ALLOCATORS:
        raise unknown("allocator for --ranks", name, [*ALLOCATORS, "one of --candidates"])


def _check_devices(names: tuple[str, ...], own: tuple[str, ...]) -> None:
    from atlas_fl.ranks.devices import find_devices

    find_devices(names, own)


def _check_cut_names(config: Config) -> None:
    from atlas_fl.ranks.devices import find_devices

    data = config.data
    tasks = [*data.tasks, *(own.partition("=")[0] for own in data.task)]
    clients = [f"{task}-{place}" for task in tasks for place in range(data.clients_per_task)]
    check_cut_names(
        config.split.split, {*tasks, *clients, *(one.name for one in find_devices(data.devices, data.device))}
    )


def check_cut_names(split: str, known: Collection[str]) -> None:
    """Nothing where `--split` names these clients, tasks and devices alone.

    Raises:
        ConfigError: it names another; the message has the nearest.
    """
    if missing := unknown_cuts(split, known):
        raise unknown("name in --split", missing[0], known)


def unknown_cuts(split: str, known: Collection[str]) -> list[str]:
    """What `--split` names beside these clients, tasks and devices."""
    return sorted(set(cuts_by_name(split)) - {EVERY, *known})


def _check_sharing(config: Config) -> None:
    from atlas_fl.strategies import ALIASES

    name = config.mixing.strategy
    if config.split.server_adapters == "per_cluster" and ALIASES.get(name, name) == "local":
        raise ConfigError(
            f"--server-adapters per_cluster trains one set by several clients, and --strategy {name} shares nothing;"
            " take per_client, or another strategy"
        )


def _check_tasks(names: tuple[str, ...], own: tuple[str, ...]) -> None:
    from atlas_fl.tasks import find_tasks

    find_tasks(names, own)


def _check_images(config: Config) -> None:
    from atlas_fl.tasks import check_one_kind, find_tasks

    tasks = find_tasks(config.data.tasks, config.data.task)
    check_one_kind(tasks)
    if any(task.images for task in tasks):
        _check_tuned(config)
        _check_classes(config, [task.num_labels for task in tasks])
    elif changed := _changed(config, "images", "sparse"):
        raise ConfigError(
            f"{changed[0].flag} is for image tasks, and --tasks has texts alone ({', '.join(t.name for t in tasks)});"
            " leave it out, or take a vision preset (`atlas list presets`)"
        )


def _check_classes(config: Config, of_tasks: Sequence[int]) -> None:
    """Nothing where the clients can share as many classes as each of these tasks has."""
    from atlas_fl.tasks.sharding import check_classes

    for classes in of_tasks if config.images.nc != EVENLY else ():
        check_classes(config.data.clients_per_task, classes, int(config.images.nc))


def _check_tuned(config: Config) -> None:
    """Nothing where what is set belongs to what trains: whole models, or adapters on a frozen one."""
    if config.images.tune == WHOLE:
        changed = _changed(config, "model", "clustering", "ranks", "split")
        if of_adapters := [one for one in changed if one.group != "model" or one.name in OF_ADAPTERS]:
            raise ConfigError(
                f"{of_adapters[0].flag} is for adapters, and these image tasks train whole models; leave it out, or"
                " take --tune lora, or a vision preset where it is the preset's (`atlas list presets`)"
            )
        _check_rule(config.mixing.strategy, within=config.robust.within)
        return
    of_whole = [one for one in _changed(config, "images", "sparse") if one.group == "sparse" or one.name in OF_WHOLE]
    if of_whole:
        raise ConfigError(f"{of_whole[0].flag} is for whole models, and --tune lora trains adapters; leave it out")
    if changed := _changed(config, "split"):
        raise ConfigError(f"{changed[0].flag} cuts models of texts, and these tasks have images; leave it out")


def _check_rule(name: str, *, within: str) -> None:
    from atlas_fl.strategies import StrategyOptions, find_strategy

    if find_strategy(name, StrategyOptions(within=within)).clustered:
        raise no_clusters(name)


def no_clusters(strategy: str) -> ConfigError:
    """The error for a rule of clusters on whole models."""
    return ConfigError(
        f"--strategy {strategy} needs fingerprints of adapters, and whole models of image tasks have none; use fedavg"
        " or local, or a robust rule over all clients, --tune lora, or a vision preset (`atlas list presets`)"
    )


def _check_precision(config: Config) -> None:
    from atlas_fl.tasks import find_tasks

    if config.model.precision == "fp16" and config.run.accelerator == "cpu":
        tasks = find_tasks(config.data.tasks, config.data.task)
        if config.images.tune != WHOLE or not any(task.images for task in tasks):
            raise no_fp16()


def no_fp16() -> ConfigError:
    """The error for fp16 on a machine or accelerator that is not meant for it."""
    return ConfigError(
        "--precision fp16 needs a GPU with CUDA, and this would run on the CPU; take --precision bf16 or fp32, or "
        "--accelerator cuda where there is one"
    )


def _changed(config: Config, *groups: str) -> list[Setting]:
    """The settings of these groups that are not at their default."""
    own = [setting for setting in settings().values() if setting.group in groups]
    return [setting for setting in own if value_of(config, setting.name) != value_of(Config(), setting.name)]


def _check_model(name: str) -> None:
    from atlas_fl.models.registry import MODELS, locate

    # an alias is known even before its files are there; any other name must lead somewhere
    if name not in MODELS:
        locate(name)
