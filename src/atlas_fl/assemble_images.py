"""From a config to the things that a run on images works with: clients with their images, and the site they share."""

from dataclasses import dataclass

import torch

from atlas_fl.assemble import load_clients, pick_device
from atlas_fl.clients.images.whole import ImageSite
from atlas_fl.config import Config
from atlas_fl.door import CLOSED, Door
from atlas_fl.models.vision import Vision, trainable_names
from atlas_fl.models.vision import weights as weights_of
from atlas_fl.models.vision_loading import load_vision
from atlas_fl.ranks.devices import Device, find_devices
from atlas_fl.rng import torch_generator
from atlas_fl.tasks.clients import ClientData
from atlas_fl.tree import HEAD
from atlas_fl.types import Params

PACK_IMAGES = 64
"""Images of several clients that are scored together, or fewer where `--pack-tokens` is fewer."""
HEAD_STD = 0.02
"""Of a head that is not fitted: what transformers draws its new layers with."""


@dataclass(frozen=True, kw_only=True)
class ImageAssembly:
    """The parts of a run on images, before anything is planned or trained."""

    config: Config
    clients: tuple[ClientData, ...]
    devices: tuple[Device, ...]
    """One for each client."""
    site: ImageSite
    door: Door = CLOSED

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names, in the order of the run."""
        return tuple(client.name for client in self.clients)

    def start(self) -> dict[str, Params]:
        """What every client begins with: the weights that train, one mapping for all, and its task's head."""
        vision, config = self.site.vision, self.config
        body = body_of(vision, config)
        tasks = {client.task.name: client.task for client in self.clients}
        starts = {
            name: {**body, **_head(task.num_labels, vision.hidden, seed=config.run.seed, group=name)}
            for name, task in tasks.items()
        }
        return {client.name: starts[client.task.name] for client in self.clients}


def _head(labels: int, features: int, *, seed: int, group: str) -> dict[str, torch.Tensor]:
    stream = torch_generator(seed, "head", group)
    weight = torch.empty(labels, features).normal_(std=HEAD_STD, generator=stream)
    return {HEAD + "bias": torch.zeros(labels), HEAD + "weight": weight}


def assemble_images(
    config: Config,
    *,
    clients: tuple[ClientData, ...] | None = None,
    devices: tuple[Device, ...] | None = None,
    weights: Params | None = None,
    place: str | None = None,
) -> ImageAssembly:
    """Load the clients' images, or take the clients that are given, and the model that they share.

    `devices`, one for each, stand in for those that the config would give, `weights` for those of the model's files,
    and `place`, a device of torch, for the one that the config names.
    Raises an `AtlasError` for whatever the config names that is not to be had.
    """
    clients = load_clients(config) if clients is None else clients
    vision = vision_of(config, device=place or pick_device(config.run.accelerator), weights=weights)
    devices = find_devices(config.data.devices, config.data.device) if devices is None else devices
    return ImageAssembly(
        config=config,
        clients=clients,
        devices=tuple(devices[index % len(devices)] for index in range(len(clients))),
        site=ImageSite(
            vision=vision,
            data={client.name: client for client in clients},
            pack_images=min(PACK_IMAGES, config.training.pack_tokens or PACK_IMAGES),
            bf16=config.model.precision == "bf16",
            fp16=config.model.precision == "fp16",
        ),
    )


def vision_of(config: Config, *, device: str = "cpu", weights: Params | None = None) -> Vision:
    """The model of this config; `weights` are those of all its parameters."""
    return load_vision(config.model.model, image_size=config.images.image_size, device=device, weights=weights)


def body_of(vision: Vision, config: Config) -> dict[str, torch.Tensor]:
    """The weights of the model that train under this config where no mask holds them, without a head."""
    held = weights_of(vision)
    return {key: held[key] for key in trainable_names(vision, frozen_blocks=config.images.frozen_blocks)}
