"""A site of a federation across machines: its own data and backbone, and the server's jobs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from atlas_fl.assemble import assemble, scale_of, site_below, source_of, tokenise
from atlas_fl.assemble_images import assemble_images, body_of
from atlas_fl.clients import ACTIONS
from atlas_fl.clients.base import ClientTokens, Job, Update
from atlas_fl.clients.base import Site as AdapterSite
from atlas_fl.clients.patches import patches
from atlas_fl.clients.whole import ImageSite
from atlas_fl.config import Config, config_hash, parse_config
from atlas_fl.config.images import EVENLY
from atlas_fl.config.splitting import NONE
from atlas_fl.engines.census import census_of
from atlas_fl.engines.ends import AdapterReceiver, Receiver
from atlas_fl.engines.frames import Head
from atlas_fl.engines.link import Link
from atlas_fl.engines.whole import WHOLE_ACTIONS
from atlas_fl.engines.whole_ends import WholeReceiver
from atlas_fl.engines.wire import Told
from atlas_fl.engines.worker import Worker
from atlas_fl.errors import ConfigError, ModelError, ProtocolError
from atlas_fl.events import Note, OnEvent, PhaseStarted, ignore
from atlas_fl.io.certs import open_certs
from atlas_fl.io.machine import versions
from atlas_fl.lines import IMAGES, line_of
from atlas_fl.lora.peft_io import export_adapter
from atlas_fl.models.backbone import Backbone
from atlas_fl.models.parts import bottom_of
from atlas_fl.models.vision_export import save_vision
from atlas_fl.ranks.devices import find_devices
from atlas_fl.split.step import Cut
from atlas_fl.tasks import find_tasks
from atlas_fl.tasks.clients import BY_CLASSES, ClientData, make_clients
from atlas_fl.tree import digest
from atlas_fl.types import Params


@dataclass(frozen=True, kw_only=True)
class Joining:
    """What a site brings."""

    address: str
    """`host:port` of the server."""
    certs: Path
    """The site's own folder of `atlas certs make`."""
    token: str | None = None
    """What the server gave out for this one session; None where it asks for certificates alone."""
    task: str
    """`name=path` with the options of `--task`, or a registered task's name."""
    device: str
    """A profile's name or description."""
    part: int | None = None
    """Which of the task's `clients_per_task` parts this site has, from 0; None for all of it."""
    model: str | None = None
    """Where the backbone lies here, if not under the server's name for it."""
    data_dir: str | None = None
    """Where data sets lie here that would else come from the hub."""
    config: str | None = None
    """Hash that the server's config must have; None accepts any."""
    patience_seconds: float = 600.0
    """How long a server that has gone is tried again."""
    first_seconds: float = 30.0
    """How long it is tried at the very first."""
    to: Path
    """Where the client's own model is written at the end: in PEFT's format, or a whole model in transformers' own."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """What a site has come to."""

    name: str
    adapter: Path | None
    """None where the run has no model for this client."""
    sent_bytes: int
    received_bytes: int


def join(joining: Joining, *, on_event: OnEvent = ignore) -> Joined:
    """Work for the server until its run is complete, and write the client's own model.

    Raises an `AtlasError` for whatever the user can mend; `ProtocolError` where the server refuses or stays away.
    """
    certs = open_certs(joining.certs)
    _device_of(joining.device)
    if joining.to.exists():
        raise ConfigError(f"{joining.to} exists already; name another folder with --to, or move it away")
    said: dict[str, str | None] = {"version": versions()["atlas_fl"], "config": joining.config, "model": None}
    token = {} if joining.token is None else {"token": joining.token}
    link = Link(
        joining.address,
        certs,
        hello=lambda: {**said, **token},
        patience=joining.patience_seconds,
        first_patience=joining.first_seconds,
        on_event=on_event,
    )
    with link:
        on_event(Note(f"{certs.name} is connected to {joining.address}"))
        on_event(PhaseStarted("loading"))
        config = _config_of(link.welcome, joining)
        client = own_client(config, certs.name, task=joining.task, part=joining.part)
        home = home_of(config, client, model=str(link.welcome["model"]))
        said |= {"config": str(link.welcome["config"]), "model": home.fingerprint}
        worker = Worker(
            name=certs.name,
            home=home,
            link=link,
            registration={**said, **census_of(client, home.tokens), "device": joining.device, "part": joining.part},
            on_event=on_event,
            receiver=home.receiver,
            actions=home.actions,
        )
        model = worker.work()
    if model:
        home.export(model, joining.to)
    return Joined(
        name=certs.name,
        adapter=joining.to if model else None,
        sent_bytes=link.sent_bytes,
        received_bytes=link.received_bytes,
    )


def _device_of(device: str) -> None:
    find_devices((), (device,)) if "=" in device else find_devices((device,))


def _config_of(welcome: Head, joining: Joining) -> Config:
    """The server's settings with this site's own places in them."""
    text, told = welcome.get("settings"), welcome.get("config")
    if not isinstance(text, str):
        raise ProtocolError("the server sent no settings; install its version of atlas-fl")
    config = parse_config(text, origin=f"what {joining.address} sent")
    if config_hash(config) != told:
        raise ProtocolError(
            f"the server's settings have hash {config_hash(config)} here and {told!s:.16} there; install its version"
        )
    data = replace(config.data, data_dir=joining.data_dir)
    model = replace(config.model, model=joining.model or config.model.model)
    return replace(config, data=data, model=model)


class Site(Protocol):
    """What a site brings to the work: its model, how it reads jobs, and where its own model goes."""

    fingerprint: str | None
    """Digest of the weights; None where none is loaded yet."""
    tokens: ClientTokens
    """The client's examples, of which the server is told how many there are."""
    receiver: Receiver
    actions: Mapping[str, Callable[[Sequence[Job], Any], list[Update]]]

    def __call__(self, cut: Cut | None, told: Told | None) -> Any:
        """The site with as much of the model as this job needs (`engines.worker.Home`)."""
        ...

    def export(self, model: Params, to: Path) -> None:
        """Write the client's own model."""
        ...


def home_of(config: Config, client: ClientData, *, model: str) -> Site:
    """The site of this client for a server whose model has this digest."""
    line = line_of([client.task], tune=config.images.tune)
    return WholeHome(config, client) if line is IMAGES else Home(config, client, model=model)


class WholeHome:
    """A site whose client trains the whole model of its images."""

    def __init__(self, config: Config, client: ClientData) -> None:
        self._client = client
        self._site = assemble_images(config, clients=(client,)).site
        vision = self._site.vision
        self.fingerprint: str | None = digest(dict(vision.backbone.named_parameters()))
        self.tokens = patches(client, length=1)
        self.receiver: Receiver = WholeReceiver(home=body_of(vision, config))
        self.actions: Mapping[str, Any] = WHOLE_ACTIONS

    def __call__(self, cut: Cut | None, told: Told | None) -> ImageSite:
        """The site; raises `ProtocolError` where the server would cut the model."""
        if cut is not None or told is not None:
            raise ProtocolError("the server cuts a model of images; install its version of atlas-fl")
        return self._site

    def export(self, model: Params, to: Path) -> None:
        """Write the client's own model as transformers loads it."""
        save_vision(self._site.vision, model, to, labels=self._client.task.label_names)


class Home:
    """The model at a site: as much of it as the newest job needs, and only from then on.

    Where models are cut, nothing is loaded before the first job says how much of it is to be here; a tokenizer
    suffices to register.
    """

    def __init__(self, config: Config, client: ClientData, *, model: str) -> None:
        self._config, self._client, self._model = config, client, model
        self.receiver: Receiver = AdapterReceiver()
        self.actions: Mapping[str, Any] = ACTIONS
        self._site: AdapterSite | None = None
        self._blocks: int | None = None
        if config.split.split == NONE:
            self._site = assemble(config, clients=(client,)).site
            self.known, self.tokens = self._site.backbone, self._site.data[client.name]
            self.fingerprint: str | None = _fingerprint(self.known)
        else:
            with torch.device("meta"):
                self.known = bottom_of(config.model.model, blocks=0)
            self.tokens = tokenise(client, self.known, config.data)
            self.fingerprint = None

    def export(self, model: Params, to: Path) -> None:
        """Write the client's own model in PEFT's format."""
        labels, scale = self._client.task.label_names, scale_of(self._config)
        export_adapter(model, to, family=self.known.family, base=self.known.source.path, scale=scale, labels=labels)

    def __call__(self, cut: Cut | None, told: Told | None) -> AdapterSite:
        """The site with the blocks below this cut, or with all (`engines.worker.Home`).

        Raises `ModelError` where they are not to be had, or are not the server's.
        """
        blocks = None if cut is None else cut.blocks
        if self._site is not None and self._blocks == blocks:
            return self._site
        self._site = None  # what is not needed any more goes before anything else comes
        tokens = {self._client.name: self.tokens}
        if blocks is None or told is None:
            site, wanted = assemble(self._config, clients=(self._client,), tokens=tokens).site, self._model
        else:
            site, wanted = site_below(self._config, tokens, blocks=blocks, max_tokens=told.tokens), told.part
        if (found := _fingerprint(site.backbone)) != wanted:
            part = "" if blocks is None else f" up to block {blocks}"
            raise ModelError(
                f"model {site.backbone.name!r}{part} is {found:.16} here and {wanted:.16} at the server; give the"
                " server's model with --model"
            )
        self._site, self._blocks = site, blocks
        return site


def own_client(config: Config, name: str, *, task: str, part: int | None) -> ClientData:
    """This site's rows under its name in the federation.

    A `part` is dealt as in a simulation of the same config. Without one the site has the whole task, up to the config's
    numbers of rows.
    """
    found = find_tasks((), (task,))[0] if "=" in task else find_tasks((task,))[0]
    source, settings = source_of(config), config.data
    sizes = {"samples": settings.samples, "validation": settings.validation_samples, "test": settings.test_samples}
    if part is None:
        data = found.load(source)
        have = {"samples": len(data.train), "validation": len(data.validation), "test": len(data.test)}
        sizes = {split: min(size, have[split]) for split, size in sizes.items()}
    elif not 0 <= part < settings.clients_per_task:
        raise ConfigError(
            f"--part is {part}; allowed: 0 to {settings.clients_per_task - 1}, as --clients-per-task of the server"
            " says, or leave it out where the whole task is here"
        )
    by_classes = part is not None and config.images.nc != EVENLY
    clients = make_clients(
        (found,),
        source,
        clients_per_task=1 if part is None else settings.clients_per_task,
        samples=sizes["samples"],
        validation_samples=sizes["validation"],
        test_samples=sizes["test"],
        partition=BY_CLASSES if by_classes else settings.partition,
        classes_per_client=int(config.images.nc) if by_classes else None,
        dirichlet_alpha=settings.dirichlet_alpha,
        seed=config.run.seed,
        shuffle_labels=settings.shuffle_labels,
    )
    return replace(clients[part or 0], name=name)


def _fingerprint(backbone: Backbone) -> str:
    return digest(dict(backbone.model.named_parameters()))
