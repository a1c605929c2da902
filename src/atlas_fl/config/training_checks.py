"""Validation of training settings: what is trained, by which optimizer, under which mask, beside which second model."""

from collections.abc import Sequence

from atlas_fl.config.methods import is_of_method, last_aggregation, method_class, rule_of
from atlas_fl.config.presets import preset_of
from atlas_fl.config.schema import ALL_CLASSES, WHOLE, Config, ServerConfig, TrainingConfig
from atlas_fl.config.settings import Setting, settings, value_of
from atlas_fl.config.values import Mark, invalid_value, parse_integer
from atlas_fl.errors import ConfigError, unknown_name
from atlas_fl.plugins import registered_names, registrations


def check_kind(config: Config) -> None:
    """Raise ConfigError unless settings fit the kind of the tasks, texts or images, and the weights that train."""
    from atlas_fl.data.registry import check_one_kind, find_tasks

    tasks = find_tasks(config.data.tasks, config.data.task)
    check_one_kind(tasks)
    images = any(task.images for task in tasks)
    if images:
        _check_classes(config, [task.num_labels for task in tasks])
        if config.images.tune == "lora" and config.training.trainable == "full":
            raise ConfigError("--tune lora and --trainable full contradict each other; leave --tune out")
    elif changed := [one for one in _changed_settings(config, "images") if Mark.OF_IMAGES in one.marks]:
        raise ConfigError(
            f"{changed[0].flag} is for image tasks, and --tasks has texts alone ({', '.join(t.name for t in tasks)});"
            " leave it out, or take a vision preset (`atlas list presets`)"
        )
    writing = [task.name for task in tasks if task.writes]
    _check_heads(config, writing=writing)
    if config.trainable(images=images) == "full":
        _check_full(config, writing=writing)
    else:
        _check_lora(config, images=images)
    _check_sgd(config, config.optimizer(images=images))


def check_classes(nc: str) -> None:
    """Raise ConfigError unless `--nc` is a number of classes, or all of them."""
    if nc != ALL_CLASSES and (parse_integer(nc) or 0) < 1:
        raise invalid_value("--nc", nc, "iid, or a number of classes from 1")


def _check_classes(config: Config, of_tasks: Sequence[int]) -> None:
    """Raise ConfigError unless the clients can share as many classes as each of these tasks has."""
    from atlas_fl.data.partition import check_classes

    for classes in of_tasks if config.images.nc != ALL_CLASSES else ():
        check_classes(config.data.clients_per_task, classes, int(config.images.nc))


def _check_heads(config: Config, *, writing: Sequence[str]) -> None:
    """Raise ConfigError where heads are to train by themselves and a task that writes text has none."""
    parts, strategy = config.training.trained_parts, config.mixing.strategy
    if not writing or parts not in ("head", "head_then_rest"):
        return
    is_methods = is_of_method(strategy, "trained_parts")
    source = f"--strategy {strategy}" if is_methods else f"--trained-parts {parts}"
    remedy = "take another strategy" if is_methods else f"leave {source} out"
    order = "alone" if parts == "head" else "before the rest"
    raise ConfigError(
        f"{source} trains heads {order}, and task {writing[0]!r} writes text and has none; leave the task out, or"
        f" {remedy}"
    )


def _check_full(config: Config, *, writing: Sequence[str]) -> None:
    """Raise ConfigError unless all weights can train under these settings."""
    changed = _chosen(config, "model", "ranks", "split")
    if of_adapters := [one for one in changed if one.group != "model" or Mark.OF_ADAPTERS in one.marks]:
        raise ConfigError(
            f"{of_adapters[0].flag} is for adapters, and these tasks train whole models; leave it out, or take"
            " --trainable lora"
        )
    if writing:
        raise ConfigError(
            f"{writing[0]} is to write text by the model's own output embedding, which stays frozen, and --trainable"
            " full would move the embedding that it is tied to; take --trainable lora"
        )
    if config.mixing.layer_weighting != "none":
        raise ConfigError(
            "--layer-weighting importance measures adapted layers, and these tasks train whole models; leave it out, or"
            " take --trainable lora"
        )
    clustered = _is_clustered(config)
    if config.clustering.fingerprint == "delta" and clustered:
        raise ConfigError(
            "--fingerprint delta warms up adapters, and these tasks train whole models; take fisher or gradient, or"
            " --trainable lora"
        )
    if not clustered and (idle := _chosen(config, "clustering")):
        raise ConfigError(
            f"{idle[0].flag} is for rules that use clusters, and --strategy {config.mixing.strategy} on whole models"
            " takes no fingerprints; leave it out, or take --strategy fedavg_cluster or atlas"
        )


def _check_lora(config: Config, *, images: bool) -> None:
    """Raise ConfigError unless adapters can be trained under these settings."""
    of_whole = [
        one
        for one in _changed_settings(config, "images", "sparse")
        if one.group == "sparse" or Mark.OF_WHOLE_MODELS in one.marks
    ]
    if of_whole:
        raise ConfigError(
            f"{of_whole[0].flag} is for whole models, and these tasks train adapters; leave it out, or take --trainable"
            " full"
        )
    if images and (changed := _changed_settings(config, "split")):
        strategy = config.mixing.strategy
        is_methods = is_of_method(strategy, changed[0].name)
        whose, remedy = (f" of --strategy {strategy}", "take another strategy") if is_methods else ("", "leave it out")
        raise ConfigError(f"{changed[0].flag}{whose} cuts models of texts, and these tasks have images; {remedy}")


def _check_sgd(config: Config, optimizer: str) -> None:
    """Raise ConfigError where momentum is set for AdamW."""
    of_sgd = [one for one in _changed_settings(config, "images") if Mark.OF_SGD in one.marks]
    if of_sgd and optimizer != "sgd":
        raise ConfigError(
            f"{of_sgd[0].flag} is for SGD, and these clients train by AdamW; leave it out, or take --optimizer sgd"
        )


def _is_clustered(config: Config) -> bool:
    from atlas_fl.aggregation.rules import StrategyOptions
    from atlas_fl.methods.registry import find_method

    return find_method(rule_of(config), StrategyOptions(within=config.robust.within)).clustered


def check_precision(config: Config) -> None:
    """Raise ConfigError unless the accelerator has the precision."""
    from atlas_fl.data.registry import find_tasks

    if config.model.precision == "fp16" and config.run.accelerator == "cpu":
        images = any(task.images for task in find_tasks(config.data.tasks, config.data.task))
        if not images or config.trainable(images=True) == "lora":
            raise no_fp16()


def no_fp16() -> ConfigError:
    """The error for fp16 on a machine or accelerator that is not meant for it."""
    return ConfigError(
        "--precision fp16 needs a GPU with CUDA, and this would run on the CPU; take --precision bf16 or fp32, or "
        "--accelerator cuda where there is one"
    )


def _changed_settings(config: Config, *groups: str) -> list[Setting]:
    """The settings of these groups that are not at their default."""
    group_settings = [setting for setting in settings().values() if setting.group in groups]
    return [setting for setting in group_settings if value_of(config, setting.name) != value_of(Config(), setting.name)]


def _chosen(config: Config, *groups: str) -> list[Setting]:
    """The settings of these groups that are neither at their default nor what the preset says."""
    preset = preset_of(config)
    return [
        one for one in _changed_settings(config, *groups) if value_of(config, one.name) != value_of(preset, one.name)
    ]


def check_whole_images(config: Config) -> None:
    """Raise ConfigError where one adapter for all tasks is to train whole models of images."""
    from atlas_fl.data.registry import find_tasks

    is_whole = config.training.trainable == "auto" and config.images.tune == WHOLE
    tasks = find_tasks(config.data.tasks, config.data.task) if config.training.multitask and is_whole else ()
    if any(task.images for task in tasks):
        raise ConfigError(f"--multitask and --tune {config.images.tune} do not go together; leave one of them out")


def check_measured_round(config: Config) -> None:
    """Raise ConfigError where the halves of `kriging` are to be measured after its last aggregation."""
    last = last_aggregation(config)
    measured = config.server.measure_round
    if method_class(config).asks_once and measured > last and measured != ServerConfig().measure_round:
        needed = f"at most {last} with --strategy {config.mixing.strategy}, whose last aggregation ends that round"
        raise invalid_value("--measure-round", measured, needed)


def check_task_features(config: Config) -> None:
    """Raise ConfigError where clients are to report class features of a task that has none."""
    from atlas_fl.data.registry import find_tasks

    for task in find_tasks(config.data.tasks, config.data.task) if method_class(config).needs_classes else ():
        is_cut = task.is_regression and bool(config.data.rating_cuts)  # each client calls some ratings positive
        if task.images or not (task.has_classes or is_cut):
            kind = "of images" if task.images else "a regression" if task.is_regression else "text to write"
            raise ConfigError(
                f"--strategy {config.mixing.strategy} compares features by classes of texts, and task {task.name!r} is"
                f" {kind}; leave the task out, or take fedavg"
            )


def check_trainer(config: Config) -> None:
    """Raise ConfigError unless the training loop is registered and can train the tasks and the terms of plug-ins."""
    from atlas_fl.data.registry import find_tasks

    name = config.training.trainer
    if name == TrainingConfig().trainer:
        return
    if name not in (names := registered_names()["trainer"]):
        raise unknown_name("name in --trainer", name, names)
    for task in find_tasks(config.data.tasks, config.data.task):
        if task.images or task.writes:
            kind = "of images" if task.images else "text to write"
            raise ConfigError(
                f"--trainer {name} trains classifiers and regressions of texts, and task {task.name!r} is {kind}; leave"
                " the task out, or take --trainer atlas"
            )
    if terms := [term for pinned in config.run.plugin for term in registrations(pinned, "term")]:
        raise ConfigError(
            f"--trainer {name} takes steps of its own, in which the term {terms[0]!r} of a plug-in would not act; leave"
            " that plug-in out, or take --trainer atlas"
        )
