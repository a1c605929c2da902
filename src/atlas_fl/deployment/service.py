"""The listening server (`atlas serve`), its options, and the client metadata that its run folder keeps.

Strategies, audit and records need each client's task, label counts, lengths and device. Its site reports them when it
registers (`runtime.protocol.client_metadata`); they are stored, so that a run can go on without one of the sites.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from torch import nn

from atlas_fl.config import Config, config_hash, run_folder, to_toml
from atlas_fl.config.conflicts import MULTILABEL, kinds_of
from atlas_fl.config.schema import NONE, RunConfig
from atlas_fl.data.registry import TASKS, find_tasks
from atlas_fl.deployment.consent import ServiceChoices
from atlas_fl.errors import BudgetError, ConfigError, ProtocolError
from atlas_fl.events import OnEvent
from atlas_fl.experiment.summary import versions
from atlas_fl.models.backbone import Backbone
from atlas_fl.models.identity import model_identity
from atlas_fl.models.vision_loading import tokens_per_image
from atlas_fl.params import Params
from atlas_fl.planning.ranks_and_cuts import cuts_for_planning
from atlas_fl.plugins import plugin_digests
from atlas_fl.ranks.devices import Device
from atlas_fl.runtime.coordinator.client_registry import CheckClient, ClientProxy
from atlas_fl.runtime.coordinator.coordinator import ClientManager
from atlas_fl.runtime.protocol.client_metadata import ClientMetadata, labels_of_task, placeholder_client, read_metadata
from atlas_fl.runtime.protocol.messages import NO_PLUGINS, Identity
from atlas_fl.runtime.transport.certificates import Certs, Listed
from atlas_fl.runtime.transport.connections import descriptors_note
from atlas_fl.runtime.transport.event_loop import LoopThread
from atlas_fl.runtime.transport.frames import FRAME_LIMIT, Head
from atlas_fl.runtime.transport.server import Server, check_free
from atlas_fl.runtime.transport.sessions import Sessions, Tokens
from atlas_fl.setup.assembly import assemble, backbone_of, max_sequence_length, model_sender, trainable_of, trained_body
from atlas_fl.setup.options import strategy_of, warmup_rank
from atlas_fl.sparse.masks import Mask
from atlas_fl.storage import jsonl, tensors
from atlas_fl.storage.run_folder import RunFolder


def write_sites(folder: RunFolder, proxies: Sequence[ClientProxy]) -> None:
    """Write the metadata and devices of these clients beside those of others."""
    sites = jsonl.read_sealed(folder.sites) if folder.sites.exists() else {}
    reported = {
        proxy.name: {"census": asdict(proxy.metadata), "device": asdict(proxy.device)}
        for proxy in proxies
        if proxy.metadata is not None and proxy.device is not None
    }
    jsonl.write_sealed(folder.sites, {**sites, **reported})


def read_sites(folder: RunFolder) -> dict[str, tuple[ClientMetadata, Device]]:
    """The metadata and devices of the clients that this run has had."""
    sites = jsonl.read_sealed(folder.sites) if folder.sites.exists() else {}
    return {name: (read_metadata(site["census"]), Device(**site["device"])) for name, site in sites.items()}


REST_BYTES = 16 * 2**20
"""Most bytes of a request beside a model: a census, sketches, heads, importance."""


def run_id(config: Config) -> str | None:
    """The id of a run whose server draws noise (`--dp client`), made once in its folder; None of any other run."""
    releases = run_folder(config).releases
    if config.training.dp == "client" and not config.mixing.secure and not releases.exists():
        jsonl.write_sealed(releases, {"run": token_hex(32), "rounds": []})
    return str(jsonl.read_sealed(releases, "run")["run"]) if releases.exists() else None


def client_manager_of(
    config: Config, listed: tuple[str, ...], bridge: LoopThread, *, late: bool, mask: Mask | None = None
) -> ClientManager:
    """The client manager of this config; `mask` is that of a run which has one before its first job here."""
    tasks = find_tasks(config.data.tasks, config.data.task)
    backbone = backbone_of(config, tasks)
    is_full = trainable_of(config, tasks) == "full"
    body = trained_body(backbone, config) if is_full else None
    new_sender = model_sender(backbone, config, is_full=is_full, mask=mask)
    model = model_identity(backbone)
    identity = Identity(
        version=versions()["atlas_fl"],
        config=config_hash(config),
        plugins=plugins_said(config.run.plugin),
        model=str(model.weights),
        architecture=model.architecture,
        tokenizer=model.tokenizer,
        vocabulary=model.vocabulary,
        run=run_id(config),
    )
    if backbone.vision is None:
        most_tokens = max_sequence_length(backbone)
    else:
        most_tokens = 1 if is_full else tokens_per_image(backbone.vision)
    max_request_bytes = request_limit(config, backbone.model, body=body)
    # names and sizes alone, from which it is known what trains
    backbone.model.to("meta")
    outline = replace(backbone, vocabulary=None if backbone.vocabulary is None else backbone.vocabulary.to("meta"))
    return ClientManager(
        listed,
        identity,
        settings=to_toml(without_places(config)),
        on_note=bridge.note,
        accepts_late=late,
        new_sender=new_sender,
        images=backbone.vision is not None,
        one_head=is_full and config.sparse.has_mask,
        task_labels={task.name: labels_of_task(task) for task in (*TASKS.values(), *tasks)},
        # the classes that sites do not know by the name of a task
        classes={task.name: task.label_names for task in tasks if task.name not in TASKS and task.num_labels > 1},
        check_client=client_check(config, outline, most_tokens=most_tokens),
        max_request_bytes=max_request_bytes,
    )


def client_check(config: Config, backbone: Backbone, *, most_tokens: int) -> CheckClient:
    """The check of one client that registers: that it could be planned with this model on its device.

    `backbone` needs names and sizes alone, and reads examples of at most so many tokens. A fault of the settings for
    everybody, such as a cut beyond the model, is left to planning, and ends the run.
    """

    def check(name: str, metadata: ClientMetadata, device: Device) -> None:
        longest = max(tokens for lengths in metadata.lengths.values() for tokens, _, _ in lengths)
        if longest > most_tokens:
            raise ProtocolError(
                f"{name} has an example of {longest} tokens, and {backbone.name} reads {most_tokens}; install the"
                " server's version, or give its model with --model"
            )
        if metadata.num_labels == 0 and backbone.vocabulary is None:
            raise ProtocolError(
                f"task {metadata.task!r} of {name} is to write text, and no task of the settings does; bring a task"
                " with labels, or ask who runs the server for one with target="
            )
        if metadata.num_labels and backbone.family.stock and backbone.vocabulary is not None:
            raise ProtocolError(
                f"task {metadata.task!r} of {name} has labels, and this model writes text and has no head for them;"
                " bring a task with target="
            )
        if metadata.multilabel and MULTILABEL not in kinds_of(config).values():
            raise ProtocolError(
                f"task {metadata.task!r} of {name} has several labels a row, and no task of the settings has; bring a"
                " task of one class a row, or ask who runs the server for NAME,labels=a|b,multi=semicolon"
            )
        client, tokens = placeholder_client(name, metadata)
        assembly = assemble(config, clients=(client,), tokens={name: tokens}, devices=(device,), backbone=backbone)
        try:
            cuts_for_planning(assembly)
        except BudgetError as error:
            raise ProtocolError(f"{name} cannot take part: {error}") from None
        except ConfigError as error:
            if assembly.is_full:  # a head that fits no mask
                raise ProtocolError(f"{name} cannot take part: {error}") from None

    return check


def without_places(config: Config) -> Config:
    """The settings as a site needs them: the place of the server's runs, and the name of this one, is its own.

    These are settings of the session, so that the hash is the same.
    """
    return replace(config, run=replace(config.run, runs_dir=RunConfig().runs_dir, name=None, secrets=None))


def request_limit(config: Config, model: nn.Module, *, body: Params | None = None) -> int:
    """Most bytes that a client may send at once: twice what it trains, and some for all the rest.

    That is its adapters at the highest rank, or the `body` of a model of which all weights train; with halves they are
    three models instead of one. What crosses a cut depends on batches and lengths too, so there it is no less than
    `FRAME_LIMIT`.
    """
    models = 1 + strategy_of(config).models_in_report
    if body is not None:
        return REST_BYTES + 2 * tensors.encoded_size(body) * models
    largest_rank = max(*config.ranks.candidates, warmup_rank(config))
    widths = sum(sum(weight.shape) for weight in model.parameters() if weight.ndim == 2)
    limit = REST_BYTES + 2 * 4 * largest_rank * widths * models
    return limit if config.split.split == NONE else max(FRAME_LIMIT, limit)


def plugins_said(names: Sequence[str]) -> str:
    """The digests of pinned plug-ins in the words of the handshake (`runtime.protocol.messages.Identity`)."""
    return " ".join(plugin_digests(names)) or NO_PLUGINS


STOPPED = (
    "the server was stopped before the run was complete; start this command again once `atlas serve` is started again"
)
"""The reason with which sites end where the server does without another one."""
NOT_LISTED = "it is not listed any more"
"""The reason why a client is lost that was taken off the list while the server runs."""


class ServerOptions(ServiceChoices):
    """Address, certificates and waiting times of a server."""

    certs: Path
    """The folder `server` of `atlas certs make`."""
    tokens: Tokens | None = None
    """Tokens that clients bring beside their certificate; None where that is enough."""
    companion: Callable[[ClientManager, LoopThread], AbstractContextManager[None]] = lambda *_: nullcontext()
    """Entered when the server listens and left when the run ends: whatever else starts and watches its clients."""


@contextmanager
def listening(
    config: Config,
    service: ServerOptions,
    certs: Certs,
    *,
    on_event: OnEvent,
    listed: tuple[str, ...],
    late: bool,
    mask: Mask | None = None,
) -> Iterator[tuple[ClientManager, LoopThread, str]]:
    """The client manager of this config, its event bridge, and the address that it listens on.

    Raises `ConfigError` where the address cannot be listened on.
    """
    check_free(service.host, service.port)  # before the model is loaded, which may take minutes
    with LoopThread(on_event=on_event) as bridge:
        manager = client_manager_of(config, listed, bridge, late=late, mask=mask)
        allowed = Listed(service.certs, on_note=bridge.note)

        def admit(name: str, hello: Mapping[str, Any]) -> Head:
            if name in service.without:
                raise ProtocolError(f"the run goes on without {name}; who runs the server can let it in again")
            welcome = manager.handshake(name, hello)
            if manager.clients[name].removal_reason == NOT_LISTED:
                manager.clients[name].removal_reason = ""  # it is on the list again
            if service.tokens is not None:
                service.tokens.redeem(name, hello)
            return welcome

        def lose(name: str) -> None:
            if name in manager.clients:
                bridge.submit(manager.remove, name, NOT_LISTED)

        sessions = Sessions(
            answer=manager.answer,
            admit=admit,
            listed=allowed.now,
            on_presence=manager.on_presence,
            on_refused=manager.on_refused,
            on_unlisted=lose,
            limit=manager.max_request_bytes,
        )
        server = Server(sessions, certs, host=service.host, port=service.port)
        port = bridge.call(server.start)
        if line := descriptors_note(len(listed)):
            bridge.note(line)
        try:
            yield manager, bridge, f"{service.host}:{port}"
        finally:
            is_told = any(client.shutdown_message is not None for client in manager.clients.values())
            bridge.wait(server.stop, "" if is_told else STOPPED)
