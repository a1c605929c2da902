"""Whether settings fit what is trained and by which optimizer: adapters or all weights, of texts or of images."""

from collections.abc import Sequence
from dataclasses import fields

from atlas_fl.config.schema import EVENLY, OF_ADAPTERS, OF_SGD, OF_WHOLE, WHOLE, Config
from atlas_fl.config.settings import Setting, settings, value_of
from atlas_fl.config.values import mistake, whole_number
from atlas_fl.errors import ConfigError


def check_kind(config: Config) -> None:
    """Nothing where settings fit the kind of the tasks, texts or images, and what is trained on it.

    Raises `ConfigError` for the first that does not.
    """
    from atlas_fl.data.registry import check_one_kind, find_tasks

    tasks = find_tasks(config.data.tasks, config.data.task)
    check_one_kind(tasks)
    if any(task.images for task in tasks):
        _check_tuned(config)
        _check_classes(config, [task.num_labels for task in tasks])
        return
    _check_sgd(config, auto="adamw")
    if changed := [one for one in _changed(config, "images", "sparse") if one.name not in OF_SGD]:
        raise ConfigError(
            f"{changed[0].flag} is for image tasks, and --tasks has texts alone ({', '.join(t.name for t in tasks)});"
            " leave it out, or take a vision preset (`atlas list presets`)"
        )


def _check_classes(config: Config, of_tasks: Sequence[int]) -> None:
    """Nothing where the clients can share as many classes as each of these tasks has."""
    from atlas_fl.data.partition import check_classes

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
        _check_sgd(config, auto="sgd")
        _check_rule(config.mixing.strategy, within=config.robust.within)
        return
    of_whole = [one for one in _changed(config, "images", "sparse") if one.group == "sparse" or one.name in OF_WHOLE]
    if of_whole:
        raise ConfigError(f"{of_whole[0].flag} is for whole models, and --tune lora trains adapters; leave it out")
    _check_sgd(config, auto="adamw")
    if changed := _changed(config, "split"):
        raise ConfigError(f"{changed[0].flag} cuts models of texts, and these tasks have images; leave it out")


def _check_sgd(config: Config, *, auto: str) -> None:
    """Nothing where momentum is set for SGD alone; `auto` is the optimizer where the config leaves the choice."""
    name = auto if config.training.optimizer == "auto" else config.training.optimizer
    of_sgd = [one for one in _changed(config, "images") if one.name in (*OF_SGD, "carry_momentum")]
    if of_sgd and name != "sgd":
        raise ConfigError(
            f"{of_sgd[0].flag} is for SGD, and these clients train by AdamW; leave it out, or take --optimizer sgd"
        )


def _check_rule(name: str, *, within: str) -> None:
    from atlas_fl.aggregation.registry import find_strategy
    from atlas_fl.aggregation.strategies import StrategyOptions

    if find_strategy(name, StrategyOptions(within=within)).clustered:
        raise no_clusters(name)


def no_clusters(strategy: str) -> ConfigError:
    """The error for a rule of clusters on whole models."""
    return ConfigError(
        f"--strategy {strategy} needs fingerprints of adapters, and whole models of image tasks have none; use fedavg"
        " or local, or a robust rule over all clients, --tune lora, or a vision preset (`atlas list presets`)"
    )


def check_precision(config: Config) -> None:
    """Nothing where the precision can be had on the accelerator; raises `ConfigError` else."""
    from atlas_fl.data.registry import find_tasks

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


def check_image_settings(config: Config) -> None:
    """Nothing where settings of images, masks and momentum do not contradict each other; raises `ConfigError` else."""
    nc, partition = config.images.nc, config.data.partition
    if nc != EVENLY and partition != "iid":
        raise ConfigError(
            f"--nc {nc} and --partition {partition} are two ways to deal out classes; leave one of them out"
        )
    _check_mask(config)
    _check_momentum(config)
    if nc != EVENLY and (whole_number(nc) or 0) < 1:
        raise mistake("--nc", nc, "iid, or a number of classes from 1")


def _check_mask(config: Config) -> None:
    sparse = config.sparse
    made = [one.name for one in fields(sparse) if one.name != "mask_file" and getattr(sparse, one.name) != one.default]
    if sparse.mask_file is not None and made:
        raise ConfigError(
            f"--{made[0].replace('_', '-')} {getattr(sparse, made[0])} says how a mask is made, and --mask-file brings"
            " one; leave one of them out"
        )
    if sparse.masked and config.images.head_first == "none":
        flag = f"--mask {sparse.mask}" if sparse.mask_file is None else "--mask-file"
        raise ConfigError(
            f"{flag} freezes the head, and with --head-first none that is a random one; leave --head-first at ridge, or"
            f" {flag.split()[0]} out"
        )
    if sparse.masked and config.mixing.share == ("head",):
        raise ConfigError("a mask freezes the head, and --share head shares nothing else; share A B head, or no mask")


def _check_momentum(config: Config) -> None:
    images, share = config.images, config.training.participation
    if images.carry_momentum and images.momentum == 0:
        raise ConfigError("--carry-momentum has nothing to carry with --momentum 0; set it, or leave the other out")
    if images.carry_momentum and share < 1:
        raise ConfigError(
            f"--carry-momentum keeps what a client did in the round before, and with --participation {share:g} that is"
            " mostly an older one; take --participation 1, or leave --carry-momentum out"
        )
    if images.carry_momentum and (config.run.engine != "local" or config.run.workers not in (None, 1)):
        raise ConfigError(
            "--carry-momentum keeps what clients did in one process, and --workers and --engine ray have several; leave"
            " one of them out"
        )
