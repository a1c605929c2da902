"""Check of a server's settings against a site's consent, and what leaves under them.

A server's settings are checked against the site's consent (`deployment.consent`) once, when the site connects; every
job is checked against the settings (`deployment.job_policy`). Settings are bounded in what they give away and in what
they cost.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from math import ceil, floor, inf, sqrt
from pathlib import Path

import numpy as np

from atlas_fl.client.privacy import delta_of, noise_multiplier
from atlas_fl.config import Config, config_hash, validate
from atlas_fl.config.schema import ALL_CLASSES, AUTO, NONE, DataConfig, cut_setting
from atlas_fl.config.settings import settings, value_of
from atlas_fl.data.clients import ClientData
from atlas_fl.data.task import Task
from atlas_fl.data.user_files import described_task, with_labels, with_task_of
from atlas_fl.deployment.consent import ALLOWANCES, Allowance, SiteChoices
from atlas_fl.errors import ConfigError, short_repr
from atlas_fl.models.files import cached_folder
from atlas_fl.models.registry import MODELS
from atlas_fl.planning.leakage import most_looks
from atlas_fl.runtime.protocol.client_metadata import LabelName
from atlas_fl.runtime.protocol.messages import read
from atlas_fl.runtime.transport.certificates import public_key_of
from atlas_fl.secure_sums import KeyBook
from atlas_fl.setup.assembly import trainable_of
from atlas_fl.setup.options import keeps_models, learning_rate_of, strategy_of, train_options
from atlas_fl.sparse.masks import BY_SENSITIVITY

MOST_NAME = 255
"""Bytes of a model's name of a server: what a file system looks for without an error."""
LEAST_HELD_OUT = 5
"""Examples of a validation or test split: the score of one is its loss, and its label count its label."""
MOST_DECAY = 0.1
"""Most of learning rate times weight decay, or FedProx's mu: with more, a step undoes those before it, and an update
is of the last examples alone."""
MOST_DELTA = 1e-3
"""Most delta of `--dp client` where a site names none: below one over up to a thousand sites."""


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
        # who has a whole task deals out nothing
        partition=config.data.partition if chosen.part is not None else DataConfig().partition,
        devices=() if "=" in device else (device,),
        device=(device,) if "=" in device else (),
    )
    model = replace(config.model, model=chosen.model or config.model.model, init_adapter=None)
    # who has a whole task has no part of its classes
    images = config.images if chosen.part is not None else replace(config.images, nc=ALL_CLASSES)
    # no server says where a site reads secrets
    run = replace(config.run, runs_dir="runs", name=None, secrets=None, plugin=chosen.plugin)
    settings = validate(replace(config, data=data, model=model, images=images, run=run), at_sites=True)
    return replace(settings, sparse=replace(settings.sparse, mask_file=None))


def with_classes_of(task: str, told: object, *, client: str) -> str:
    """A site's task with the classes that a server tells of one of its name, unless it has classes of its own.

    Of several tasks of a column it becomes the one behind which the client is called, where the server tells that one.
    So a site takes part that has no example of some class; one of a class that the server has not is refused.
    Raises `ProtocolError` where what is told are no names of classes.
    """
    known = told if isinstance(told, Mapping) else {}
    task = with_task_of(task, client, tasks=[name for name in known if isinstance(name, str)])
    classes = known.get(described_task(task), ())
    return with_labels(task, read(tuple[LabelName, ...], classes, "the classes of the server: "))


def check_settings(config: Config, consent: SiteChoices, *, client: ClientData, device: str) -> None:
    """Raise `ConfigError` unless a site with this data on this device agrees to these settings."""
    _check_sizes(config, consent, client.task)
    if consent.secure and not config.mixing.secure:
        raise ConfigError(
            "this site takes part in secure sums alone (--secure), and the server's settings have none; ask for"
            " settings with --secure"
        )
    needed = allowances_needed(config, client=client.name, task=client.task, device=device)
    if missing := {word: setting for word, setting in needed.items() if word not in consent.allow}:
        words = " ".join(missing)
        reasons = "; ".join(f"{word}: {ALLOWANCES[word]}" for word in missing)
        raise ConfigError(
            f"the server's settings ({', '.join(dict.fromkeys(missing.values()))}) ask more of this site than it agreed"
            f" to ({reasons}); agree with --allow {words}, or ask for other settings"
        )
    _check_examples(config, consent, client)
    _check_privacy(config, consent, client)
    # of a share of the clients in each round the expected rounds, and four standard deviations more
    mean = config.training.rounds * config.training.participation
    expected = min(config.training.rounds, ceil(mean + 4 * sqrt(mean * (1 - config.training.participation))))
    examples = len(client.train)
    why = "a server that chooses the models can read texts out of about as many updates as there are examples"
    what = f"rounds in which the server's --rounds may train this site on its {examples} examples"
    option = "--max-rounds-per-example, or bring more data"
    _check(what, expected, most=most_rounds(consent, examples=examples), why=why, option=option)


def key_book(config: Config, *, ca: bytes) -> KeyBook:
    """The public keys for secure sums of sites whose certificates this authority has signed."""
    return KeyBook(run=config_hash(config), verifier=lambda name, pem: public_key_of(pem, name=name, ca=ca))


def _check(what: str, value: float, *, least: float = -inf, most: float = inf, why: str = "", option: str = "") -> None:
    """Raise `ConfigError` unless a number that settings make of a site or its data is in the range of the site."""
    if least <= value <= most:
        return
    allowed = f"at least {least:,}" if value < least else f"at most {most:,}"
    because = f", because {why}" if why else ""
    change = f", or change {option}" if option else ""
    raise ConfigError(f"{what}: {value:,}; allowed: {allowed}{because}; ask for other settings{change}")


def _check_privacy(config: Config, consent: SiteChoices, client: ClientData) -> None:
    """Raise `ConfigError` unless differential privacy is as this site asks for, at most."""
    training = config.training
    if consent.dp not in ("none", training.dp):
        raise ConfigError(
            f"the server's --dp is {training.dp}, and this site joins with --dp {consent.dp}; ask for other settings,"
            " or leave it out"
        )
    if consent.dp != "none":
        if consent.epsilon is None:
            raise ConfigError(f"--dp needs --epsilon, the most to be spent here; the server's is {training.epsilon:g}")
        _check("the server's --epsilon", training.epsilon, most=consent.epsilon, option="--epsilon")
    if consent.dp == "client":
        if training.delta is None:
            raise ConfigError("the server's --delta follows from its number of sites; ask for settings with --delta")
        _check("the server's --delta", training.delta, most=consent.delta or MOST_DELTA, option="--delta")
    if training.dp != "example":
        return
    examples = len(client.train)
    most = consent.delta or delta_of(examples, None)
    _check("the server's --delta", delta_of(examples, training.delta), most=most, option="--delta")
    noise_multiplier(examples, train_options(config, with_images=client.task.images))  # it can be found


def _check_sizes(config: Config, consent: SiteChoices, task: Task) -> None:
    for setting in settings().values():
        if setting.range is not None and setting.range.at_site < inf:
            value = value_of(config, setting.name)
            largest = max(value, default=0) if isinstance(value, tuple) else value
            _check(f"the server's {setting.flag}", largest or 0, most=setting.range.at_site)
    rate = learning_rate_of(config, with_images=task.images) * max(1.0, config.training.head_rate)
    for name in ("weight_decay", "proximal_mu"):
        what = f"the server's --lr times {settings()[name].flag}"
        why = "with more an update shows the last examples alone"
        _check(what, rate * getattr(config.training, name), most=MOST_DECAY, why=why)
    if takes_fingerprints(config, task):
        why = "longer sketches give away more"
        size = config.clustering.sketch_dim
        _check("the server's --sketch-dim", size, most=consent.most_sketch, why=why, option="--most-sketch")


def _check_examples(config: Config, consent: SiteChoices, client: ClientData) -> None:
    """Raise `ConfigError` unless enough examples of this site are behind all that leaves it.

    So many are behind each thing, and by so many at least two of them differ over the whole run: what is made of some
    of the examples, held against what is made of others, shows the difference.
    """
    subsets = _behind(config, client.task, len(client.train))
    ordered = sorted(subsets.items(), key=lambda item: item[1])
    differences = {
        f"{many} and not {few}": more - fewer for (few, fewer), (many, more) in pairwise(ordered) if more > fewer
    }
    why = "what leaves this site would show single examples"
    steps, method = config.images.local_steps, strategy_of(config)
    most = None if steps is None else steps * config.training.batch_size
    reported = {} if method.report == "none" else method.examples_behind(np.asarray(client.train.label), most=most)
    for what, count in {**subsets, **reported, **differences}.items():
        least = consent.least_examples
        option = "--least-examples, or bring more data"
        _check(f"training examples behind {what}", count, least=least, why=why, option=option)
    for split, data in (("validation", client.validation), ("test", client.test)):
        _check(f"examples of this site's {split} split", len(data), least=LEAST_HELD_OUT, why=why, option="the data")


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
    if config.optimizer(images=task.images) == "sgd":
        needed["linear-steps"] = "--optimizer sgd"
    if config.training.trained_parts != "all":
        needed["partial-training"] = f"--trained-parts {config.training.trained_parts}"
    return needed


def most_rounds(consent: SiteChoices, *, examples: int) -> int:
    """Most rounds in which a site with so many training examples trains."""
    return max(1, floor(consent.max_rounds_per_example * examples))


def find_servers_model(name: str, consent: SiteChoices, *, is_pinned: bool) -> str:
    """The name or folder under which this site reads a model that its server names; the hub is not asked for it.

    Without `hub-model` that is a model of this package's list whose files are here. Digests of a model leave before
    anything else does, so a folder counts only where the site's own settings name it (`is_pinned`).
    Raises `ConfigError` for any other.
    """
    if name.startswith("~") or len(name.encode()) > MOST_NAME:
        raise ConfigError(
            f"the server's settings name the model {short_repr(name)}; a site takes names of at most {MOST_NAME} bytes,"
            " and none that begins with ~; give --model with the model you want"
        )
    source = MODELS[name].path if name in MODELS else name
    # a plug-in, which the owner has named, may list a folder
    is_own = name in MODELS and (source == "embedded" or Path(source).is_absolute())
    is_path = not is_own and (source.startswith((".", "/")) or Path(source).exists())
    if is_path and not is_pinned:
        raise ConfigError(
            f"the server's settings name the model {short_repr(name)}, and a path of the server means nothing here,"
            " because digests of the files would leave; give --model PATH with the model you want, or the agreed"
            " settings with --config"
        )
    if is_path or is_own or "hub-model" in consent.allow:
        return name
    # any other model of the cache is the owner's own affair
    folder = cached_folder(source) if any(source == model.path for model in MODELS.values()) else None
    if folder is None:
        raise ConfigError(
            f"the server's settings name the model {short_repr(name)}, which is not here, and a site fetches no model"
            " of the hub because a server says so; give --model with the model you want, or agree with --allow"
            " hub-model"
        )
    return str(folder)


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


def takes_fingerprints(config: Config, task: Task) -> bool:
    """Return whether clients of this task are asked for fingerprints: for clusters, or as a warm-up of adapters."""
    warms_up = config.clustering.fingerprint == "delta" and trainable_of(config, [task]) == "lora"
    return strategy_of(config).clustered or warms_up


def asks_sensitivity(config: Config) -> bool:
    """Return whether clients with whole models score weights for a mask."""
    return config.sparse.mask_file is None and config.sparse.mask in BY_SENSITIVITY


def what_leaves(config: Config, *, client: ClientData, device: str, blocks: int) -> tuple[str, ...]:
    """Lines on the data that leave this site under settings that it has accepted, and on those that never do."""
    task = client.task
    words = allowances_needed(config, client=client.name, task=task, device=device)
    method = strategy_of(config)
    report = "" if method.report == "none" else f"; {method.report_words}"
    lengths = "" if task.images else ", their token lengths"
    labels = "labels' names and counts" if task.num_labels > 1 else "mean and spread of its labels"
    filters = " ".join(config.training.update_filter)
    noise = f"filtered by --update-filter {filters}" if filters else "without noise"
    if config.training.dp == "example":
        noise = f"with noise of epsilon {config.training.epsilon:g} for each example, which covers training alone,"
    secure = config.mixing.secure
    if config.training.dp == "client" and secure:
        noise = f"with noise of epsilon {config.training.epsilon:g} for this site, of which it adds its share,"
    seen = "seen in sums over sites alone" if secure else "without secure sums"
    masked = ", of which the server sees the sums over three sites or more alone" if secure else ""
    counts = f"how many examples each split has, test too{lengths}, {labels}"
    leaves = [
        f"leaves this site: after each round {_trained(config, task)} that it trained{masked}; for the plan"
        f" {', '.join((*_for_the_plan(config, task), counts))}{report}; scores, losses, seconds"
    ]
    never = "images, activations" if task.images else "texts, tokens, activations"
    never += f"{' but as these means' if 'means' in report else ''}, the label of an example"
    never += ", the model of its own" if keeps_models(config) else ""
    if "cut" in words:
        where = cut_setting(config.split.split, client=client.name, task=task.name, device=device)
        place = "a block, if this device cannot hold all," if where == AUTO else f"block {where} of {blocks}"
        given = "and the label of each" if "labels" in words else "without their labels"
        leaves.append(
            f"leaves it too, as agreed: the activations of every example at {place} {given}: nearly all of the text can"
            f" be read in them{_noise_line(config, len(client.train))}"
        )
        never = "the files of its data" + ("" if "labels" in words else ", the label of an example")
    return (
        *leaves,
        f"is never sent: {never}",
        f"what a hostile server may still learn: updates are sums over this site's examples, {noise} and {seen};"
        f" who chooses the models can learn {'images' if task.images else 'training texts'} from them, the more the"
        " more rounds there are",
    )


def _trained(config: Config, task: Task) -> str:
    """The tensors that leave after a round, in words."""
    if trainable_of(config, [task]) == "full":
        return "the weights under the mask" if config.sparse.has_mask else "the weights"
    if set(config.mixing.share) == {"A", "B", "head"}:
        return "the adapters and the head"
    names = {"A": "the adapters' factors A", "B": "the adapters' factors B", "head": "the head"}
    return " and ".join(names[part] for part in config.mixing.share)


def _for_the_plan(config: Config, task: Task) -> Iterator[str]:
    """Each thing that leaves before round one, in words."""
    is_full = trainable_of(config, [task]) == "full"
    if takes_fingerprints(config, task):
        yield f"two sketches of {config.clustering.sketch_dim:,} numbers"
        if config.clustering.fingerprint == "delta" and not is_full:
            yield f"{_trained(config, task)} after a warm-up"
    if not is_full and config.measures_importance:
        yield "the importance of each block"
    if is_full and task.images and config.images.head_first == "ridge":
        yield "sums of its images' features by class"
    if is_full and asks_sensitivity(config):
        yield "a score of each weight"


def _noise_line(config: Config, examples: int) -> str:
    """The effective noise on a cut after as many looks as a server may take, in words."""
    noise = config.split.wire_noise
    if not noise:
        return ""
    most = max(most_looks(config, examples=examples).values())
    return (
        f"; the noise of --wire-noise {noise:g} averages away: a server may take up to {most} looks at a row, after"
        f" which it is {noise / sqrt(most):.2g}"
    )
