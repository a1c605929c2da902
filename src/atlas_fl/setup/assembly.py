"""From a config to clients, backbone and compute context; the queue of clients that join later.

An `Assembly` is what a run works with before anything is planned: clients with their data and devices, and the `Site`
that they share. Clients that `--arrive` names wait in its `JoinQueue` until their round.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from atlas_fl.client.embeddings import embed
from atlas_fl.client.job import ClientTokens, Prompts, Site, Trainable, image_tokens, initial_params
from atlas_fl.config import Config, config_hash, load_config
from atlas_fl.config.schema import NONE, DataConfig, cuts_by_name, parse_arrivals
from atlas_fl.config.settings import flag_words, settings, value_of
from atlas_fl.config.values import invalid_value
from atlas_fl.data.chat import last_answer
from atlas_fl.data.client_parts import cut_client
from atlas_fl.data.clients import ClientData, client_names, group_by, make_clients, site_client, site_of, task_of_client
from atlas_fl.data.heterogeneity import centralize, flip_classes, merge_sources, separate_sources, shift_concepts
from atlas_fl.data.registry import check_one_kind, find_tasks
from atlas_fl.data.task import Rows, Source, Task, as_texts
from atlas_fl.errors import AtlasError, BudgetError, ConfigError, ModelError, check_known
from atlas_fl.frozen import Frozen
from atlas_fl.models import chat_template, loading, peft_io, stock, tokenization
from atlas_fl.models.backbone import Backbone, block_index, model_shape, trainable_names
from atlas_fl.models.prefix_cache import CPU_CHUNK_TOKENS, CUDA_CHUNK_TOKENS, PrefixCache
from atlas_fl.models.registry import FAMILIES, Family, ModelShape
from atlas_fl.models.vision_loading import load_image_backbone, tokens_per_image
from atlas_fl.params import HEAD, LORA_A, Params, Split, split_body_and_head
from atlas_fl.partial_sharing import is_placeholder, private_digest, unshared_keys, with_placeholders
from atlas_fl.plugins import load_plugins
from atlas_fl.ranks.cost_model import LOGIT_COPIES, VALUE_BYTES, activation_bytes
from atlas_fl.ranks.devices import Device, find_devices
from atlas_fl.rng import torch_generator
from atlas_fl.runtime.attacks import ATTACKS, with_flipped_labels
from atlas_fl.runtime.protocol import model_sync
from atlas_fl.runtime.protocol.private_params import PrivateParamStore
from atlas_fl.setup.options import configured_attackers, dealing_of, scale_of
from atlas_fl.sparse.masks import Mask
from atlas_fl.split.channel import Cut
from atlas_fl.split.model import load_client_part, select_client_side
from atlas_fl.storage.assets import embedded_dir
from atlas_fl.storage.digests import check_files
from atlas_fl.storage.files import load_or_create_secret, read_secret, secret_file
from atlas_fl.storage.run_folder import RunFolder


class Newcomer(Frozen):
    """A client that is not in the plan yet."""

    client: ClientData
    device: Device
    tokens: ClientTokens


def _raise_error(_name: str, error: AtlasError) -> None:
    raise error


class JoinQueue(Frozen):
    """Queue of clients that join later; in a simulation from its config, and a rejection ends the run."""

    waiting_clients: Callable[[int], tuple[Newcomer, ...]] = lambda _: ()
    """(round) -> the clients that would take part from this round on."""
    accept_client: Callable[[str], None] = lambda _: None
    """Called with every client that is in the plan from now on."""
    reject_client: Callable[[str, AtlasError], None] = _raise_error
    """Called with (client, reason) for every client that cannot be in it."""
    exclude_client: Callable[[str, AtlasError], None] = _raise_error
    """Called with (client, reason) for every client that the plan is made without; it may join later."""


NO_LATE_CLIENTS = JoinQueue()


# Beyond this many tokens a CPU gains nothing from larger packs: the products are at the hardware's limit.
CPU_PACK_TOKENS, CUDA_PACK_TOKENS = 4096, 65536
PACK_IMAGES = 64
"""Images in a pass of a whole model without gradients, or fewer where `--pack-tokens` is fewer."""
LEAST_LENGTH = 4
"""Tokens of a text at least, of which two may be set around it; also the least `--max-length`."""
HEAD_STD = 0.02
"""Deviation of the head of a whole image model that is not fitted: what transformers draws its new layers with."""


class Assembly(Frozen):
    """The parts of a run, before anything is planned or trained."""

    config: Config
    clients: tuple[ClientData, ...]
    devices: tuple[Device, ...]
    """One for each client."""
    site: Site
    shape: ModelShape
    layer_of: dict[str, int]
    """Block of every adapted module."""
    join_queue: JoinQueue = NO_LATE_CLIENTS
    drawn_from: tuple[str, ...] = ()
    """Names among which the clients of a round are drawn, where these are more than its own."""
    uses_placeholders: bool = False
    """True if placeholders stand for parameters that clients do not share (`partial_sharing`)."""

    @cached_property
    def _draw(self) -> Callable[[str, tuple[int, ...]], Params]:
        """(task, ranks by layer) -> the initial model; clients share the newest, and a checkpoint has each once."""
        site, seed = self.site, self.config.run.seed
        tasks = {client.task.name: client.task for client in self.clients}

        def draw(task: str, ranks: tuple[int, ...]) -> Params:
            module_ranks = {name: ranks[self.layer_of[name]] for name in site.modules}
            return initial_params(site.backbone, site.modules, ranks=module_ranks, task=tasks[task], seed=seed)

        return lru_cache(maxsize=64)(draw)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The clients' names, in the order of the run."""
        return tuple(client.name for client in self.clients)

    @property
    def has_images(self) -> bool:
        """Return whether the clients' tasks are of images; else they are of texts."""
        return self.site.backbone.vision is not None

    @property
    def is_full(self) -> bool:
        """Return whether the clients train all weights."""
        return self.site.trainable == "full"

    def only_last(self) -> "Assembly":
        """The assembly of the client that came last."""
        return replace(self, clients=self.clients[-1:], devices=self.devices[-1:])

    def full_models(self) -> dict[str, Params]:
        """The initial whole model of every client: the body, with its task's head; one mapping a task."""
        body = trained_body(self.site.backbone, self.config)
        tasks = {client.task.name: client.task for client in self.clients}
        starts = {name: {**body, **self._initial_head(task)} for name, task in tasks.items()}
        return {client.name: starts[client.task.name] for client in self.clients}

    def _initial_head(self, task: Task) -> Params:
        backbone, seed = self.site.backbone, self.config.run.seed
        if backbone.vision is None:
            return initial_params(backbone, {}, ranks={}, task=task, seed=seed)
        weight = torch.empty(task.num_labels, backbone.width)
        weight.normal_(std=HEAD_STD, generator=torch_generator(seed, "head", task.name))
        return {HEAD + "bias": torch.zeros(task.num_labels), HEAD + "weight": weight}

    def initial_params(self, client: ClientData, ranks: tuple[int, ...]) -> Params:
        """The initial adapters at these ranks per layer and the head: the same for every client of a task."""
        return self._draw(client.task.name, ranks)


def recorded_config(folder: RunFolder) -> Config:
    """The config of the run in this folder, with its plug-ins loaded.

    Raises `CheckpointError` where it is not what was written.
    """
    check_files(folder, folder.config)
    config = load_config(folder.config, within=folder.path)
    load_plugins(config.run.plugin, outside=folder.path)
    return config


def source_of(config: Config) -> Source:
    """The folders that the tasks of this config are read from."""
    data_dir, share = config.data.data_dir, config.images.validation_share
    return Source(
        cache_dir=embedded_dir(), data_dir=None if data_dir is None else Path(data_dir), validation_share=share
    )


def load_clients(config: Config) -> tuple[ClientData, ...]:
    """The tasks of this config, read and dealt out to its clients; raises an `AtlasError` where they do not suffice."""
    tasks, per_task = find_tasks(config.data.tasks, config.data.task), config.data.clients_per_task
    named = [name for task, own in zip(tasks, client_names(tasks, per_task)) if task.clients for name in own]
    clients = make_clients(
        separate_sources(tasks) if config.data.one_task else tasks,
        source_of(config),
        **dealing_of(config),
        secrets=_read_secrets(config, () if config.data.centralized else named),
    )
    if config.data.one_task:
        clients = merge_sources(clients, config.data.own_share)
    if config.data.rating_cuts:
        clients = shift_concepts(clients, config.data.rating_cuts)
    clients = flip_classes(clients, config.data.flipped_clients)
    if config.data.centralized:
        clients = centralize(clients)
    attackers = configured_attackers(config, [client.name for client in clients])
    return (
        with_flipped_labels(clients, attackers) if attackers and ATTACKS[config.attack.attack].flips_labels else clients
    )


def own_client(config: Config, name: str, *, task: str, part: int | None, secret: Path) -> ClientData:
    """This site's rows under its name in the federation.

    A `part` is dealt as in a simulation of the same config. Without one the site has the
    whole task, or the rows that its data have for its name, up to the config's numbers of rows, which its secret
    chooses: the same in every run, whatever seed a server names.
    """
    client_task = task_of_client(find_tasks((), (task,)) if "=" in task else find_tasks((task,)), name)
    source, data = source_of(config), config.data
    if part is None:
        return site_client(
            client_task,
            source,
            {"train": data.samples, "validation": data.validation_samples, "test": data.test_samples},
            name=name,
            secret=load_or_create_secret(secret),
            shuffle_labels=data.shuffle_labels,
        )
    if not 0 <= part < data.clients_per_task:
        raise ConfigError(
            f"--part is {part}; allowed: 0 to {data.clients_per_task - 1}, as --clients-per-task of the server"
            " says, or leave it out where the whole task is here"
        )
    return replace(make_clients((client_task,), source, **dealing_of(config))[part], name=name)


def assemble(
    config: Config,
    *,
    clients: tuple[ClientData, ...] | None = None,
    tokens: Mapping[str, ClientTokens] | None = None,
    devices: tuple[Device, ...] | None = None,
    weights: Params | None = None,
    backbone_device: str | None = None,
    backbone: Backbone | None = None,
) -> Assembly:
    """Load the clients, or take those that are given, load the backbone and tokenise.

    `tokens` of every client and `devices`, one for each, stand in for those that the config would give, `weights` for
    those of the backbone's files, `backbone_device`, a device of torch, for the one that packs are sized for, and
    `backbone` for one that would be loaded.
    Raises an `AtlasError` for whatever the config names that is not to be had.
    """
    dealt = find_devices(config.data.devices, config.data.device) if devices is None else devices
    is_cut = clients is None and config.data.client_parts > 1
    clients = load_clients(config) if clients is None else clients
    tasks = [client.task for client in clients]
    trainable, images = trainable_of(config, tasks), any(task.images for task in tasks)
    training = config.training
    preferences = [name for name in ("dpo_beta", "orpo_lambda") if getattr(training, name) is not None]
    if tokens is None and preferences:
        _check_preferences(clients, settings()[preferences[0]].flag)
    # a CPU computes whole image models in fp16 too
    precision = "fp32" if images and trainable == "full" else config.model.precision
    default_device = pick_device(config.run.accelerator, precision=precision)
    if backbone is None:
        backbone = backbone_of(config, tasks, device=backbone_device or default_device, weights=weights)
    how: dict[str, Any] = {"trainable": trainable, "preferences": bool(preferences)}
    if tokens is None:
        tokens = {client.name: tokenise(client, backbone, config.data, **how) for client in clients}
    site = Site(
        backbone=backbone,
        data=tokens,
        targets=targets_of(config, backbone) if trainable == "lora" else (),
        scale=scale_of(config),
        max_tokens=1,
        trainable=trainable,
        first_adapted=first_adapted_block(config, backbone),
        prefix_cache=_prefix_cache(config, backbone),
        secrets=_read_secrets(config, [client.name for client in clients]),
        bf16=config.model.precision == "bf16",
        fp16=config.model.precision == "fp16",
        seed=config.run.seed,
        settings=config_hash(config),
    )
    modules = None if images and trainable == "full" else site.modules
    shape = model_shape(backbone, modules, first_adapted=site.first_adapted)
    max_tokens = pack_tokens(config, shape, cuda=default_device == "cuda")
    if modules is None:
        max_tokens = min(PACK_IMAGES, config.training.pack_tokens or PACK_IMAGES)
    site = replace(site, max_tokens=max_tokens)
    if is_cut:
        clients = _cut_clients(clients, site, count=config.data.client_parts, seed=config.run.seed)
        site = replace(site, data={part.name: tokenise(part, backbone, config.data, **how) for part in clients})
    return Assembly(
        config=config,
        clients=clients,
        devices=_deal_devices(dealt, clients) if devices is None else devices,
        site=site,
        shape=shape,
        layer_of={name: block_index(backbone, name) for name in site.modules},
    )


def _cut_clients(clients: Sequence[ClientData], site: Site, *, count: int, seed: int) -> tuple[ClientData, ...]:
    """The parts of these clients, in their order."""
    parts: list[ClientData] = []
    for client in clients:
        embeddings = {split: embed(examples, site).numpy() for split, examples in site.data[client.name].splits.items()}
        parts += cut_client(client, embeddings, count=count, seed=seed)
    return tuple(parts)


def _deal_devices(devices: Sequence[Device], clients: Sequence[ClientData]) -> tuple[Device, ...]:
    """The device of each client, dealt out to the sites in turn: clients of one site have one."""
    sites = [site_of(client.name, client.task.name) for client in clients]
    place = {site: index for index, site in enumerate(dict.fromkeys(sites))}
    return tuple(devices[place[site] % len(devices)] for site in sites)


def _read_secrets(config: Config, names: Sequence[str]) -> dict[str, bytes]:
    """The secret of every client in the folder of `--secrets`; none without it."""
    if config.run.secrets is None:
        return {}
    return {name: read_secret(secret_file(Path(config.run.secrets), name)) for name in names}


def _prefix_cache(config: Config, backbone: Backbone) -> PrefixCache:
    """The cache of what the frozen blocks give out."""
    chunk_tokens = CUDA_CHUNK_TOKENS if backbone.device.type == "cuda" else CPU_CHUNK_TOKENS
    return PrefixCache(budget_bytes=int(config.training.prefix_cache_gb * 2**30), chunk_tokens=chunk_tokens)


def backbone_of(
    config: Config, tasks: Sequence[Task], *, device: str = "cpu", weights: Params | None = None
) -> Backbone:
    """The frozen backbone of this config's model for these tasks; `weights` are those of `Backbone.frozen`."""
    name, checkpointing = config.model.model, config.model.gradient_checkpointing
    load_options: dict[str, Any] = {"device": device, "gradient_checkpointing": checkpointing, "weights": weights}
    adapted = trainable_of(config, tasks) == "lora"
    if any(task.images for task in tasks):
        backbone = load_image_backbone(name, image_size=config.images.image_size, adapted=adapted, **load_options)
    else:
        writes, held = any(task.writes for task in tasks), config.model.base_weights
        backbone = loading.load_backbone(name, writes=writes, held=held, fast=config.model.fast_kernels, **load_options)
    if backbone.family.stock:
        check_stock(config, backbone.family)
        if len({task.writes for task in tasks}) > 1:
            raise ConfigError(
                f"some tasks have labels and others text to write, and {name!r} ({backbone.family.model_type}) runs"
                f" through the stock path, which loads a model for one of both; run them one after the other, or choose"
                f" a model of {', '.join(sorted(key for key, family in FAMILIES.items() if family.causal))}"
            )
    return backbone


NEEDS_PACKS: Mapping[str, str] = {
    "split": "cuts a model between two of its blocks",
    "trainable": "trains all weights",
    "gradient_checkpointing": "computes single blocks twice",
    "base_weights": "unpacks the weights of single layers",
    "fast_kernels": "compute rows of a pack",
    "dp": "clips the gradients of single examples of a pack",
}
"""Settings that the stock path cannot follow, with what they do; masks are for whole models alone."""


def check_stock(config: Config, family: Family) -> None:
    """Raise `ConfigError` for a setting that needs packs, where the model's architecture has none."""
    for name, reason in NEEDS_PACKS.items():
        setting, value = settings()[name], value_of(config, name)
        if value not in (setting.default, "lora", "client"):
            raise ConfigError(
                f"{flag_words(setting, value)} {reason}, and {config.model.model!r} ({family.model_type}) runs through"
                f" the stock path, which does not; leave it out, or choose a model of {', '.join(sorted(FAMILIES))}"
            )


def trainable_of(config: Config, tasks: Sequence[Task]) -> Trainable:
    """Return whether clients of these tasks train adapters or all weights under this config.

    Raises `ConfigError` where some have images and others texts, which no one model reads.
    """
    check_one_kind(tasks)
    return config.trainable(images=any(task.images for task in tasks))


def trained_body(backbone: Backbone, config: Config) -> Params:
    """The weights of the model that train under this config where no mask freezes them, without a head."""
    parameters = dict(backbone.model.named_parameters())
    names = trainable_names(backbone, frozen_blocks=config.images.frozen_blocks)
    return {key: parameters[key].detach().float() for key in names}


def model_sender(
    backbone: Backbone, config: Config, *, is_full: bool, keeps_trained: bool = True, mask: Mask | None = None
) -> model_sync.NewSender:
    """Make senders of models to receivers that keep what they trained last, or not; `mask` where there is one."""
    home = model_sync.DigestCache().digests(trained_body(backbone, config)) if is_full else {}
    body_mask = None if mask is None else split_body_and_head(mask)[0]
    common = model_sync.SenderState(home=home, mask=body_mask, compressed=config.compresses_updates)
    return lambda: model_sync.Sender(common=common, counts_on_trained=keeps_trained)


def model_receiver(
    backbone: Backbone,
    config: Config,
    *,
    is_full: bool,
    keeps_trained: bool = True,
    store: PrivateParamStore | None = None,
) -> model_sync.Receiver:
    """The receiver of models at a client or worker."""
    return model_sync.Receiver(
        home=trained_body(backbone, config) if is_full else {},
        keeps_trained=keeps_trained,
        compresses=config.compresses_updates,
        trains_heads=backbone.vision is None,
        store=store,
    )


def worker_sender(assembly: Assembly) -> model_sync.NewSender:
    """Make senders of jobs to the workers of this assembly."""
    backbone = assembly.site.backbone
    return model_sender(backbone, assembly.config, is_full=assembly.is_full, keeps_trained=not assembly.is_full)


def worker_receiver(assembly: Assembly) -> model_sync.Receiver:
    """The receiver of jobs at a worker of this assembly."""
    backbone = assembly.site.backbone
    return model_receiver(backbone, assembly.config, is_full=assembly.is_full, keeps_trained=not assembly.is_full)


def targets_of(config: Config, backbone: Backbone) -> tuple[str, ...]:
    """The layers that get adapters: the user's, or those that PEFT takes for the architecture."""
    return tuple(config.model.targets or peft_io.default_targets(backbone.family.model_type))


def first_adapted_block(config: Config, backbone: Backbone) -> int:
    """The lowest block that gets adapters under `--adapted-blocks`; `ConfigError` for a number that cannot be."""
    count, blocks, cuts = config.model.adapted_blocks, len(backbone.blocks), config.split.split
    if count is not None and count > blocks:
        raise invalid_value("--adapted-blocks", count, f"1 to {blocks}, the blocks of {backbone.name}")
    if count is not None and count < blocks and set(cuts_by_name(cuts).values()) != {NONE}:
        raise ConfigError(
            f"--adapted-blocks {count} leaves {blocks - count} of {blocks} blocks without adapters, and --split {cuts}"
            " leaves clients these blocks to train; set --adapted-blocks none, which adapts all"
        )
    return 0 if count is None else blocks - count


def pick_device(accelerator: str, *, precision: str = "fp32") -> str:
    """`cpu` or `cuda`; asking for a GPU that is not there is an error, `auto` takes one where there is one.

    So is asking for fp16 where the CPU would be taken.
    """
    available = torch.cuda.is_available()
    if accelerator == "cuda" and not available:
        raise ConfigError("accelerator 'cuda' is not available on this machine; use --accelerator cpu, or auto")
    device = "cuda" if available and accelerator != "cpu" else "cpu"
    if precision == "fp16" and device == "cpu":
        raise ConfigError(
            "--precision fp16 needs a GPU with CUDA, and this would run on the CPU; take --precision bf16 or fp32, or"
            " --accelerator cuda where there is one"
        )
    return device


def pack_tokens(config: Config, shape: ModelShape, *, cuda: bool) -> int:
    """Tokens that may train together: the user's number or the machine's, within the pack's memory budget."""
    per_token = activation_bytes(shape, 1, shape.num_layers, rank=max(config.ranks.candidates))
    per_token += LOGIT_COPIES * shape.vocabulary * VALUE_BYTES  # at worst every token is predicted
    tokens_in_memory = int(config.training.pack_memory_gb * 2**30 / per_token)
    max_tokens = config.training.pack_tokens or (CUDA_PACK_TOKENS if cuda else CPU_PACK_TOKENS)
    return max(1, min(tokens_in_memory, max_tokens))


def client_side_runtime(config: Config, tokens: Mapping[str, ClientTokens], *, blocks: int, max_tokens: int) -> Site:
    """A site that holds the embeddings and the first `blocks` blocks of this config's model, and nothing above.

    Raises `ModelError` where they are not to be had.
    """
    backbone = load_client_part(
        config.model.model,
        blocks=blocks,
        device=pick_device(config.run.accelerator, precision=config.model.precision),
        gradient_checkpointing=config.model.gradient_checkpointing,
        writes=any(client_tokens.task.writes for client_tokens in tokens.values()) and config.split.head == "client",
        held=config.model.base_weights,
    )
    return Site(
        backbone=backbone,
        data=tokens,
        targets=targets_of(config, backbone),
        scale=scale_of(config),
        max_tokens=max_tokens,
        bf16=config.model.precision == "bf16",
    )


def _check_preferences(clients: Sequence[ClientData], flag: str) -> None:
    """Raise `ConfigError` for a task without rejected answers."""
    for client in clients:
        if not client.task.chat or as_texts(client.train, task=client.task.name).pair is None:
            raise ConfigError(
                f"task {client.task.name!r} has no rejected answers, and {flag} learns from them; give it"
                f" chat=preference with columns prompt, chosen and rejected, or leave {flag} out"
            )


def tokenise(
    client: ClientData,
    backbone: Backbone,
    config: DataConfig,
    *,
    trainable: Trainable = "lora",
    preferences: bool = False,
) -> ClientTokens:
    """Tokenise the client's examples, also rejected answers where `preferences` are learned.

    It needs the backbone's tokenizer and config, not its weights. An image is one token where the whole model trains,
    whatever the model makes of it.
    """
    task = client.task
    if backbone.vision is not None:
        return image_tokens(client, length=tokens_per_image(backbone.vision) if trainable == "lora" else 1)
    limit = length_limit(task, config, backbone)
    splits = {name: as_texts(rows, task=task.name) for name, rows in client.splits.items()}
    if not task.writes:
        return ClientTokens(
            task=task, splits={name: _encode_rows(rows, backbone, limit, task) for name, rows in splits.items()}
        )
    if backbone.family.seq2seq and (task.chat or any(rows.pair is None for rows in splits.values())):
        raise ConfigError(
            f"task {task.name!r} has texts to write and none to write them after, and {backbone.name!r} writes what"
            " follows from a text; set target= beside text=, or choose a model such as gpt2"
        )
    encode, encode_prompt = encoders(task, backbone, preferences=preferences)
    encoded = {name: encode(rows, limit) for name, rows in splits.items()}
    prompts: dict[Split, Prompts] = {}
    held_out: tuple[Split, Split] = ("validation", "test")
    for name in held_out:
        rows = splits[name].take(range(min(config.rouge_examples, len(splits[name]))))
        if len(rows) and (rows.pair or task.chat):
            room = max_sequence_length(backbone) - config.new_tokens
            if room < 1:
                raise ConfigError(
                    f"--new-tokens is {config.new_tokens} and {backbone.name} has positions for"
                    f" {max_sequence_length(backbone)} tokens with the prompt; lower it"
                )
            references = tuple(map(last_answer, rows.text)) if task.chat else rows.pair or ()
            prompts[name] = Prompts(encoded=encode_prompt(rows, min(limit, room)), references=references)
    return ClientTokens(task=task, splits=encoded, prompts=prompts)


EncodeRows: TypeAlias = Callable[[Rows, int], tokenization.EncodedExamples]
"""(rows, most tokens of one) -> examples."""


def encoders(task: Task, backbone: Backbone, *, preferences: bool = False) -> tuple[EncodeRows, EncodeRows]:
    """(encoder of the rows of this task that a model is to write, encoder of their prompts alone).

    With `preferences` the rejected answers are encoded beside them.
    """
    if not task.chat:
        return (
            lambda rows, most: _encoder(task, backbone, most).targets(rows.text, rows.pair),
            lambda rows, most: _encoder(task, backbone, most).prompts(rows.text),
        )
    template = chat_template.ChatTemplate(backbone.tokenizer, task.template)

    def encode(rows: Rows, most: int) -> tokenization.EncodedExamples:
        encoder = _encoder(task, backbone, most)
        rejected = encoder.chats(rows.pair or (), template, last=True) if preferences else None
        return replace(encoder.chats(rows.text, template, last=preferences), rejected=rejected)

    return encode, lambda rows, most: _encoder(task, backbone, most).chat_prompts(rows.text, template)


def _encoder(task: Task, backbone: Backbone, most: int) -> tokenization.TextEncoder:
    return tokenization.TextEncoder(tokenizer=backbone.tokenizer, max_length=most, truncate=task.truncate)


def length_limit(task: Task, config: DataConfig, backbone: Backbone) -> int:
    """Most tokens of an example of this task."""
    return min(config.max_length or task.max_length, max_sequence_length(backbone))


def max_sequence_length(backbone: Backbone) -> int:
    """The longest sequence that the model has positions for; RoBERTa leaves its first ones unused.

    With `longrope` it is the longest of pre-training: a longer text would turn its whole batch by other angles.
    Raises `ModelError` for a model with positions for no text.
    """
    config = backbone.model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    rotations = getattr(config, "rope_parameters", None) or {}
    if rotations.get("rope_type") == "longrope":
        positions = rotations["original_max_position_embeddings"]
    unused = int(config.pad_token_id) + 1 if backbone.family.counts_from_padding else 0
    if backbone.family.stock:
        positions, unused = stock.positions_of(backbone, positions)
    # A model without positions has no limit of its own.
    length = min(1 << 20, 1 << 20 if positions is None else int(positions) - unused)
    if length < LEAST_LENGTH:
        raise ModelError(
            f"model {backbone.name!r} has positions for {max(0, length)} tokens, and a text takes {LEAST_LENGTH} or"
            " more; give the model's own config.json"
        )
    return length


def _encode_rows(rows: Rows, backbone: Backbone, limit: int, task: Task) -> tokenization.EncodedExamples:
    examples = _encoder(task, backbone, limit).examples(rows.text, rows.pair, rows.label)
    if backbone.family.token_types and len(examples.types):
        most, known = int(examples.types.max()), int(backbone.model.config.type_vocab_size)
        if most >= known:
            raise ModelError(
                f"the tokenizer of model {backbone.name!r} gives tokens of a pair the type {most}, and the model has"
                f" embeddings for {known} types; give the tokenizer that belongs to the model"
            )
    return examples


def truncation_notes(data: Mapping[str, ClientTokens], backbone: Backbone) -> tuple[str, ...]:
    """A line where the model runs through the stock path, and one for each task with texts that are cut."""
    lines = [f"{backbone.name} ({backbone.family.model_type}) {stock.NOTE}"] if backbone.family.stock else []
    for name, clients in group_by(data.values(), lambda tokens: tokens.task.name).items():
        prompts = [prompts.encoded for tokens in clients for prompts in tokens.prompts.values()]
        parts = [*(examples.both for tokens in clients for examples in tokens.splits.values()), *prompts]
        kept = np.concatenate([part.lengths for part in parts])
        full = np.concatenate([part.lengths if part.full_lengths is None else part.full_lengths for part in parts])
        if num_cut := (full > kept).sum():
            lost = clients[0].task.truncate
            lines.append(
                f"{name}: {num_cut:,} of {len(full):,} texts{' and prompts' * bool(prompts)} are longer than"
                f" {kept[full > kept].max():,} tokens and {f'lose their {lost}' if lost else 'are cut'}; p95 is"
                f" {np.quantile(full, 0.95, method='higher'):,}, the longest has {full.max():,}, and the model reads"
                f" up to {max_sequence_length(backbone):,} (--max-length)"
                f"{', with --new-tokens of an answer' * bool(prompts)}"
            )
    return tuple(lines)


def without_private(assembly: Assembly, params: Params, cut: Cut | None) -> Params:
    """A client's model before it has trained, with placeholders for its private parameters where it keeps those.

    What the server trained above an earlier cut of the client goes down to it once.
    Raises `BudgetError` where something of it is at the client alone that is now to be above its cut.
    """
    if not assembly.uses_placeholders:
        return params
    client_side = frozenset(params)
    if cut is not None:
        client_side = select_client_side(assembly.site.backbone, params, blocks=cut.blocks, head=cut.head == "client")
    if unavailable := [key for key, tensor in params.items() if key not in client_side and is_placeholder(tensor)]:
        raise BudgetError(
            f"{unavailable[0]} was measured at its client, whose model is now to be cut below it; set --split"
        )
    private_names = [key for key in unshared_keys(params, assembly.config.mixing.share) if key in client_side]
    sha256 = private_digest(params)
    if sha256 is not None:
        private_names = [key for key in private_names if key.endswith(LORA_A) or is_placeholder(params[key])]
    return with_placeholders(params, private_names, sha256=sha256)


def defer_late_clients(assembly: Assembly) -> Assembly:
    """The assembly that a run begins with: clients that `--arrive` names wait in its queue until their rounds.

    Raises `ConfigError` for a client that there is not, and where nobody is left to begin.
    """
    rounds = parse_arrivals(assembly.config.data.arrive)
    if not rounds:
        return assembly
    check_known("client", *rounds, among=assembly.names)
    if len(rounds) == len(assembly.clients):
        raise ConfigError("--arrive names every client, and somebody must be there to begin; leave one out")
    newcomers = [
        Newcomer(client=client, tokens=assembly.site.data[client.name], device=device)
        for client, device in zip(assembly.clients, assembly.devices, strict=True)
        if client.name in rounds
    ]
    queue = JoinQueue(
        waiting_clients=lambda number: tuple(
            newcomer for newcomer in newcomers if rounds[newcomer.client.name] <= number
        )
    )
    return replace(without_clients(assembly, rounds), join_queue=queue)


def with_newcomer(assembly: Assembly, newcomer: Newcomer) -> Assembly:
    """The assembly with this client after all others."""
    return replace(
        assembly,
        clients=(*assembly.clients, newcomer.client),
        devices=(*assembly.devices, newcomer.device),
        site=replace(assembly.site, data={**assembly.site.data, newcomer.client.name: newcomer.tokens}),
    )


def without_clients(assembly: Assembly, names: Collection[str]) -> Assembly:
    """The assembly without these clients."""
    remaining = [index for index, name in enumerate(assembly.names) if name not in names]
    return replace(
        assembly,
        clients=tuple(assembly.clients[index] for index in remaining),
        devices=tuple(assembly.devices[index] for index in remaining),
    )


def with_joined_clients(assembly: Assembly, names: Sequence[str], *, round: int) -> Assembly:
    """The assembly of a resumed run before this round: with the clients that had joined, in the order of its plan."""
    waiting = {newcomer.client.name: newcomer for newcomer in assembly.join_queue.waiting_clients(round)}
    for name in names:
        if name in waiting and name not in assembly.names:
            assembly = with_newcomer(assembly, waiting[name])
    return assembly
