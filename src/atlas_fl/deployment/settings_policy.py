"""The settings of a server that a site accepts: `--allow`, numbers of examples; and what leaves under them.

A server's settings are checked against the site's consent (`deployment.consent`) once, when the site connects; every
job is checked against the settings (`deployment.job_policy`). Settings are bounded in what they give away and in what
they cost.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import ceil, floor, inf, sqrt
from pathlib import Path

import numpy as np

from atlas_fl.config import Config, validate
from atlas_fl.config.schema import ALL_CLASSES, AUTO, NONE, cut_setting
from atlas_fl.config.settings import settings, value_of
from atlas_fl.data.clients import ClientData
from atlas_fl.data.task import Labels, Task
from atlas_fl.deployment.consent import ALLOWANCES, Allowance, Consent, SiteChoices
from atlas_fl.errors import ConfigError, short_repr
from atlas_fl.models.registry import MODELS
from atlas_fl.planning.leakage import most_looks
from atlas_fl.setup.assembly import trainable_of
from atlas_fl.setup.options import learning_rate_of, strategy_of
from atlas_fl.sparse.masks import BY_SENSITIVITY

MOST_NAME = 255
"""Bytes of a model's name of a server: what a file system looks for without an error."""
LEAST_HELD_OUT = 5
"""Examples of a validation or test split: the score of one is its loss, and its label count its label."""
MOST_DECAY = 0.1
"""Most of learning rate times weight decay, or FedProx's mu: with more, a step undoes those before it, and an update
is of the last examples alone."""


def settings_here(config: Config, chosen: SiteChoices) -> Config:
    """A server's settings as a site works with them: with its own task, device and places, and no path of the server.

    Of plug-ins it loads those that its owner names, and none that the server names.

    Raises an `AtlasError` for settings that `atlas serve` itself would refuse.
    """
    task = chosen.task
    device = chosen.device
    data = replace(
        config.data,
        data_dir=chosen.data_dir,
        tasks=() if "=" in task else (task,),
        task=(task,) if "=" in task else (),
        devices=() if "=" in device else (device,),
        device=(device,) if "=" in device else (),
    )
    model = replace(config.model, model=chosen.model or config.model.model, init_adapter=None)
    # who has a whole task has no part of its classes
    images = config.images if chosen.part is not None else replace(config.images, nc=ALL_CLASSES)
    # no server says where a site reads secrets
    run = replace(config.run, runs_dir="runs", name=None, secrets=None, plugin=chosen.plugin)
    # a text can be guessed from its states, and no server decides what of them stays on a site's disk
    training = replace(config.training, prefix_disk_gb=0.0)
    here = replace(config, data=data, model=model, images=images, training=training, run=run)
    settings = validate(here, at_sites=True)
    return replace(settings, sparse=replace(settings.sparse, mask_file=None))


def check_settings(config: Config, consent: Consent, *, client: ClientData, device: str) -> None:
    """Raise `ConfigError` unless a site with this data on this device agrees to these settings."""
    _check_sizes(config, consent, client.task)
    needed = allowances_needed(config, client=client.name, task=client.task, device=device)
    if missing := {word: setting for word, setting in needed.items() if word not in consent.allow}:
        words = " ".join(missing)
        reasons = "; ".join(f"{word}: {ALLOWANCES[word]}" for word in missing)
        raise ConfigError(
            f"the server's settings ({', '.join(dict.fromkeys(missing.values()))}) ask more of this site than it agreed"
            f" to ({reasons}); agree with --allow {words}, or ask for other settings"
        )
    _check_examples(config, consent, task=client.task, labels=client.train.label)
    _check_held_out({"validation": len(client.validation), "test": len(client.test)})
    _check_rounds(config, consent, examples=len(client.train))


def allowances_needed(config: Config, *, client: str, task: Task, device: str) -> dict[Allowance, str]:
    """The words without which a site of this name, task and device cannot take part, each with the setting behind it.

    With `auto`, which cuts a device that cannot hold the model, the site has to agree to a cut before it is known.
    """
    split = config.split
    needed = dict[Allowance, str]()
    cuts = f"--split {short_repr(split.split)}"
    if cut_setting(split.split, client=client, task=task.name, device=device) != NONE:
        needed["cut"] = cuts
        if split.head == "server":
            needed["labels"] = cuts
    if split.topology == "paired":
        needed["hosting"] = f"{cuts} --topology paired"
    if config.optimizer(images=task.images) == "sgd":
        needed["linear-steps"] = "--optimizer sgd"
    if config.training.trained_parts != "all":
        needed["partial-training"] = f"--trained-parts {config.training.trained_parts}"
    return needed


def _check_rounds(config: Config, consent: Consent, *, examples: int) -> None:
    """Raise `ConfigError` unless a site with so many training examples agrees to so many rounds.

    Of a share of the clients in each round (`--participation`) that many rounds are expected of it, and four standard
    deviations more. `JobPolicy` holds the server to it.
    """
    training = config.training
    most = most_rounds(consent, examples=examples)
    mean = training.rounds * training.participation
    expected = min(training.rounds, ceil(mean + 4 * sqrt(mean * (1 - training.participation))))
    if expected > most:
        share = "" if training.participation == 1 else f" with --participation {training.participation:g}"
        raise ConfigError(
            f"the server's --rounds {training.rounds}{share} may train this site {expected} times on its"
            f" {examples} examples; allowed: {most} (--max-rounds-per-example {consent.max_rounds_per_example:g}),"
            " because a server that chooses the models can read texts out of about as many updates as there are"
            " examples; bring more data, ask for fewer rounds, or raise --max-rounds-per-example"
        )


def most_rounds(consent: Consent, *, examples: int) -> int:
    """Most rounds in which a site with so many training examples trains."""
    return max(1, floor(consent.max_rounds_per_example * examples))


def _check_held_out(counts: Mapping[str, int]) -> None:
    """Raise `ConfigError` unless the scores and label counts of each split are of more than a few examples."""
    for split, count in counts.items():
        if count < LEAST_HELD_OUT:
            raise ConfigError(
                f"the {split} split of this site has {count} examples; allowed: at least {LEAST_HELD_OUT}, or its"
                " scores and the counts of its labels show single ones; bring more data"
            )


def check_model_name(name: str, consent: Consent) -> None:
    """Raise `ConfigError` unless a model that a server names is of this package's list or lies here."""
    if name.startswith("~") or len(name.encode()) > MOST_NAME:
        raise ConfigError(
            f"the server's settings name the model {short_repr(name)}; a site takes names of at most {MOST_NAME} bytes,"
            " and none that begins with ~; give --model with the model you want"
        )
    is_registered = name in MODELS or any(name == model.path for model in MODELS.values())
    if is_registered or name.startswith((".", "/")) or "hub-model" in consent.allow or Path(name).exists():
        return
    raise ConfigError(
        f"the server's settings name the model {short_repr(name)}, and a site fetches no model of the hub because a"
        " server says so; give --model with the model you want, or agree with --allow hub-model"
    )


def _check_examples(config: Config, consent: Consent, *, task: Task, labels: Labels) -> None:
    """Raise `ConfigError` unless enough training examples of this site are behind all that leaves it.

    So many are behind each thing, and by so many at least two of them differ over the whole run: what is made of some
    of the examples, held against what is made of others, shows the difference. `labels` are those of all its training
    examples.
    """
    counts_by_use = {**_behind(config, task, len(labels)), **_behind_report(config, labels)}
    for what, count in counts_by_use.items():
        if count < consent.least_examples:
            raise ConfigError(
                f"{count} training examples would be behind {what} of this site; allowed: at least"
                f" {consent.least_examples}, or what leaves it shows single examples; bring more data, ask for other"
                " settings, or lower --least-examples"
            )
    subsets = sorted(_behind(config, task, len(labels)).items(), key=lambda item: item[1])
    for (few, fewer), (many, more) in pairwise(subsets):
        if 0 < more - fewer < consent.least_examples:
            raise ConfigError(
                f"{more - fewer} training examples would be behind {many} of this site and not behind {few}; allowed:"
                f" none, or at least {consent.least_examples}, or the difference of the two shows single examples; ask"
                " for other settings, or lower --least-examples"
            )


def _behind(config: Config, task: Task, examples: int) -> dict[str, int]:
    """Most training examples that are behind each thing that leaves the site."""
    size = config.training.batch_size
    steps = config.images.local_steps
    counts_by_use = {"the census": examples, "an update": examples if steps is None else min(examples, steps * size)}
    if trainable_of(config, [task]) == "full" and asks_sensitivity(config):
        counts_by_use["the scores of weights"] = min(examples, config.sparse.calibration_examples)
    if takes_fingerprints(config, task):
        phase = config.clustering
        passes = phase.fingerprint_steps if phase.fingerprint == "delta" else phase.fingerprint_batches
        taken = examples if phase.fingerprint_samples is None else min(examples, phase.fingerprint_samples)
        counts_by_use["a fingerprint"] = min(taken, 2 * passes * size)
    return counts_by_use


def _behind_report(config: Config, labels: Labels) -> dict[str, int]:
    """The same for the report that the rule asks for beside updates: a half, or the means of the smallest class."""
    method = strategy_of(config)
    if method.report == "none":
        return {}
    steps = config.images.local_steps
    most = None if steps is None else steps * config.training.batch_size
    return dict(method.examples_behind(np.asarray(labels), most=most))


def takes_fingerprints(config: Config, task: Task) -> bool:
    """Return whether clients of this task are asked for fingerprints: for clusters, or as a warm-up of adapters."""
    warms_up = config.clustering.fingerprint == "delta" and trainable_of(config, [task]) == "lora"
    return strategy_of(config).clustered or warms_up


def asks_sensitivity(config: Config) -> bool:
    """Return whether clients with whole models score weights for a mask."""
    return config.sparse.mask_file is None and config.sparse.mask in BY_SENSITIVITY


def _check_sizes(config: Config, consent: Consent, task: Task) -> None:
    for setting in settings().values():
        most = inf if setting.range is None else setting.range.at_site
        value = value_of(config, setting.name) if most < inf else None
        largest = max(value, default=0) if isinstance(value, tuple) else value
        if largest is not None and largest > most:
            raise ConfigError(
                f"the server's {setting.flag} is {short_repr(largest)}; a site takes at most {most:g}; ask for"
                " other settings"
            )
    rate = learning_rate_of(config, with_images=task.images)
    for name in ("weight_decay", "proximal_mu"):
        decay = rate * getattr(config.training, name)
        if decay > MOST_DECAY:
            raise ConfigError(
                f"the server's --lr times {settings()[name].flag} is {decay:g}; a site takes at most {MOST_DECAY:g},"
                " because with more an update shows the last examples alone; ask for other settings"
            )
    size = config.clustering.sketch_dim
    if takes_fingerprints(config, task) and size > consent.most_sketch:
        raise ConfigError(
            f"the server's --sketch-dim is {size:,}; this site's sketches have at most {consent.most_sketch:,} numbers,"
            " because longer ones give away more; ask for other settings, or raise --most-sketch"
        )


def what_leaves(config: Config, *, client: ClientData, device: str, blocks: int) -> tuple[str, ...]:
    """Lines on the data that leave this site under settings that it has accepted, and on those that never do."""
    task = client.task
    words = allowances_needed(config, client=client.name, task=task, device=device)
    method = strategy_of(config)
    report = "" if method.report == "none" else f"; {method.report_words}"
    sent = (_sent_whole if trainable_of(config, [task]) == "full" else _sent_adapters)(config, task) + report
    counts = "" if task.images else "token lengths, "
    label_statistics = "labels' names and counts" if task.has_classes else "mean and spread of its labels"
    usual = f"how many examples each split has, test too, their {counts}{label_statistics}; scores, losses, seconds"
    private_data = "images" if task.images else "texts, tokens"
    filters = " ".join(config.training.update_filter)
    noise = f"filtered by --update-filter {filters}" if filters else "without noise"
    may_show = (
        f"what a hostile server may still learn: updates are sums over this site's examples, {noise} and without"
        f" secure sums; who chooses the models can learn {'images' if task.images else 'training texts'} from them, the"
        " more the more rounds there are"
    )
    lines = [f"leaves this site: {sent}; {usual}"]
    if "cut" not in words:
        besides = " but as these means" if "means" in report else ""
        return (*lines, f"is never sent: {private_data}, activations{besides}, the label of an example", may_show)
    where = cut_setting(config.split.split, client=client.name, task=task.name, device=device)
    at = "one of the model's blocks, if this device cannot hold all," if where == AUTO else f"block {where} of {blocks}"
    given = "and the label of each" if "labels" in words else "without their labels"
    return (
        *lines,
        f"leaves it too, as agreed: the activations of every example at {at} {given}: nearly all of the text can be"
        " read in them"
        + (", also by other sites" if "hosting" in words else "")
        + _noise_line(config, len(client.train)),
        "is never sent: the files of its data" + ("" if "labels" in words else ", the label of an example"),
        may_show,
    )


def _noise_line(config: Config, examples: int) -> str:
    """The effective noise on a cut after as many looks as a server may take, in words."""
    noise = config.split.wire_noise
    if not noise:
        return ""
    looks = most_looks(config, examples=examples)
    most = max(looks.values())
    by_split = ", ".join(f"{count} of {split}" for split, count in looks.items())
    return (
        f"; the noise of --wire-noise {noise:g} averages away: a server may take up to {most} looks at a row"
        f" ({by_split}), after which it is {noise / sqrt(most):.2g}"
    )


def _sketches(config: Config, task: Task) -> str:
    if not takes_fingerprints(config, task):
        return ""
    labels = "" if config.clustering.merge_similarity is None else ", one of how labels vary with features"
    return f"two sketches of {config.clustering.sketch_dim:,} numbers{labels}, "


def _sent_adapters(config: Config, task: Task) -> str:
    names = {"A": "the adapters' factors A", "B": "the adapters' factors B", "head": "the head"}
    trained = ", ".join(names[part] for part in config.mixing.share)
    if {"A", "B"} <= set(config.mixing.share):
        trained = "the adapters and the head" if "head" in config.mixing.share else "the adapters"
    sketches = _sketches(config, task)
    warm = f"{trained} after a warm-up, " if sketches and config.clustering.fingerprint == "delta" else ""
    return f"after each round {trained} that it trained; for the plan {sketches}{warm}the importance of each block"


def _sent_whole(config: Config, task: Task) -> str:
    fits_heads = task.images and config.images.head_first == "ridge"
    sketches = _sketches(config, task)
    heads = sketches + ("sums of its images' features by class, " if fits_heads else "")
    scores = "a score of each weight, " if asks_sensitivity(config) else ""
    trained = "the weights under the mask" if config.sparse.has_mask else "the weights"
    return f"before round one {heads}{scores}after each round {trained} that it trained"
