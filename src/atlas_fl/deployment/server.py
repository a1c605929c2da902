"""The server of a deployment: the backend of a run whose clients are at their sites, and the end of the run.

At the end every client gets its own model, also one that was away. `heard.json` in the run's folder says who has its
model on disk: a site confirms once the model is written, and is answered when that is recorded here. A run that was not
served has no such file.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from atlas_fl.client.job import ClientTokens
from atlas_fl.config import Config, load_config, pin_mask_file, run_folder
from atlas_fl.config.methods import has_frozen_part, measures_halves, rule_of
from atlas_fl.config.schema import NONE
from atlas_fl.config.validation import check_cluster_counts, check_cut_names, unknown_cut_names
from atlas_fl.data.registry import find_tasks
from atlas_fl.deployment.service import ServerOptions, check_without, listening, read_sites, write_sites
from atlas_fl.errors import AtlasError, BudgetError, CheckpointError, ConfigError, ProtocolError, unknown_name
from atlas_fl.events import Note, OnEvent
from atlas_fl.experiment.recorder import check_same_settings, checkpoint_models
from atlas_fl.params import Params
from atlas_fl.partial_sharing import is_fully_shared
from atlas_fl.planning.plan import Plan
from atlas_fl.ranks.devices import DEVICES
from atlas_fl.runtime.coordinator import coordinator
from atlas_fl.runtime.coordinator.client_registry import ClientProxy
from atlas_fl.runtime.coordinator.coordinator import (
    ClientManager,
    accept_client,
    exclude_client,
    late_clients,
    reject_client,
)
from atlas_fl.runtime.coordinator.split_server import SplitServer
from atlas_fl.runtime.engine import Engine
from atlas_fl.runtime.protocol.client_metadata import ClientMetadata, placeholder_client
from atlas_fl.runtime.remote import RemoteEngine
from atlas_fl.runtime.transport.certificates import listed_clients, open_certs
from atlas_fl.runtime.transport.event_loop import EventBridge
from atlas_fl.setup.assembly import Assembly, JoinQueue, Newcomer, assemble, pick_device, trainable_of
from atlas_fl.setup.options import strategy_of
from atlas_fl.storage import checkpoint
from atlas_fl.storage.digests import check_files, check_state
from atlas_fl.storage.files import run_lock
from atlas_fl.storage.jsonl import read_json, read_sealed, write_sealed
from atlas_fl.storage.run_folder import RunFolder
from atlas_fl.storage.tensors import read_tensors

FAREWELL_SECONDS = 30.0
AT_ONCE = 16
"""Most clients with whole models that work at the same time: the server holds a message of a model for each."""


def remote_backend(
    service: ServerOptions,
) -> Callable[[Config, OnEvent], AbstractContextManager[tuple[Assembly, Engine]]]:
    """The `backend` of `experiment.run.run_config` whose clients come over the network.

    Raises `ConfigError` for a config that cannot be kept across machines, before anybody is waited for.
    """

    @contextmanager
    def backend(config: Config, on_event: OnEvent) -> Iterator[tuple[Assembly, Engine]]:
        check_served(config, service)
        folder, certs, listed = run_folder(config), open_certs(service.certs), listed_clients(service.certs)
        expected, left_out = _expected_clients(folder, listed, service.without)
        if service.min_clients > len(expected):
            raise ConfigError(
                f"--min-clients is {service.min_clients}, and {len(expected)} clients are waited for; lower it, or list"
                f" more in {service.certs}"
            )
        # adapters that a cluster shares belong to those who were there when the plan was made
        late = service.late and config.split.server_adapters == "per_client"
        names = tuple(dict.fromkeys((*listed, *left_out)))
        with listening(config, service, certs, on_event=on_event, listed=names, late=late) as (manager, bridge, where):
            try:
                on_event(Note(f"listening on {where} for {', '.join(expected)}"))
                manager.known = _known_clients(folder)
                _leave_out(folder, manager, left_out, on_event)
                with service.companion(manager, bridge):
                    yield from _wait_and_assemble(
                        config, manager, bridge, expected, service, late=late, left_out=left_out
                    )
                    if folder.summary.exists():
                        writing = service.deadline_seconds
                        deliver_final_models(folder, manager, bridge, seconds=FAREWELL_SECONDS, writing_seconds=writing)
            except (BudgetError, ConfigError) as error:
                # Settings that cannot be will not come back: a site need not wait for them.
                reason = reason_for_sites(error)
                bridge.call(coordinator.shutdown_clients(manager, {}, seconds=FAREWELL_SECONDS, reason=reason))
                raise

    return backend


def reason_for_sites(error: AtlasError) -> str:
    """Why a run has ended, for every site: what is wrong with the settings, and no name or device of another site."""
    if isinstance(error, BudgetError):
        return "the run cannot be planned for the devices that have come; ask who runs the server"
    return f"{str(error).partition(';')[0]}; ask who runs the server"


def _wait_and_assemble(
    config: Config,
    manager: ClientManager,
    bridge: EventBridge,
    expected: tuple[str, ...],
    service: ServerOptions,
    *,
    late: bool,
    left_out: tuple[str, ...],
) -> Iterator[tuple[Assembly, Engine]]:
    """Assembly and engine, once those who are waited for have come."""
    least = service.min_clients or len(expected)
    come = bridge.call(manager.wait_for_clients(expected, min_clients=least, seconds=service.wait_seconds))
    for line in check_sites(config, [manager.clients[name] for name in come], listed=tuple(manager.clients), late=late):
        bridge.on_event(Note(line))
    folder = run_folder(config)
    clients = come if not left_out else tuple(name for name in _planned_clients(folder) if name in {*come, *left_out})
    assembly = _assembly(config, manager, bridge, clients)
    start_deliveries(folder)
    write_sites(folder, [manager.clients[name] for name in come])
    with _split_server(assembly) as split_server:
        yield assembly, _engine(manager, bridge, split_server, service)


def check_sites(
    config: Config, proxies: Sequence[ClientProxy], *, listed: tuple[str, ...], late: bool
) -> tuple[str, ...]:
    """Notes on what the config says of clients, tasks and devices, where it fits those who have come.

    Raises `ConfigError` where it does not: `late` ones may still have a name that nobody here has.
    """
    tasks = [proxy.metadata.task for proxy in proxies if proxy.metadata is not None]
    devices = [proxy.device.name for proxy in proxies if proxy.device is not None]
    allowed = {*listed, *tasks, *devices, *DEVICES}
    check_cluster_counts(config.clustering, clients=len(proxies))
    if not late:
        check_cut_names(config.split.split, allowed)
    if not (named := unknown_cut_names(config.split.split, allowed)):
        return ()
    return (f"--split names {', '.join(named)}, and nobody here is called so: it is kept for who comes late",)


def _split_server(assembly: Assembly) -> AbstractContextManager[SplitServer | None]:
    return nullcontext() if assembly.is_full else SplitServer(assembly.site)


def _engine(
    manager: ClientManager, bridge: EventBridge, split_server: SplitServer | None, service: ServerOptions
) -> RemoteEngine:
    return RemoteEngine(
        manager=manager,
        bridge=bridge,
        split_server=split_server,
        deadline_seconds=service.deadline_seconds,
        min_clients=service.min_clients,
        max_concurrent=AT_ONCE if split_server is None else None,
        excluded=frozenset(service.without),
    )


def check_served(config: Config, service: ServerOptions) -> None:
    """Nothing where this config means the same across machines; raises `ConfigError` where it does not."""
    mixing = config.mixing
    if config.run.secrets is not None:
        raise ConfigError(
            f"--secrets {config.run.secrets} is for a simulation, and every site keeps its own secret, which no server"
            " may have; leave it out"
        )
    _check_simulated(config)
    pick_device(config.run.accelerator)
    if not strategy_of(config).communicates:
        raise ConfigError(
            f"--strategy {mixing.strategy} sends nothing, so there is nothing to serve; use `atlas run` at every site"
        )
    tasks = find_tasks(config.data.tasks, config.data.task)
    trainable = trainable_of(config, tasks)
    if not is_fully_shared(mixing.share) and trainable == "full":
        raise ConfigError(
            f"--share {' '.join(mixing.share)} keeps parts of a model at its client, and whole models travel whole;"
            " share A B head, take --trainable lora, or simulate it with `atlas run`"
        )
    if not is_fully_shared(mixing.share) and (config.ranks.rerank or config.model.init_adapter is not None):
        raise ConfigError(
            f"--share {' '.join(mixing.share)} keeps parts of a model at its client, and --rerank and --init-adapter"
            " make whole models at the server; leave these out, or share A B head"
        )
    if config.split.split != NONE and config.model.precision == "fp16":
        raise ConfigError(
            "--precision fp16 scales losses by what overflows, which two sides of a cut do not tell each other; use"
            " bf16 or fp32 with --split"
        )
    if config.run.engine != "local" or config.run.workers not in (None, 1):
        raise ConfigError(
            "--engine and --workers are for simulations, and across machines every site trains its own client; leave"
            " them out"
        )
    if service.min_clients < 0 or service.wait_seconds <= 0 or service.deadline_seconds <= 0:
        raise ConfigError("--min-clients is at least 0, --wait and --deadline are above 0 seconds")
    if not 0 <= service.port <= 65535:
        raise ConfigError(f"--port is {service.port}; allowed: 1 to 65535, or 0 for a free one")


def _check_simulated(config: Config) -> None:
    data = config.data
    if data.rating_cuts or data.flipped_clients or data.one_task or data.client_sizes or data.centralized:
        raise ConfigError(
            "--rating-cuts, --flipped-clients, --one-task, --client-sizes and --centralized deal out rows that are"
            " here, and across machines clients bring their own; leave them out, or use `atlas run`"
        )
    _check_messages(config)
    if config.attack.attack != "none":
        raise ConfigError(
            f"--attack {config.attack.attack} simulates hostile clients, and across machines clients are who they are;"
            " leave it out, or use `atlas run`"
        )
    if config.images.carry_momentum:
        raise ConfigError(
            "--carry-momentum keeps what clients did in one process, and here there are several; leave it out"
        )
    if config.data.arrive:
        raise ConfigError(
            "--arrive says who is late in a simulation, and across machines clients come when they come; leave it out"
        )
    if config.split.leakage:
        raise ConfigError(
            "--leakage reads the clients' texts, and across machines these stay at their sites; leave it out, and use"
            " `atlas leakage` where the texts are"
        )


def _check_messages(config: Config) -> None:
    """Nothing where all that a strategy sends has a message between server and site."""
    for flag, is_set in (
        ("--personal-models", config.mixing.personal_models),
        ("--control-variates", config.training.control_variates),
        ("--second-model", config.mixing.second_model != "none"),
        (
            f"--strategy {config.mixing.strategy}",
            rule_of(config) == "fedavg_dynamic" or has_frozen_part(config),
        ),
    ):
        if is_set:
            raise ConfigError(
                f"{flag} has a second set of tensors beside the model, which no message across machines holds yet;"
                " leave it out, or use `atlas run`"
            )
    if measures_halves(config) and config.split.split != NONE:
        raise ConfigError(
            f"--strategy {config.mixing.strategy} has every client train on either half of its examples, which no"
            f" message through a cut holds yet, and --split is {config.split.split}; leave it out, or take --strategy"
            " atlas_laplacian"
        )
    if rule_of(config) == "ifca":
        raise ConfigError(
            "--strategy ifca scores the models of all clusters at each client before a round, which no site does yet;"
            " take another strategy, or use `atlas run`"
        )


def _planned_clients(folder: RunFolder) -> tuple[str, ...]:
    """The clients of the plan to go on with; none where there is none."""
    last = last_plan(folder)
    return () if last is None else last[1]


def _known_clients(folder: RunFolder) -> dict[str, ClientMetadata]:
    """What the clients of the plan to go on with had said of themselves, as far as the folder knows."""
    if not folder.sites.exists():  # nobody was planned, or an earlier version began the run
        return {}
    known = read_sealed(folder.sites)
    names = [name for name in _planned_clients(folder) if name in known]
    return {name: metadata for name, (metadata, _) in read_sites(folder, names).items()}


def _expected_clients(
    folder: RunFolder, listed: tuple[str, ...], without: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(who is waited for, which clients of the plan are left out).

    The clients of the plan where there is one to go on with, else all that are listed; but for those to be left out.
    """
    planned = _planned_clients(folder)
    check_without(without, planned=planned, listed=listed)
    unlisted = [name for name in planned if name not in listed and name not in without]
    if unlisted:
        raise CheckpointError(
            f"run {folder.path} was planned with {', '.join(unlisted)}, not listed here; list them again, go on with"
            f" --without {' '.join(unlisted)}, or choose another --name"
        )
    expected = tuple(name for name in planned or listed if name not in without)
    return expected, tuple(name for name in planned if name in without)


def _leave_out(folder: RunFolder, manager: ClientManager, names: tuple[str, ...], on_event: OnEvent) -> None:
    """Give the excluded clients of the plan the metadata that the run folder has of them."""
    if not names:
        return
    for name, (metadata, device) in read_sites(folder, names).items():
        proxy = manager.clients[name]
        proxy.metadata, proxy.device, proxy.given_up = metadata, device, True
    on_event(
        Note(f"goes on without {', '.join(names)}: missing in every round; their last models stay what others mix with")
    )


def _assembly(config: Config, manager: ClientManager, bridge: EventBridge, names: tuple[str, ...]) -> Assembly:
    """The parts of a run with placeholder clients in the place of the data, which stays where it is."""
    folder, proxies = run_folder(config), [manager.clients[name] for name in names]
    metadata_by_client: Mapping[str, ClientMetadata] = {
        proxy.name: proxy.metadata for proxy in proxies if proxy.metadata is not None
    }
    placeholders = {name: placeholder_client(name, metadata) for name, metadata in metadata_by_client.items()}
    tokens = {name: client_tokens for name, (_, client_tokens) in placeholders.items()}
    clients = tuple(client for client, _ in placeholders.values())
    devices = tuple(proxy.device for proxy in proxies if proxy.device is not None)
    assembly = assemble(config, clients=clients, tokens=tokens, devices=devices)
    return replace(
        assembly,
        join_queue=_join_queue(folder, manager, bridge, tokens),
        uses_placeholders=not is_fully_shared(config.mixing.share),
    )


def _join_queue(
    folder: RunFolder, manager: ClientManager, bridge: EventBridge, tokens: dict[str, ClientTokens]
) -> JoinQueue:
    """The queue of late clients of a served run: those who are connected and in no plan.

    Their placeholders go to `tokens` as well, where the server's halves of cut models look them up.
    """

    def enter(name: str) -> None:
        bridge.call(accept_client(manager, name))
        write_sites(folder, [manager.clients[name]])

    def waiting(_round: int) -> tuple[Newcomer, ...]:
        newcomers = []
        for proxy in bridge.call(late_clients(manager)):
            metadata, device = proxy.metadata, proxy.device
            if metadata is not None and device is not None:
                client, client_tokens = placeholder_client(proxy.name, metadata)
                tokens[proxy.name] = client_tokens
                newcomers.append(Newcomer(client=client, device=device, tokens=client_tokens))
        return tuple(newcomers)

    return JoinQueue(
        waiting_clients=waiting,
        accept_client=enter,
        reject_client=lambda name, error: bridge.call(reject_client(manager, name, str(error))),
        exclude_client=lambda name, _: bridge.call(exclude_client(manager, name)),
    )


def start_deliveries(folder: RunFolder) -> None:
    """Write down that nobody has got its model, where that is not known from before."""
    if not folder.deliveries.exists():
        write_sealed(folder.deliveries, {"heard": []})


def deliver_final_models(
    folder: RunFolder,
    manager: ClientManager,
    bridge: EventBridge,
    *,
    seconds: float,
    writing_seconds: float,
    awaited: Collection[str] = (),
) -> None:
    """Give all who are here, or come within so many seconds where they are awaited, the model of this complete run.

    Who writes its model then has at least `writing_seconds` for it. Writes down who has done so, and tells who has not.
    """
    models, heard = _final_models(folder), _delivered_names(folder)
    manager.on_model_saved = _delivery_recorder(folder, heard)
    bridge.call(
        coordinator.shutdown_clients(
            manager, models, seconds=seconds, writing_seconds=writing_seconds, wait_for=awaited
        )
    )
    write_sealed(folder.deliveries, {"heard": sorted(heard)})
    if rest := [name for name in models if name not in heard]:
        bridge.on_event(
            Note(
                f"{', '.join(rest)} did not get the model at the end of the run; start the same command again, here and"
                " there"
            )
        )


def _delivery_recorder(folder: RunFolder, heard: set[str]) -> Callable[[str], None]:
    """What writes down that a client has its model; raises `ProtocolError` where that is not possible."""

    def write(name: str) -> None:
        heard.add(name)
        try:
            write_sealed(folder.deliveries, {"heard": sorted(heard)})
        except OSError as error:
            raise ProtocolError(
                f"the server cannot write down that {name} has its model ({error.strerror}); start the same command"
                " again once it can"
            ) from None

    return write


def deliver_again(config: Config, names: Collection[str]) -> None:
    """Have these clients get their models once more, although they have said that they had them.

    Raises `ConfigError` where the run is not complete, was not served, or has no model for one of them.
    """
    folder = run_folder(pin_mask_file(config))
    if not (folder.summary.exists() and folder.deliveries.exists()):
        raise ConfigError(
            f"--again is for a served run that is complete, and {folder.path} is none; leave --again out, or name the"
            " run as it was served"
        )
    check_same_settings(pin_mask_file(config), load_config(folder.config, within=folder.path), folder=folder.path)
    models = _final_models(folder)
    for name in names:
        if name not in models:
            raise unknown_name("client in --again", name, models)
    with run_lock(folder.path):
        write_sealed(folder.deliveries, {"heard": sorted(_delivered_names(folder).difference(names))})


def serve_final_models(config: Config, service: ServerOptions, on_event: OnEvent) -> None:
    """Nothing, once those of a complete run who did not get their model have it, or `wait_seconds` are over.

    Raises an `AtlasError` as the run itself would: for other settings, certificates, or an address that is taken.
    """
    config = pin_mask_file(config)
    folder = run_folder(config)
    if not (folder.summary.exists() and folder.deliveries.exists()):
        return
    check_same_settings(config, load_config(folder.config, within=folder.path), folder=folder.path)
    rest = [name for name in _final_models(folder) if name not in _delivered_names(folder)]
    if not rest:
        return
    seconds, certs, listed = service.wait_seconds, open_certs(service.certs), listed_clients(service.certs)
    awaited = [name for name in rest if name in listed and name not in service.without]
    if not awaited:
        names = ", ".join(rest)
        on_event(Note(f"{names} did not get the model, and may not join now; start this again once they may"))
        return
    # models under a mask go as its values, here as in the rounds: the whole one may be longer than a frame
    mask = read_tensors(folder.mask) if folder.mask.exists() else None
    listens = listening(config, service, certs, on_event=on_event, listed=listed, late=False, mask=mask)
    with run_lock(folder.path), listens as (manager, bridge, where):
        names, until = ", ".join(awaited), f"for up to {seconds:g} seconds"
        on_event(Note(f"run {folder.path} is complete; listening on {where} {until} for {names}, without a model yet"))
        with service.companion(manager, bridge):
            deliver_final_models(
                folder, manager, bridge, seconds=seconds, writing_seconds=service.deadline_seconds, awaited=awaited
            )


def last_plan(folder: RunFolder) -> tuple[checkpoint.Checkpoint, tuple[str, ...]] | None:
    """The newest checkpoint and who is in its plan; None where there is none to go on from."""
    newest, _ = checkpoint.load_latest(folder.checkpoints, check=check_state)
    if newest is None:
        return None
    check_files(folder, folder.path / newest.state["plan"])
    plan = Plan.from_json(read_json(folder.path / newest.state["plan"]))
    return newest, tuple(client.name for client in plan.clients)


def _delivered_names(folder: RunFolder) -> set[str]:
    return set(read_sealed(folder.deliveries)["heard"])


def _final_models(folder: RunFolder) -> Mapping[str, Params]:
    checkpoint.load_newest(folder.checkpoints)  # raises: an older one holds other models
    last = last_plan(folder)
    assert last is not None, "a complete run has written its last checkpoint"
    return checkpoint_models(*last)[1]
