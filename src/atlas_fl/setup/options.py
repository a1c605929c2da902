"""From a config to the options of clients, rules, cuts and attackers, and to the clients that a round samples."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.aggregation.secure_mean import SumSettings
from atlas_fl.client.options import FingerprintOptions, ImportanceOptions, SensitivityOptions, TrainOptions
from atlas_fl.config import Config, config_hash
from atlas_fl.config.methods import knob_values, method_class, rule_of
from atlas_fl.config.schema import ALL_CLASSES
from atlas_fl.config.settings import settings, value_of
from atlas_fl.data.clients import BY_CLASSES, ClientData
from atlas_fl.data.task import Task
from atlas_fl.errors import ConfigError
from atlas_fl.methods.method import WHOLE_MODELS, Method, Part
from atlas_fl.methods.registry import ALIASES, find_method, parts_of, published
from atlas_fl.methods.second_model import SecondModel
from atlas_fl.models.lora import lora_scale
from atlas_fl.models.registry import suggested_lr
from atlas_fl.rng import generator
from atlas_fl.runtime.attacks import ATTACKS, HostileEngine, choose_attackers
from atlas_fl.runtime.engine import Engine
from atlas_fl.split.channel import Cut


def scale_of(config: Config) -> Callable[[int], float]:
    """LoRA's factor of a rank under this config."""
    return partial(lora_scale, **lora_of(config))


def lora_of(config: Config) -> dict[str, Any]:
    """The arguments of `lora_scale` under this config."""
    return {"alpha": config.model.lora_alpha, "rslora": config.model.rslora}


def settings_for(config: Config, options: type) -> dict[str, Any]:
    """The values of this config's settings after which fields of an options class are named, by name."""
    return {field.name: value_of(config, field.name) for field in fields(options) if field.name in settings()}


_DEALT = (
    *("clients_per_task", "samples", "validation_samples", "test_samples", "partition", "dirichlet_alpha"),
    *("seed", "shuffle_labels", "client_sizes", "test_mix"),
)


def dealing_of(config: Config) -> dict[str, Any]:
    """The arguments with which `make_clients` deals out tasks under this config."""
    values = {name: value_of(config, name) for name in _DEALT}
    if config.images.nc == ALL_CLASSES:
        return values
    return {**values, "partition": BY_CLASSES, "classes_per_client": int(config.images.nc)}


def strategy_of(config: Config) -> Method:
    """The method that aggregates, with this config's numbers."""
    return find_method(rule_of(config), **method_values(config))


def sum_settings(config: Config) -> SumSettings:
    """The settings of secure sums, at the server as at its sites."""
    mixing, run = config.mixing, config_hash(config)
    return SumSettings(run=run, bound=mixing.secure_range, max_share=config.robust.max_share, share=mixing.share)


def parts_of_config(config: Config) -> tuple[Part, ...]:
    """The method and what else this config switches on beside it (second models, control variates)."""
    return parts_of(strategy_of(config), method_values(config))


def method_values(config: Config) -> dict[str, Any]:
    """Values of this config's settings that methods are made from, by name."""
    computed = {"scale": scale_of(config), "lr": adapter_learning_rate(config)}
    return {**knob_values(config), **settings_for(config, StrategyOptions), **vars(config.server), **computed}


def second_part(config: Config) -> SecondModel | None:
    """The part of these settings that has clients train a second model, or go on with their own."""
    return next((part for part in parts_of_config(config) if isinstance(part, SecondModel)), None)


def paper_notes(config: Config, tasks: Sequence[Task], *, is_full: bool) -> tuple[str, ...]:
    """A line on what differs between a method here and in its paper; none for one without a paper."""
    strategy = ALIASES.get(config.mixing.strategy, config.mixing.strategy)
    clauses = published(strategy).differs.split("; ")
    if not any(clauses):
        return ()
    robust, clip = config.robust, config.training.clip
    of_whole = WHOLE_MODELS in clauses
    differences = {
        f"adapters and heads train, not {WHOLE_MODELS}": of_whole and not is_full,
        **dict.fromkeys([clause for clause in clauses if clause not in (WHOLE_MODELS, "nothing")], True),
        "tasks have heads of their own, averaged inside their task": "head" in config.mixing.share
        and len({task.name for task in tasks}) > 1,
        "clients train with AdamW (--optimizer sgd)": of_whole and config.optimizer(images=tasks[0].images) == "adamw",
        f"gradients are clipped at {clip:g} (--clip 0)": of_whole and clip > 0,
        "an update that is far larger than others is bounded (--norm-bound off)": robust.norm_bound != "off"
        and not config.needs_sums,
        f"no client weighs more than {robust.max_share:g} (--max-share 1)": robust.max_share < 1,
    }
    words = [difference for difference, holds in differences.items() if holds]
    return (f"{strategy}, other than in its paper: {'; '.join(words)}",) if words else ()


def with_attackers(engine: Engine, config: Config, clients: Sequence[ClientData]) -> Engine:
    """Wrap the engine so that attackers act as this config says; the same engine where there are none."""
    attack = config.attack
    if attack.attack == "none":
        return engine
    return HostileEngine(
        engine=engine,
        attack=ATTACKS[attack.attack],
        attackers=configured_attackers(config, [client.name for client in clients]),
        size=attack.attack_scale,
        space=strategy_of(config).options,
        seed=config.run.seed,
        examples={client.name: len(client.train) for client in clients},
    )


def configured_attackers(config: Config, names: Sequence[str]) -> tuple[str, ...]:
    """The clients among these that attack under this config."""
    attack = config.attack
    return choose_attackers(attack.attackers, names, seed=config.run.seed) if attack.attack != "none" else ()


def sample_clients(config: Config, names: Sequence[str], *, round: int) -> tuple[str, ...]:
    """The clients that train in this round, at least one, in the clients' order: a function of seed and round.

    With `--noise-bands` b they are drawn from one of b parts of all, by turns.

    Raises:
        ConfigError: a part has fewer clients than take part in a round.
    """
    bands, share, seed = config.training.noise_bands, config.training.participation, config.run.seed
    # the nearest whole number, halves up; Python's own rounding goes to the even one
    count, places = max(1, int(share * len(names) + 0.5)), np.arange(len(names))
    if bands > 1:
        places = generator(seed, "bands").permutation(places)[(round - 1) % bands :: bands]
        if count > (fewest := len(names) // bands):
            raise ConfigError(
                f"--noise-bands is {bands}, so {fewest} of {len(names)} clients come by turns, and --participation"
                f" {share:g} is {count}; allowed: bands times clients of a round up to {len(names)}; lower one of them"
            )
    chosen = generator(seed, "sample", round).choice(places, size=count, replace=False)
    return tuple(names[index] for index in sorted(chosen))


def is_reclustered(config: Config, number: int) -> bool:
    """Return whether clients are clustered again before the round of this number."""
    every = config.clustering.recluster_every
    return strategy_of(config).clustered and every > 0 and number > 1 and (number - 1) % every == 0


FULL_TEXT_RATE = 0.1
"""All weights of a text model by default train at this share of the adapters' learning rate: 1e-4 for MiniLM, 3e-5 for
BERT, whose authors take 2e-5 to 5e-5 (Devlin et al. 2019, arXiv:1810.04805)."""


def learning_rate_of(config: Config, *, with_images: bool) -> float:
    """The peak learning rate of training: the user's, or the one that suits the model and what of it trains."""
    full_text = config.training.lr is None and not with_images and config.trainable(images=False) == "full"
    return adapter_learning_rate(config) * config.training.rate_factor * (FULL_TEXT_RATE if full_text else 1.0)


def adapter_learning_rate(config: Config) -> float:
    """The peak learning rate of adapters, which warm up before round one: the user's, or the one of the model."""
    return suggested_lr(config.model.model) if config.training.lr is None else config.training.lr


def train_options(config: Config, *, with_images: bool) -> TrainOptions:
    """The options of local training of text tasks, or of image tasks, in every round of this config."""
    steps, method, parts = config.images.local_steps, method_class(config), config.training.trained_parts
    is_personal = config.mixing.personal_models
    # second models have options of their own
    second_model = config.mixing.second_model if is_personal else "none"
    # a clip that follows the norms is the server's
    filters = config.training.update_filter[: -1 if config.training.clip_quantile else None]
    values: dict[str, Any] = {
        **settings_for(config, TrainOptions),
        **optimizer_options(config, config.optimizer(images=with_images)),
        # so many passes hold so many steps, however few examples a client has
        "epochs": steps or config.training.local_epochs,
        "max_steps": steps,
        "lr": learning_rate_of(config, with_images=with_images),
        # under rules by class features (FedPAC) the head is its last layer, which reads them
        "trained_parts": "last_layer_then_rest" if parts == "head_then_rest" and method.head_is_last_layer else parts,
        "update_filter": filters if method.communicates else (),
        "dp": "example" if config.training.dp == "example" else "none",  # of clients it is the server's
        "pays_halves": config.training.dp == "example" and method.report == "halves",
        "second_model": "frozen" if method.holds_frozen else second_model,
        "second_weight": config.server.second_weight if is_personal else TrainOptions.second_weight,
        "hash_loaded": config.run.audit,
        "rate_by_round": with_images and config.trainable(images=True) == "full",
    }
    return TrainOptions(**values)


def share_of(config: Config, options: TrainOptions, *, round: int) -> tuple[str, ...]:
    """Parts of a model trained with these options that leave its client, across machines.

    Nothing of a second model leaves, nor of a model of one's own whose round is summed (`--secure`).
    """
    mixing = config.mixing
    is_second = not mixing.personal_models and options.second_model not in ("none", "frozen")
    is_own = mixing.personal_models or options.is_personal(round)
    return () if is_second or (mixing.secure and is_own) else mixing.share


def keeps_models(config: Config) -> bool:
    """Return whether clients have models of their own that never leave them, across machines."""
    mixing = config.mixing
    is_second = not mixing.personal_models and mixing.second_model != "none"
    return is_second or (mixing.secure and (mixing.personal_models or mixing.personal_rounds > 0))


def optimizer_options(config: Config, name: str) -> dict[str, Any]:
    """The optimizer of this name with the numbers that only it has."""
    if name == "adamw":
        return {"optimizer": name, "momentum": 0.0, "nesterov": False}
    return {"optimizer": name, "momentum": config.images.momentum, "nesterov": config.images.nesterov}


def cut_of(config: Config, blocks: int | None) -> Cut | None:
    """The cut of a client with this number of blocks; None for a client with the whole model."""
    if blocks is None:
        return None
    split = config.split
    return Cut(blocks=blocks, wire=split.wire, noise=split.wire_noise, head=split.head)


def warmup_options(config: Config) -> TrainOptions:
    """The options of the warm-up for fingerprints: a constant learning rate, no dropout, no proximal term."""
    return TrainOptions(
        seed=config.run.seed,
        batch_size=config.training.batch_size,
        lr=adapter_learning_rate(config),
        clip=config.training.clip,
        **optimizer_options(config, config.optimizer(images=False)),
    )


IMPORTANCE_BATCHES = 4
"""Batches on which importance is measured."""


def importance_options(config: Config) -> ImportanceOptions:
    """The options with which clients measure the importance of layers."""
    return ImportanceOptions(kind=config.ranks.importance, train=warmup_options(config), batches=IMPORTANCE_BATCHES)


def sensitivity_options(config: Config, names: Iterable[str]) -> SensitivityOptions:
    """The options of scores for the mask over these parameters."""
    sparse = config.sparse
    examples, labels = sparse.calibration_examples, sparse.fisher_labels
    return SensitivityOptions(seed=config.run.seed, examples=examples, labels=labels, names=tuple(names))


def warmup_rank(config: Config) -> int:
    """The rank of the warm-up's adapters: the smallest that a layer may have."""
    return int(config.ranks.ranks) if config.ranks.ranks.isdecimal() else min(config.ranks.candidates)


def fingerprint_options(config: Config, *, round: int = 0) -> FingerprintOptions:
    """The options of fingerprints in this config: before round one, or later with twice the steps or batches."""
    factor = 2 if round else 1
    return FingerprintOptions(
        kind=config.clustering.fingerprint,
        sketch_dim=config.clustering.sketch_dim,
        train=warmup_options(config),
        batches=config.clustering.fingerprint_batches * factor,
        blocks=config.clustering.fingerprint_blocks,
        samples=config.clustering.fingerprint_samples,
        steps=config.clustering.fingerprint_steps * factor,
    )
