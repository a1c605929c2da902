"""From a config to clients, backbone and runtime.

The door of a run that has begun: who waits to join it, and what they are told.

From a config to the things that a run works with: clients with their data and devices, and the site they share.

Who is there when: an assembly without those who come later, and with those who have come.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from atlas_fl.client.job import ClientTokens, Prompts, Site, Trainable, fresh, patches
from atlas_fl.config import Config, DataConfig, parse_arrivals
from atlas_fl.config.schema import ALL_CLASSES
from atlas_fl.config.training_checks import no_fp16
from atlas_fl.data.clients import BY_CLASSES, ClientData, make_clients
from atlas_fl.data.registry import check_one_kind, find_tasks
from atlas_fl.data.task import Examples, Rows, Source, Task, as_texts
from atlas_fl.errors import AtlasError, BudgetError, ConfigError, unknown_name
from atlas_fl.models.backbone import Backbone, block_index, model_shape, plain_shape, trainable_names
from atlas_fl.models.loading import load_backbone
from atlas_fl.models.lora import lora_scale
from atlas_fl.models.peft_io import default_targets
from atlas_fl.models.registry import ModelShape
from atlas_fl.models.tokenization import EncodedExamples, encode_examples, encode_prompts, encode_targets
from atlas_fl.models.vision_loading import load_image_backbone, tokens_per_image
from atlas_fl.params import HEAD, LORA_A, Params, Split
from atlas_fl.partial_sharing import is_placeholder, private_digest, unshared_keys, with_placeholders
from atlas_fl.ranks.cost_model import LOGIT_COPIES, VALUE_BYTES, activation_bytes
from atlas_fl.ranks.devices import Device, find_devices
from atlas_fl.rng import torch_generator
from atlas_fl.runtime.attacks import ATTACKS, attackers_of, with_flipped_labels
from atlas_fl.split.channel import Cut
from atlas_fl.split.codec import simulated_secret
from atlas_fl.split.model import load_client_part, select_client_side
from atlas_fl.storage.assets import embedded_dir


@dataclass(frozen=True, kw_only=True)
class Newcomer:
    """A client that the plan knows nothing of."""

    client: ClientData
    device: Device
    tokens: ClientTokens


def _nobody(_round: int) -> tuple[Newcomer, ...]:
    return ()


def _anyone(_name: str) -> None:
    return None


def _stop(_name: str, error: AtlasError) -> None:
    raise error


@dataclass(frozen=True, kw_only=True)
class Door:
    """How a run learns who came late; in a simulation its config says so, and what cannot be ends it."""

    waiting: Callable[[int], tuple[Newcomer, ...]] = _nobody
    """(round) -> who would take part from this round on."""
    let_in: Callable[[str], None] = _anyone
    """Told of everyone who is in the plan from now on."""
    turn_away: Callable[[str, AtlasError], None] = _stop
    """Told (client, reason) of everyone who cannot be in it."""
    leave_out: Callable[[str, AtlasError], None] = _stop
    """Told (client, reason) of everyone without whose answers the plan is made; it may join later."""


CLOSED = Door()


# Beyond this many tokens a CPU gains nothing from larger packs: the products are at the hardware's limit.
CPU_PACK_TOKENS, CUDA_PACK_TOKENS = 4096, 65536
PACK_IMAGES = 64
"""Images in a pass of a whole model without gradients, or fewer where `--pack-tokens` is fewer."""
HEAD_STD = 0.02
"""Of the head of a whole image model that is not fitted: what transformers draws its new layers with."""


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """The parts of a run, before anything is planned or trained."""

    config: Config
    clients: tuple[ClientData, ...]
    devices: tuple[Device, ...]
    """One for each client."""
    site: Site
    shape: ModelShape
    layer_of: dict[str, int]
    """Block of every adapted module."""
    door: Door = CLOSED
    apart: bool = False
    """Whether what clients do not share stays where they are (`private`)."""

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names, in the order of the run."""
        return tuple(client.name for client in self.clients)

    @property
    def has_images(self) -> bool:
        """Whether the clients' tasks are of images; else they are of texts."""
        return self.site.backbone.vision is not None

    @property
    def is_full(self) -> bool:
        """Whether the clients train all weights."""
        return self.site.trainable == "full"

    def full_models(self) -> dict[str, Params]:
        """What every client begins with that trains all weights: these, one mapping a task, and its task's head."""
        body = trained_body(self.site.backbone, self.config)
        tasks = {client.task.name: client.task for client in self.clients}
        starts = {name: {**body, **self._head(task)} for name, task in tasks.items()}
        return {client.name: starts[client.task.name] for client in self.clients}

    def _head(self, task: Task) -> Params:
        backbone, seed = self.site.backbone, self.config.run.seed
        if backbone.vision is None:
            return fresh(backbone, {}, ranks={}, task=task, seed=seed)
        weight = torch.empty(task.num_labels, backbone.width)
        weight.normal_(std=HEAD_STD, generator=torch_generator(seed, "head", task.name))
        return {HEAD + "bias": torch.zeros(task.num_labels), HEAD + "weight": weight}

    def start(self, client: ClientData, ranks: tuple[int, ...]) -> Params:
        """The shared initialisation at these ranks per layer: what every client of one task begins with."""
        site, own = self.site, {name: ranks[self.layer_of[name]] for name in self.site.modules}
        return fresh(site.backbone, site.modules, ranks=own, task=client.task, seed=self.config.run.seed)


def source_of(config: Config) -> Source:
    """Where the tasks of this config are read from."""
    own, share = config.data.data_dir, config.images.validation_share
    return Source(cache_dir=embedded_dir(), data_dir=None if own is None else Path(own), validation_share=share)


def load_clients(config: Config) -> tuple[ClientData, ...]:
    """The tasks of this config, read and dealt out to its clients; raises an `AtlasError` where they do not suffice."""
    clients = make_clients(
        find_tasks(config.data.tasks, config.data.task),
        source_of(config),
        clients_per_task=config.data.clients_per_task,
        samples=config.data.samples,
        validation_samples=config.data.validation_samples,
        test_samples=config.data.test_samples,
        partition=config.data.partition if config.images.nc == ALL_CLASSES else BY_CLASSES,
        classes_per_client=None if config.images.nc == ALL_CLASSES else int(config.images.nc),
        dirichlet_alpha=config.data.dirichlet_alpha,
        seed=config.run.seed,
        shuffle_labels=config.data.shuffle_labels,
    )
    if config.attack.attack == "none":
        return clients
    attackers = attackers_of(config.attack.attackers, [client.name for client in clients], seed=config.run.seed)
    return with_flipped_labels(clients, attackers) if ATTACKS[config.attack.attack].flips else clients


def assemble(
    config: Config,
    *,
    clients: tuple[ClientData, ...] | None = None,
    tokens: Mapping[str, ClientTokens] | None = None,
    devices: tuple[Device, ...] | None = None,
    weights: Params | None = None,
    place: str | None = None,
) -> Assembly:
    """Load the clients, or take those that are given, load the backbone and tokenise.

    `tokens` of every client and `devices`, one for each, stand in for those that the config would give, `weights` for
    those of the backbone's files, and `place`, a device of torch, for the one that the packs are sized for.
    Raises an `AtlasError` for whatever the config names that is not to be had.
    """
    devices = find_devices(config.data.devices, config.data.device) if devices is None else devices
    clients = load_clients(config) if clients is None else clients
    tasks = [client.task for client in clients]
    trainable, images = trainable_of(config, tasks), any(task.images for task in tasks)
    # a CPU computes whole image models in fp16 too
    precision = "fp32" if images and trainable == "full" else config.model.precision
    picked = pick_device(config.run.accelerator, precision=precision)
    backbone = backbone_of(config, tasks, device=place or picked, weights=weights)
    if tokens is None:
        tokens = {client.name: tokenise(client, backbone, config.data, trainable=trainable) for client in clients}
    site = Site(
        backbone=backbone,
        data=tokens,
        targets=targets_of(config, backbone) if trainable == "lora" else (),
        scale=scale_of(config),
        max_tokens=1,
        trainable=trainable,
    )
    whole_images = trainable == "full" and images
    shape = plain_shape(backbone) if whole_images else model_shape(backbone, site.modules)
    most = min(PACK_IMAGES, config.training.pack_tokens or PACK_IMAGES) if whole_images else None
    return Assembly(
        config=config,
        clients=clients,
        devices=tuple(devices[index % len(devices)] for index in range(len(clients))),
        site=replace(
            site,
            max_tokens=most or pack_tokens(config, shape, cuda=picked == "cuda"),
            bf16=config.model.precision == "bf16",
            fp16=config.model.precision == "fp16",
            noise_secret=functools.partial(simulated_secret, config.run.seed),
        ),
        shape=shape,
        layer_of={name: block_index(backbone, name) for name in site.modules},
    )


def backbone_of(
    config: Config, tasks: Sequence[Task], *, device: str = "cpu", weights: Params | None = None
) -> Backbone:
    """The frozen backbone of this config's model for these tasks; `weights` are those of `Backbone.frozen`."""
    name, checkpointing = config.model.model, config.model.gradient_checkpointing
    how: dict[str, Any] = {"device": device, "gradient_checkpointing": checkpointing, "weights": weights}
    if any(task.images for task in tasks):
        adapted = trainable_of(config, tasks) == "lora"
        return load_image_backbone(name, image_size=config.images.image_size, adapted=adapted, **how)
    return load_backbone(name, writes=any(task.writes for task in tasks), **how)


def trainable_of(config: Config, tasks: Sequence[Task]) -> Trainable:
    """What clients of these tasks train under this config.

    Raises `ConfigError` where some have images and others texts, which no one model reads.
    """
    check_one_kind(tasks)
    return config.trainable(images=any(task.images for task in tasks))


def trained_body(backbone: Backbone, config: Config) -> Params:
    """The weights of the model that train under this config where no mask freezes them, without a head."""
    named = dict(backbone.model.named_parameters())
    names = trainable_names(backbone, frozen_blocks=config.images.frozen_blocks)
    return {key: named[key].detach().float() for key in names}


def targets_of(config: Config, backbone: Backbone) -> tuple[str, ...]:
    """Which layers get adapters: the user's, or those that PEFT takes for the architecture."""
    return tuple(config.model.targets or default_targets(backbone.family.model_type))


def scale_of(config: Config) -> Callable[[int], float]:
    """LoRA's factor of a rank under this config."""
    return functools.partial(lora_scale, alpha=config.model.lora_alpha, rslora=config.model.rslora)


def pick_device(accelerator: str, *, precision: str = "fp32") -> str:
    """`cpu` or `cuda`; asking for a GPU that is not there is an error, `auto` takes one where there is one.

    So is asking for fp16 where the CPU would be taken.
    """
    available = torch.cuda.is_available()
    if accelerator == "cuda" and not available:
        raise ConfigError("accelerator 'cuda' is not available on this machine; use --accelerator cpu, or auto")
    device = "cuda" if available and accelerator != "cpu" else "cpu"
    if precision == "fp16" and device == "cpu":
        raise no_fp16()
    return device


def pack_tokens(config: Config, shape: ModelShape, *, cuda: bool) -> int:
    """Tokens that may train together: the user's number or the machine's, within the pack's memory budget."""
    per_token = activation_bytes(shape, 1, shape.num_layers, rank=max(config.ranks.candidates))
    per_token += LOGIT_COPIES * shape.vocabulary * VALUE_BYTES  # at worst every token is predicted
    fits = int(config.training.pack_memory_gb * 2**30 / per_token)
    wanted = config.training.pack_tokens or (CUDA_PACK_TOKENS if cuda else CPU_PACK_TOKENS)
    return max(1, min(fits, wanted))


def site_below(config: Config, tokens: Mapping[str, ClientTokens], *, blocks: int, max_tokens: int) -> Site:
    """A site that holds the embeddings and the first `blocks` blocks of this config's model, and nothing above.

    Raises `ModelError` where they are not to be had.
    """
    writes = any(own.task.writes for own in tokens.values())
    backbone = load_client_part(
        config.model.model,
        blocks=blocks,
        device=pick_device(config.run.accelerator, precision=config.model.precision),
        gradient_checkpointing=config.model.gradient_checkpointing,
        writes=writes and config.split.head == "client",
    )
    return Site(
        backbone=backbone,
        data=tokens,
        targets=targets_of(config, backbone),
        scale=scale_of(config),
        max_tokens=max_tokens,
        bf16=config.model.precision == "bf16",
    )


def tokenise(
    client: ClientData, backbone: Backbone, config: DataConfig, *, trainable: Trainable = "lora"
) -> ClientTokens:
    """The client's examples as tokens; of the backbone only what is known of it is used, not its weights.

    An image is one token where the whole model trains, whatever the model makes of it.
    """
    task = client.task
    if backbone.vision is not None:
        return patches(client, length=tokens_per_image(backbone.vision) if trainable == "lora" else 1)
    limit = min(config.max_length or task.max_length, most_tokens(backbone))
    held: dict[Split, Examples] = {"train": client.train, "validation": client.validation, "test": client.test}
    splits = {name: as_texts(rows, task=task.name) for name, rows in held.items()}
    if not task.writes:
        return ClientTokens(task=task, splits={name: _encode(rows, backbone, limit) for name, rows in splits.items()})
    tokenizer = backbone.tokenizer
    written = {
        name: encode_targets(rows.text, rows.pair, tokenizer=tokenizer, max_length=limit)
        for name, rows in splits.items()
    }
    prompts: dict[Split, Prompts] = {}
    held_out: tuple[Split, Split] = ("validation", "test")
    for name in held_out:
        rows = splits[name].take(range(min(config.rouge_examples, len(splits[name]))))
        if rows.pair:
            prompts[name] = Prompts(encoded=_prompts(rows, backbone, limit, config), references=rows.pair)
    return ClientTokens(task=task, splits=written, prompts=prompts)


def _prompts(rows: Rows, backbone: Backbone, limit: int, config: DataConfig) -> EncodedExamples:
    """The rows' prompts, cut to the task's limit and so that the longest answer still has positions."""
    room = most_tokens(backbone) - config.new_tokens
    if room < 1:
        raise ConfigError(
            f"--new-tokens is {config.new_tokens} and {backbone.name} has positions for {most_tokens(backbone)} tokens"
            " with the prompt; lower it"
        )
    return encode_prompts(rows.text, tokenizer=backbone.tokenizer, max_length=min(limit, room))


def most_tokens(backbone: Backbone) -> int:
    """The longest sequence that the model has positions for; RoBERTa leaves its first ones unused.

    Inside a sliding window, as Mistral's and some of Qwen2's blocks have it, packed attention is theirs exactly.
    """
    config = backbone.model.config
    positions = getattr(config, "max_position_embeddings", None)
    first = backbone.family.first_position(int(config.pad_token_id))
    window = getattr(config, "sliding_window", None)
    # A model that has neither has no limit of its own.
    return min(1 << 20 if positions is None else int(positions) - first, window or 1 << 20)


def _encode(rows: Rows, backbone: Backbone, limit: int) -> EncodedExamples:
    return encode_examples(rows.text, rows.pair, rows.label, tokenizer=backbone.tokenizer, max_length=limit)


def without_private(assembly: Assembly, params: Params, cut: Cut | None) -> Params:
    """What is here of a client's model before it has trained: all, or where parts stay apart what does not.

    What was trained here, above an earlier cut of the client, goes down to it once.
    Raises `BudgetError` where something of it is at the client alone that is now to be above its cut.
    """
    if not assembly.apart:
        return params
    held = frozenset(params)
    if cut is not None:
        held = select_client_side(assembly.site.backbone, params, blocks=cut.blocks, head=cut.head == "client")
    if gone := [key for key, tensor in params.items() if key not in held and is_placeholder(tensor)]:
        raise BudgetError(f"{gone[0]} was measured at its client, whose model is now to be cut below it; set --split")
    own, sha256 = (
        [key for key in unshared_keys(params, assembly.config.mixing.share) if key in held],
        private_digest(params),
    )
    if sha256 is not None:
        own = [key for key in own if key.endswith(LORA_A) or is_placeholder(params[key])]
    return with_placeholders(params, own, sha256=sha256)


def put_off(assembly: Assembly) -> Assembly:
    """The assembly that a run begins with: whom `--arrive` names waits at its door until their rounds.

    Raises `ConfigError` for a client that there is not, and where nobody is left to begin.
    """
    rounds = parse_arrivals(assembly.config.data.arrive)
    if not rounds:
        return assembly
    for name in rounds:
        if name not in assembly.names:
            raise unknown_name("client", name, assembly.names)
    if len(rounds) == len(assembly.clients):
        raise ConfigError("--arrive names every client, and somebody must be there to begin; leave one out")
    later = [
        Newcomer(client=client, tokens=assembly.site.data[client.name], device=device)
        for client, device in zip(assembly.clients, assembly.devices, strict=True)
        if client.name in rounds
    ]
    here = [k for k, name in enumerate(assembly.names) if name not in rounds]
    return replace(
        assembly,
        clients=tuple(assembly.clients[k] for k in here),
        devices=tuple(assembly.devices[k] for k in here),
        door=Door(waiting=lambda number: tuple(one for one in later if rounds[one.client.name] <= number)),
    )


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
    left = [k for k, name in enumerate(assembly.names) if name not in names]
    return replace(
        assembly,
        clients=tuple(assembly.clients[k] for k in left),
        devices=tuple(assembly.devices[k] for k in left),
    )


def with_planned(assembly: Assembly, names: Sequence[str], *, round: int) -> Assembly:
    """The assembly of a run that goes on before this round: with those who had joined it, in the order of its plan."""
    waiting = {one.client.name: one for one in assembly.door.waiting(round)}
    for name in names:
        if name in waiting and name not in assembly.names:
            assembly = with_newcomer(assembly, waiting[name])
    return assembly
