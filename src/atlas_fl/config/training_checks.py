"""Validation of training settings: what is trained, by which optimizer, under which mask, beside which second model."""

from collections.abc import Sequence
from dataclasses import fields

from atlas_fl.config.methods import METHODS, has_frozen_part, measures_halves, reads_features, rule_of
from atlas_fl.config.presets import PRESETS, find_preset
from atlas_fl.config.schema import (
    ADAPTER_SETTINGS,
    ALL_CLASSES,
    FULL_MODEL_SETTINGS,
    NONE,
    OF_IMAGES,
    OF_SGD,
    WHOLE,
    Config,
    ServerConfig,
)
from atlas_fl.config.settings import Setting, settings, value_of
from atlas_fl.config.values import invalid_value, parse_integer
from atlas_fl.errors import ConfigError


def check_kind(config: Config) -> None:
    """Nothing where settings fit the kind of the tasks, texts or images, and what is trained of the model.

    Raises `ConfigError` for the first that does not.
    """
    from atlas_fl.data.registry import check_one_kind, find_tasks

    tasks = find_tasks(config.data.tasks, config.data.task)
    check_one_kind(tasks)
    images = any(task.images for task in tasks)
    if images:
        _check_classes(config, [task.num_labels for task in tasks])
        if config.images.tune == "lora" and config.training.trainable == "full":
            raise ConfigError("--tune lora and --trainable full contradict each other; leave --tune out")
    elif changed := [one for one in _changed_settings(config, "images") if one.name in OF_IMAGES]:
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


def _check_classes(config: Config, of_tasks: Sequence[int]) -> None:
    """Nothing where the clients can share as many classes as each of these tasks has."""
    from atlas_fl.data.partition import check_classes

    for classes in of_tasks if config.images.nc != ALL_CLASSES else ():
        check_classes(config.data.clients_per_task, classes, int(config.images.nc))


def _check_heads(config: Config, *, writing: Sequence[str]) -> None:
    """Raise ConfigError where heads are to train by themselves and a task that writes text has none."""
    parts, strategy = config.training.trained_parts, config.mixing.strategy
    if not writing or parts not in ("head", "head_then_rest"):
        return
    is_methods = strategy in METHODS and "trained_parts" in METHODS[strategy].settings
    source = f"--strategy {strategy}" if is_methods else f"--trained-parts {parts}"
    remedy = "take another strategy" if is_methods else f"leave {source} out"
    order = "alone" if parts == "head" else "before the rest"
    raise ConfigError(
        f"{source} trains heads {order}, and task {writing[0]!r} writes text and has none; leave the task out, or"
        f" {remedy}"
    )


def _check_full(config: Config, *, writing: Sequence[str]) -> None:
    """Nothing where all weights can train under what is set."""
    changed = _chosen(config, "model", "ranks", "split")
    if of_adapters := [one for one in changed if one.group != "model" or one.name in ADAPTER_SETTINGS]:
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
    """Nothing where adapters can be trained under what is set."""
    of_whole = [
        one
        for one in _changed_settings(config, "images", "sparse")
        if one.group == "sparse" or one.name in FULL_MODEL_SETTINGS
    ]
    if of_whole:
        raise ConfigError(
            f"{of_whole[0].flag} is for whole models, and these tasks train adapters; leave it out, or take --trainable"
            " full"
        )
    if images and (changed := _changed_settings(config, "split")):
        strategy = config.mixing.strategy
        is_methods = strategy in METHODS and changed[0].name in METHODS[strategy].settings
        whose, remedy = (f" of --strategy {strategy}", "take another strategy") if is_methods else ("", "leave it out")
        raise ConfigError(f"{changed[0].flag}{whose} cuts models of texts, and these tasks have images; {remedy}")


def _check_sgd(config: Config, optimizer: str) -> None:
    """Nothing where momentum is set for SGD alone."""
    of_sgd = [one for one in _changed_settings(config, "images") if one.name in (*OF_SGD, "carry_momentum")]
    if of_sgd and optimizer != "sgd":
        raise ConfigError(
            f"{of_sgd[0].flag} is for SGD, and these clients train by AdamW; leave it out, or take --optimizer sgd"
        )


def _is_clustered(config: Config) -> bool:
    from atlas_fl.aggregation.registry import StrategyOptions, find_strategy

    return find_strategy(rule_of(config), StrategyOptions(within=config.robust.within)).clustered


def check_precision(config: Config) -> None:
    """Nothing where the precision can be had on the accelerator; raises `ConfigError` else."""
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
    preset = find_preset(config.run.preset) if config.run.preset in PRESETS else Config()
    return [
        one for one in _changed_settings(config, *groups) if value_of(config, one.name) != value_of(preset, one.name)
    ]


def check_image_settings(config: Config) -> None:
    """Nothing where settings of images, masks and momentum do not contradict each other; raises `ConfigError` else."""
    nc, partition = config.images.nc, config.data.partition
    if nc != ALL_CLASSES and partition != "iid":
        raise ConfigError(
            f"--nc {nc} and --partition {partition} are two ways to deal out classes; leave one of them out"
        )
    _check_mask(config)
    _check_momentum(config)
    if nc != ALL_CLASSES and (parse_integer(nc) or 0) < 1:
        raise invalid_value("--nc", nc, "iid, or a number of classes from 1")


def _check_mask(config: Config) -> None:
    sparse = config.sparse
    made = [one.name for one in fields(sparse) if one.name != "mask_file" and getattr(sparse, one.name) != one.default]
    if sparse.mask_file is not None and made:
        raise ConfigError(
            f"--{made[0].replace('_', '-')} {getattr(sparse, made[0])} says how a mask is made, and --mask-file brings"
            " one; leave one of them out"
        )
    if sparse.has_mask and config.images.head_first == "none":
        flag = f"--mask {sparse.mask}" if sparse.mask_file is None else "--mask-file"
        raise ConfigError(
            f"{flag} freezes the head, and with --head-first none that is a random one; leave --head-first at ridge, or"
            f" {flag.split()[0]} out"
        )
    if sparse.has_mask and config.mixing.share == ("head",):
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


def check_personal_models(config: Config) -> None:
    """Nothing where each client may keep a model of its own and be pulled to what the server mixes."""
    mixing = config.mixing
    if not mixing.personal_models:
        return
    if mixing.space != "factors" or not config.ranks.ranks.isdecimal() or set(mixing.share) != {"A", "B", "head"}:
        raise ConfigError(
            "--personal-models pulls A and B to those of the others, which needs --space factors, --share A B head and"
            f" one rank for all; set these, and --ranks to one of {', '.join(map(str, config.ranks.candidates))}"
        )
    _check_one_process(config, "--personal-models")


def check_control_variates(config: Config) -> None:
    """Nothing where each client's gradients may be corrected by those of the others."""
    mixing = config.mixing
    if not config.training.control_variates:
        return
    if mixing.space != "factors" or not config.ranks.ranks.isdecimal():
        raise ConfigError(
            "--control-variates averages gradients of A and B, which needs --space factors and one rank for all; set"
            f" both, --ranks to one of {', '.join(map(str, config.ranks.candidates))}"
        )
    if mixing.personal_models:
        raise ConfigError("--control-variates is for one shared model, and --personal-models has none; leave one out")
    if rule_of(config) != "fedavg":
        raise ConfigError(
            f"--control-variates corrects by the gradients of all, and --strategy {mixing.strategy} mixes otherwise;"
            " take --strategy scaffold, or leave it out"
        )
    if set(mixing.share) != {"A", "B", "head"}:
        raise ConfigError(
            f"--control-variates corrects by the gradients of all, and --share {' '.join(mixing.share)} keeps some"
            " parameters to each client; share A B head, or leave it out"
        )
    _check_one_process(config, "--control-variates")


def check_dynamic_regularization(config: Config) -> None:
    """Nothing where clients may be corrected by their own changes, as FedDyn's are."""
    mixing = config.mixing
    if rule_of(config) != "fedavg_dynamic":
        return
    if mixing.space != "factors" or not config.ranks.ranks.isdecimal():
        raise ConfigError(
            f"--strategy {mixing.strategy} sums changes of A and B, which needs --space factors and one rank for all;"
            f" set both, --ranks to one of {', '.join(map(str, config.ranks.candidates))}"
        )
    if config.training.proximal_mu == 0:
        raise invalid_value("--proximal-mu", 0, f"above 0 with --strategy {mixing.strategy}, whose alpha it is")
    for flag, value in {
        "--personal-models": mixing.personal_models,
        f"--aggregate-every {mixing.aggregate_every}": mixing.aggregate_every > 1,
        "--second-model": mixing.second_model != "none",
    }.items():
        if value:
            raise ConfigError(f"--strategy {mixing.strategy} and {flag} do not go together; leave one of them out")
    _check_one_process(config, f"--strategy {mixing.strategy}")


def check_frozen_part(config: Config) -> None:
    """Nothing where everyone may hold a frozen part beside its adapter, as with FLoRA and FedEx-LoRA."""
    mixing = config.mixing
    if not has_frozen_part(config):
        return
    if not {"A", "B"} <= set(mixing.share) or mixing.space != "factors":
        raise ConfigError(
            f"--strategy {mixing.strategy} takes products apart into factors, which needs --space factors and --share"
            " with A and B; set both, or take flexlora"
        )
    if rule_of(config) == "fedavg_with_residual" and not config.ranks.ranks.isdecimal():
        raise ConfigError(
            f"--strategy {mixing.strategy} averages factors of one rank, and --ranks {config.ranks.ranks} may give"
            f" clients different ones; set --ranks to one of {', '.join(map(str, config.ranks.candidates))}, or take"
            " flora"
        )
    for flag, value in {
        "--personal-models": mixing.personal_models,
        "--second-model": mixing.second_model != "none",
        "--trained-parts alternate": config.training.trained_parts == "alternate",
    }.items():
        if value:
            raise ConfigError(f"--strategy {mixing.strategy} and {flag} do not go together; leave one of them out")
    _check_one_process(config, f"--strategy {mixing.strategy}")


def check_second_model(config: Config) -> None:
    """Nothing where each client may train a model of its own beside the shared one."""
    mixing, kind = config.mixing, config.mixing.second_model
    if mixing.second_gate != "none" and kind != "stacked":
        raise ConfigError(
            f"--second-gate {mixing.second_gate} weighs two adapters in one layer, and --second-model is {kind}; set it"
            " to stacked, or leave --second-gate out"
        )
    if kind == "none":
        return
    if kind != "stacked" and (mixing.space != "factors" or not config.ranks.ranks.isdecimal()):
        raise ConfigError(
            f"--second-model {kind} compares A and B with those of the shared model, which needs --space factors and"
            f" one rank for all; set both, --ranks to one of {', '.join(map(str, config.ranks.candidates))}"
        )
    if kind != "proximal" and mixing.second_weight > 1:
        raise invalid_value("--second-weight", mixing.second_weight, f"at most 1 with --second-model {kind}")
    if mixing.personal_models and kind != "stacked":
        raise ConfigError(
            f"--personal-models has one model a client, and --second-model {kind} a second; take stacked, or leave one"
            " of them out"
        )
    if not {"A", "B"} <= set(mixing.share) or rule_of(config) == "local":
        raise ConfigError(
            "--second-model stands beside a shared model, and --strategy local and --share without A or B have none;"
            " leave one of them out"
        )
    _check_one_process(config, "--second-model")


def check_cluster_choice(config: Config) -> None:
    """Nothing where clients may take each other's models, as IFCA's do."""
    mixing = config.mixing
    if rule_of(config) != "ifca":
        return
    if not config.ranks.ranks.isdecimal() or set(mixing.share) != {"A", "B", "head"}:
        raise ConfigError(
            "--strategy ifca lets a client take the model of others, which needs one rank for all and --share A B head;"
            f" set both, --ranks to one of {', '.join(map(str, config.ranks.candidates))}"
        )
    for flag, value in {
        "--trainable full": config.training.trainable == "full",
        f"--split {config.split.split}": config.split.split != NONE,
        "--rerank": config.ranks.rerank,
        "--arrive": bool(config.data.arrive),
        "--personal-models": mixing.personal_models,
        f"--aggregate-every {mixing.aggregate_every}": mixing.aggregate_every > 1,
    }.items():
        if value:
            raise ConfigError(f"--strategy ifca and {flag} do not go together so far; leave one of them out")


def check_multitask(config: Config) -> None:
    """Nothing where the tasks may train one set of adapters."""
    from atlas_fl.data.registry import find_tasks

    if not config.training.multitask:
        return
    if not config.data.centralized or rule_of(config) != "local":
        raise ConfigError(
            "--multitask trains one adapter on the examples of all clients in one place; take --strategy multitask, or"
            " leave --multitask out"
        )
    if not config.ranks.ranks.isdecimal():
        raise ConfigError(
            f"--multitask trains one adapter, and --ranks {config.ranks.ranks} may give tasks different ranks; set"
            f" --ranks to one of {', '.join(map(str, config.ranks.candidates))}"
        )
    training = config.training
    has_images = any(task.images for task in find_tasks(config.data.tasks, config.data.task))
    for flag, value in {
        f"--tune {config.images.tune}": has_images and training.trainable == "auto" and config.images.tune == WHOLE,
        "--trainable full": training.trainable == "full",
        f"--trained-parts {training.trained_parts}": training.trained_parts != "all",
        f"--split {config.split.split}": config.split.split != NONE,
        "--rerank": config.ranks.rerank,
        "--carry-momentum": config.images.carry_momentum,
        "--personal-models": config.mixing.personal_models,
    }.items():
        if value:
            raise ConfigError(f"--multitask and {flag} do not go together; leave one of them out")


def _check_plain_training(config: Config, name: str) -> None:
    """Nothing where all clients train adapters, whole and from the first round on, as this setting needs so far."""
    for flag, value in {
        "--trainable full": config.training.trainable == "full",
        f"--split {config.split.split}": config.split.split != NONE,
        "--rerank": config.ranks.rerank,
        "--keep best": config.mixing.keep == "best",
        "--arrive": bool(config.data.arrive),
        "--carry-momentum": config.images.carry_momentum,
    }.items():
        if value:
            raise ConfigError(f"{name} and {flag} do not go together so far; {_remedy(config, name, flag)}")


def _remedy(config: Config, name: str, other: str) -> str:
    """What to do about two flags of which a method of the literature may have set the first."""
    strategy = config.mixing.strategy
    own = METHODS[strategy].settings if strategy in METHODS else {}
    if name in {settings()[setting].flag for setting in own}:
        return f"leave {other} out, or take another strategy than {strategy}, which sets {name}"
    return "leave one of them out"


def _check_one_process(config: Config, name: str) -> None:
    """Nothing where what this setting sends beside a model has a way to the clients."""
    _check_plain_training(config, name)
    if config.run.engine != "local" or config.run.workers not in (None, 1):
        raise ConfigError(
            f"{name} has a second set of tensors beside the model, which no message of --workers or --engine ray"
            f" holds yet; {_remedy(config, name, '--workers and --engine ray')}"
        )


def check_split_halves(config: Config) -> None:
    """Nothing where halves of every client's training can be compared, as `kriging` does."""
    mixing = config.mixing
    if not measures_halves(config):
        return
    if set(mixing.share) != {"A", "B", "head"}:
        raise ConfigError(
            f"--strategy {mixing.strategy} compares all that clients train, and --share {' '.join(mixing.share)} leaves"
            " a part of it out; take --share A B head, or --strategy atlas_laplacian"
        )
    last, measured = config.training.rounds - mixing.personal_rounds, config.server.measure_round
    if measured > last and measured != ServerConfig().measure_round:
        needed = f"at most {last} with --strategy {mixing.strategy}, whose last aggregation ends that round"
        raise invalid_value("--measure-round", measured, needed)
    for flag, value in {
        "--personal-models": mixing.personal_models,
        "--second-model": mixing.second_model != "none",
        "--trainable full": config.training.trainable == "full",
        "--rerank": config.ranks.rerank,
        "--server-adapters per_cluster": config.split.server_adapters != "per_client",
        "--carry-momentum": config.images.carry_momentum,
    }.items():
        if value:
            raise ConfigError(
                f"--strategy {mixing.strategy} compares what clients train on either half of their examples, and {flag}"
                " does not go with that so far; leave it out, or take --strategy atlas_laplacian"
            )


def check_class_features(config: Config) -> None:
    """Nothing where each client can report what its head reads by class, or need not; raises `ConfigError` else."""
    from atlas_fl.data.registry import find_tasks

    strategy = config.mixing.strategy
    if not reads_features(config):
        if config.training.feature_alignment:
            raise ConfigError(
                f"--feature-alignment pulls to class means that --strategy {strategy} does not gather; take fedpac or"
                " classifier_collaboration, or leave it out"
            )
        return
    for task in find_tasks(config.data.tasks, config.data.task):
        is_cut = task.is_regression and bool(config.data.rating_cuts)  # each client calls some ratings positive
        if task.images or not (task.has_classes or is_cut):
            kind = "of images" if task.images else "a regression" if task.is_regression else "text to write"
            raise ConfigError(
                f"--strategy {strategy} compares features by classes of texts, and task {task.name!r} is {kind}; leave"
                " the task out, or take fedavg"
            )
    if "head" not in config.mixing.share:
        raise ConfigError(
            f"--strategy {strategy} combines heads, and --share {' '.join(config.mixing.share)} keeps them at the"
            " clients; add head, or take fedper"
        )
    for flag, value in {
        f"--split {config.split.split}": config.split.split != NONE,
        "--personal-models": config.mixing.personal_models,
        "--control-variates": config.training.control_variates,
        f"--second-model {config.mixing.second_model}": config.mixing.second_model != "none",
    }.items():
        if value:
            raise ConfigError(f"--strategy {strategy} and {flag} do not go together so far; leave one of them out")
