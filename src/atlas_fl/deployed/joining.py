"""A site of a federation across machines: its own data and backbone, and the server's jobs."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from atlas_fl.assemble import source_of
from atlas_fl.config import Config, config_hash, parse_config
from atlas_fl.config.images import EVENLY
from atlas_fl.deployed.consent import Allowance, Consent, check_consent
from atlas_fl.deployed.homes import Site, home_of
from atlas_fl.deployed.job_policy import JobPolicy
from atlas_fl.deployed.keeping import Receipt, clear_private, confirm_again, read_receipt, write_model
from atlas_fl.deployed.settings_policy import (
    check_examples,
    check_model_digest,
    check_model_name,
    check_settings,
    settings_here,
)
from atlas_fl.deployed.what_leaves import what_leaves
from atlas_fl.engines.hall.worker import Worker
from atlas_fl.engines.messages.census import census_of
from atlas_fl.engines.messages.vault import check_vault
from atlas_fl.engines.stream.frames import Head
from atlas_fl.engines.stream.link import Link, UnreachableError
from atlas_fl.errors import ConfigError, ProtocolError, one_line
from atlas_fl.events import Note, OnEvent, PhaseStarted, ignore
from atlas_fl.io.certs import Certs, open_certs
from atlas_fl.io.machine import versions
from atlas_fl.ranks.devices import find_devices
from atlas_fl.tasks import find_tasks
from atlas_fl.tasks.clients import BY_CLASSES, ClientData, make_clients


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
    private: Path | None = None
    """Where what it does not share is kept until the run is complete; None for `NAME-private` beside `to`."""
    allow: tuple[Allowance, ...] = ()
    """What may leave the site, or happen at it, beside the usual: words of `consent.ALLOWANCES`."""
    least_examples: int = Consent.least_examples
    """Fewest training examples behind an update or a fingerprint."""
    most_sketch: int = Consent.most_sketch
    """Most numbers of a sketch."""
    to: Path
    """Where the client's own model is written at the end: in PEFT's format, or a whole model in transformers' own."""

    @property
    def consent(self) -> Consent:
        """What the site agrees to."""
        return Consent(allow=self.allow, least_examples=self.least_examples, most_sketch=self.most_sketch)


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
    device = _device_of(joining.device)
    check_consent(joining.consent)
    if joining.private is not None:
        check_vault(joining.private)
    private = _private_of(joining, certs.name)
    if (receipt := read_receipt(joining.to, client=certs.name)) is not None:
        return _joined_before(joining, certs, receipt, private=private, on_event=on_event)
    said: dict[str, str | None] = {"version": versions()["atlas_fl"], "config": joining.config, "model": None}
    with _link(joining, certs, said, on_event) as link:
        on_event(Note(f"{certs.name} is connected to {joining.address}"))
        on_event(PhaseStarted("loading"))
        told = _settings_of(link.welcome, joining)
        client, home = _client_and_home(told, joining, link.welcome, name=certs.name, device=device)
        run, task, outline = config_hash(told), client.task, home.outline
        said |= {"config": run, "model": home.fingerprint}
        for line in what_leaves(told, client=certs.name, task=task, device=device, blocks=outline.blocks):
            on_event(Note(line))
        worker = Worker(
            name=certs.name,
            home=home,
            link=link,
            registration={**said, **census_of(client, home.tokens), "device": joining.device, "part": joining.part},
            on_event=on_event,
            receiver=home.receiver,
            actions=home.actions,
            keep=lambda model, sha256: write_model(
                joining.to, Receipt(client=certs.name, config=run, model=sha256), partial(home.export, model)
            ),
            policy=JobPolicy(config=told, client=certs.name, task=task.name, device=device, outline=outline),
        )
        return _end_of(joining, worker, home, link, private=private)


def _client_and_home(
    told: Config, joining: Joining, welcome: Head, *, name: str, device: str
) -> tuple[ClientData, Site]:
    """The site's data and model under settings that it accepts; raises an `AtlasError` for those that it does not."""
    consent, model = joining.consent, str(welcome.get("model"))
    if joining.model is None:
        check_model_name(told.model.model, consent)
    config = settings_here(
        told,
        task=joining.task,
        device=joining.device,
        part=joining.part,
        model=joining.model,
        data_dir=joining.data_dir,
    )
    client = own_client(config, name, task=joining.task, part=joining.part)
    check_settings(told, consent, client=name, task=client.task, device=device)
    check_examples(told, consent, task=client.task, examples=len(client.train))
    home = home_of(
        config,
        client,
        model=model,
        private=_private_of(joining, name),
        noise_secret=joining.to.with_name(f"{name}-noise-secret"),
        run=config_hash(told),
    )
    check_model_digest(home.fingerprint, model, name=config.model.model)
    return client, home


def _end_of(joining: Joining, worker: Worker, home: Site, link: Link, *, private: Path) -> Joined:
    """What the site comes to; its private part goes once its whole model lies here and the server knows so."""
    try:
        has_model = bool(worker.work())
        left = home.leave() if has_model else ""
    except UnreachableError as error:
        if not joining.to.exists():
            raise
        has_model, left = True, _unconfirmed(error, to=joining.to, private=private)
    if left:
        worker.on_event(Note(left))
    return _joined(joining, worker.name, link, has_model=has_model)


def _joined(joining: Joining, name: str, link: Link, *, has_model: bool) -> Joined:
    return Joined(
        name=name,
        adapter=joining.to if has_model else None,
        sent_bytes=link.sent_bytes,
        received_bytes=link.received_bytes,
    )


def _unconfirmed(error: UnreachableError, *, to: Path, private: Path) -> str:
    """What is said where a model lies here in full, and nobody is there to be told so."""
    stays = f"; {private} stays until the server knows so, or you remove it" if private.exists() else ""
    return f"{str(error).partition(';')[0]}, and {to} is complete without it{stays}"


def _joined_before(joining: Joining, certs: Certs, receipt: Receipt, *, private: Path, on_event: OnEvent) -> Joined:
    """What a site has come to whose model lies there already: it was killed before its run was over for the server."""
    on_event(Note(f"the model of {certs.name} is in {joining.to} already; telling {joining.address}"))
    said = {"version": versions()["atlas_fl"], "config": joining.config, "model": None}
    link = _link(joining, certs, said, on_event)
    try:
        with link:
            confirm_again(link, receipt, to=joining.to)
        if left := clear_private(private, receipt):
            on_event(Note(left))
    except UnreachableError as error:
        on_event(Note(_unconfirmed(error, to=joining.to, private=private)))
    return _joined(joining, certs.name, link, has_model=True)


def _link(joining: Joining, certs: Certs, said: Head, on_event: OnEvent) -> Link:
    """The way to the server; `said` is read at each handshake, so that what is found out later is said too."""
    token = {} if joining.token is None else {"token": joining.token}
    return Link(
        joining.address,
        certs,
        hello=lambda: {**said, **token},
        patience=joining.patience_seconds,
        first_patience=joining.first_seconds,
        on_event=on_event,
    )


def _private_of(joining: Joining, name: str) -> Path:
    """Where the parts lie that are not shared."""
    return joining.private or joining.to.with_name(f"{name}-private")


def _device_of(device: str) -> str:
    """The name of this profile."""
    (found,) = find_devices((), (device,)) if "=" in device else find_devices((device,))
    return found.name


def _settings_of(welcome: Head, joining: Joining) -> Config:
    """The server's settings, which are those that the site was given, where it was given any."""
    text, told = welcome.get("settings"), welcome.get("config")
    if not isinstance(text, str):
        raise ProtocolError("the server sent no settings; install its version of atlas-fl")
    config = parse_config(text, origin=f"what {joining.address} sent")
    own = config_hash(config)
    if own != told:
        raise ProtocolError(
            f"the server's settings have hash {own} here and {one_line(told, most=16)} there; install its version"
        )
    if joining.config not in (None, own):
        raise ProtocolError(
            f"the server's settings have hash {own}, and those of --config {joining.config}; this site works for no"
            " other settings: ask who runs the server, or agree on its settings and give these"
        )
    return config


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
        sizes = {split: have[split] if size is None else min(size, have[split]) for split, size in sizes.items()}
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
