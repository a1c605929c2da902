"""The server of a deployment: the backend of a run whose clients are at their sites, and the end of the run.

At the end every client gets its own model, also one that was away. `heard.json` in the run's folder says who has its
model on disk: a site confirms once the model is written, and is answered when that is recorded here. A server that was
killed in between waits for such a site when it is started again. A run that was not served has no such file.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from atlas_fl.client.job import ClientTokens
from atlas_fl.config import Config, load_config, pin_mask_file, run_folder
from atlas_fl.config.conflicts import conflicts
from atlas_fl.config.validation import check_cluster_counts, check_cut_names, unknown_cut_names
from atlas_fl.deployment.consent import ServiceChoices, check_choices
from atlas_fl.deployment.service import ServerOptions, listening, read_sites, write_sites
from atlas_fl.deployment.settings_policy import key_book
from atlas_fl.errors import AtlasError, BudgetError, CheckpointError, ConfigError, ProtocolError, check_known
from atlas_fl.events import Note, OnEvent
from atlas_fl.experiment.recorder import check_same_settings
from atlas_fl.experiment.state import FederationState
from atlas_fl.params import Params
from atlas_fl.partial_sharing import is_fully_shared
from atlas_fl.planning.plan import read_plan
from atlas_fl.ranks.devices import DEVICES
from atlas_fl.runtime.coordinator import coordinator
from atlas_fl.runtime.coordinator.client_registry import ClientProxy
from atlas_fl.runtime.coordinator.coordinator import ClientManager
from atlas_fl.runtime.coordinator.split_server import SplitServer
from atlas_fl.runtime.engine import Engine
from atlas_fl.runtime.protocol.client_metadata import placeholder_client
from atlas_fl.runtime.remote import RemoteEngine
from atlas_fl.runtime.transport.certificates import listed_clients, open_certs
from atlas_fl.runtime.transport.event_loop import LoopThread
from atlas_fl.setup.assembly import Assembly, JoinQueue, Newcomer, assemble, pick_device
from atlas_fl.setup.options import keeps_models, strategy_of
from atlas_fl.storage import checkpoint
from atlas_fl.storage.files import run_lock
from atlas_fl.storage.jsonl import read_sealed, write_sealed
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
        folder = run_folder(config)
        certs = open_certs(service.certs)
        listed = listed_clients(service.certs)
        last = last_plan(folder)
        planned = () if last is None else last[1]
        expected = _expected_clients(folder, service, planned=planned, listed=listed)
        left_out = tuple(name for name in planned if name in service.without)
        sites = read_sites(folder)
        if unknown := [name for name in left_out if name not in sites]:
            raise CheckpointError(
                f"run {folder.path} knows nothing of the data of {', '.join(unknown)}, and cannot go on without them;"
                " let everybody come once, and then it does"
            )
        names = tuple(dict.fromkeys((*listed, *left_out)))
        listens = listening(config, service, certs, on_event=on_event, listed=names, late=service.late)
        with listens as (manager, bridge, where):
            try:
                on_event(Note(f"listening on {where} for {', '.join(expected)}"))
                manager.known = {name: sites[name][0] for name in planned if name in sites}
                for name in left_out:
                    manager.clients[name].metadata, manager.clients[name].device = sites[name]
                    manager.clients[name].given_up = True
                if left_out:
                    goes = "missing in every round; their last models stay what others mix with"
                    on_event(Note(f"goes on without {', '.join(left_out)}: {goes}"))
                with service.companion(manager, bridge):
                    least = service.min_clients or len(expected)
                    come = bridge.call(manager.wait_for_clients, expected, min_clients=least, seconds=service.wait)
                    proxies = [manager.clients[name] for name in come]
                    if line := check_sites(config, proxies, listed=tuple(manager.clients), late=service.late):
                        bridge.on_event(Note(line))
                    clients = tuple(name for name in planned or come if name in come or name in service.without)
                    assembly = _assembly(config, manager, bridge, clients)
                    if not folder.deliveries.exists():
                        write_sealed(folder.deliveries, {"heard": []})
                    write_sites(folder, proxies)
                    with nullcontext() if assembly.is_full else SplitServer(assembly.site) as split_server:
                        engine = RemoteEngine(
                            manager=manager,
                            bridge=bridge,
                            split_server=split_server,
                            deadline_seconds=service.deadline,
                            min_clients=service.min_clients,
                            max_concurrent=AT_ONCE if split_server is None else None,
                            excluded=frozenset(service.without),
                            key_book=key_book(config, ca=certs.ca) if config.mixing.secure else None,
                            releases=folder.releases,
                        )
                        yield assembly, engine
                    if folder.summary.exists():
                        deliver_final_models(folder, manager, bridge, service, seconds=FAREWELL_SECONDS)
            except (BudgetError, ConfigError) as error:
                # Settings that cannot be will not come back: a site need not wait for them.
                reason = reason_for_sites(error)
                bridge.call(coordinator.shutdown_clients, manager, {}, seconds=FAREWELL_SECONDS, reason=reason)
                raise

    return backend


def reason_for_sites(error: AtlasError) -> str:
    """The reason why a run has ended, for every site: the fault of the settings, and no name or device of a site."""
    if isinstance(error, BudgetError):
        return "the run cannot be planned for the devices that have come; ask who runs the server"
    return f"{str(error).partition(';')[0]}; ask who runs the server"


def check_sites(config: Config, proxies: Sequence[ClientProxy], *, listed: tuple[str, ...], late: bool) -> str:
    """A note on the names in `--split` that nobody here has; empty where there are none.

    Raises `ConfigError` for settings that do not fit the clients that have come: `late` ones may still have a name that
    nobody here has.
    """
    tasks = [proxy.metadata.task for proxy in proxies if proxy.metadata is not None]
    devices = [proxy.device.name for proxy in proxies if proxy.device is not None]
    allowed = {*listed, *tasks, *devices, *DEVICES}
    check_cluster_counts(config.clustering, clients=len(proxies))
    if not late:
        check_cut_names(config.split.split, allowed)
    named = unknown_cut_names(config.split.split, allowed)
    return f"--split names {', '.join(named)}, and nobody here is called so: kept for who comes late" if named else ""


def check_served(config: Config, service: ServerOptions) -> None:
    """Raise `ConfigError` unless this config means the same across machines (`config/unserved.tsv`)."""
    check_choices(ServiceChoices, service)
    for conflict in conflicts("unserved.tsv"):
        if conflict.applies(config):
            raise ConfigError(conflict.message(config))
    mixing, method = config.mixing, strategy_of(config)
    if method.across_machines:
        raise ConfigError(
            f"--strategy {mixing.strategy} {method.across_machines}; take another strategy, or use `atlas run`"
        )
    if config.needs_sums and service.late:
        raise ConfigError(
            "--secure and --dp client are of the same clients in every round, and late ones may join; say --no-late"
        )
    if service.late and (mixing.personal_models or mixing.second_model != "none"):
        raise ConfigError(
            f"--strategy {mixing.strategy} has clients train models of their own, and late ones may join; say --no-late"
        )
    if config.mixing.secure and service.tokens is not None:
        raise ConfigError(
            "--secure needs keys that the server has not made, and under Flower it makes all; take `atlas serve`"
        )
    pick_device(config.run.accelerator)


def _expected_clients(
    folder: RunFolder, service: ServerOptions, *, planned: tuple[str, ...], listed: tuple[str, ...]
) -> tuple[str, ...]:
    """The clients of the plan where there is one to go on with, else all that are listed; without those left out."""
    without = service.without
    clients = dict.fromkeys((*planned, *listed))
    check_known("client in --without", *without, among=clients)
    if unlisted := [name for name in planned if name not in listed and name not in without]:
        raise CheckpointError(
            f"run {folder.path} was planned with {', '.join(unlisted)}, not listed here; list them again, go on with"
            f" --without {' '.join(unlisted)}, or choose another --name"
        )
    expected = tuple(name for name in planned or listed if name not in without)
    if len(expected) < max(1, service.min_clients):
        raise ConfigError(
            f"--min-clients is {service.min_clients}, and {len(expected)} clients are waited for; lower it, list more"
            f" in {service.certs}, or leave fewer out"
        )
    return expected


def _newcomer(proxy: ClientProxy) -> Newcomer:
    """A client that has registered, with a placeholder in the place of its data, which stays at its site."""
    assert proxy.metadata is not None, "a client registers with its metadata"
    assert proxy.device is not None, "a client registers with its device"
    client, tokens = placeholder_client(proxy.name, proxy.metadata)
    return Newcomer(client=client, device=proxy.device, tokens=tokens)


def _assembly(config: Config, manager: ClientManager, bridge: LoopThread, names: tuple[str, ...]) -> Assembly:
    """The parts of a run with these clients."""
    clients = [_newcomer(manager.clients[name]) for name in names]
    tokens = {client.client.name: client.tokens for client in clients}
    assembly = assemble(
        config,
        clients=tuple(client.client for client in clients),
        tokens=tokens,
        devices=tuple(client.device for client in clients),
    )
    queue = _join_queue(run_folder(config), manager, bridge, tokens)
    return replace(assembly, join_queue=queue, uses_placeholders=not is_fully_shared(config.mixing.share))


def _join_queue(
    folder: RunFolder, manager: ClientManager, bridge: LoopThread, tokens: dict[str, ClientTokens]
) -> JoinQueue:
    """The queue of late clients of a served run: those who are connected and in no plan.

    Their placeholders go to `tokens` as well, where the server's halves of cut models look them up.
    """

    def enter(name: str) -> None:
        bridge.call(coordinator.accept_client, manager, name)
        write_sites(folder, [manager.clients[name]])

    def waiting(_round: int) -> tuple[Newcomer, ...]:
        late = bridge.call(coordinator.late_clients, manager)
        newcomers = tuple(_newcomer(proxy) for proxy in late if proxy.metadata is not None)  # one may leave meanwhile
        tokens.update({newcomer.client.name: newcomer.tokens for newcomer in newcomers})
        return newcomers

    return JoinQueue(
        waiting_clients=waiting,
        accept_client=enter,
        reject_client=lambda name, error: bridge.call(coordinator.reject_client, manager, name, str(error)),
        exclude_client=lambda name, _: bridge.call(coordinator.exclude_client, manager, name),
    )


def deliver_final_models(
    folder: RunFolder,
    manager: ClientManager,
    bridge: LoopThread,
    service: ServerOptions,
    *,
    seconds: float,
    awaited: Collection[str] = (),
    unanswered: Collection[str] = (),
) -> None:
    """Give all that are here, or come within so many seconds where they are awaited, the model of this complete run.

    A client that is writing its model then has at least the deadline of a job for it. Writes down which have done so,
    and notes which have not. The `unanswered` have confirmed and may not know that this is recorded.
    """
    models = _final_models(folder)
    heard, _ = _deliveries(folder)

    def record(*, answering: bool) -> None:
        write_sealed(folder.deliveries, {"heard": sorted(heard), "answering": answering})

    def record_saved(name: str) -> None:
        heard.add(name)
        try:
            record(answering=True)
        except OSError as error:
            raise ProtocolError(
                f"the server cannot write down that {name} has its model ({error.strerror}); start the same command"
                " again once it can"
            ) from None

    manager.on_model_saved = record_saved
    bridge.call(
        coordinator.shutdown_clients,
        manager,
        models,
        seconds=seconds,
        writing_seconds=service.deadline,
        wait_for=awaited,
        may_return=unanswered,
        return_seconds=FAREWELL_SECONDS,
    )
    record(answering=False)
    if rest := ", ".join(name for name in models if name not in heard):
        bridge.on_event(
            Note(f"{rest} did not get the model at the end of the run; start the same command again, here and there")
        )


def serve_final_models(
    config: Config, service: ServerOptions, on_event: OnEvent, *, again: Collection[str] = ()
) -> None:
    """Wait until the clients of a complete run that did not get their model have it, or `wait` is over.

    Those of `again` get it once more, although they have confirmed that they have it.

    Raises an `AtlasError` as the run itself would: for other settings, certificates, or an address that is taken;
    `ConfigError` where `again` names clients of a run that is not complete, was not served, or has no model for them.
    """
    config = pin_mask_file(config)
    folder = run_folder(config)
    if not (folder.summary.exists() and folder.deliveries.exists()):
        if again:
            raise ConfigError(
                f"--again is for a served run that is complete, and {folder.path} is none; leave --again out, or name"
                " the run as it was served"
            )
        return
    check_same_settings(config, folder)
    models = _final_models(folder)
    check_known("client in --again", *again, among=models)
    heard, answering = _deliveries(folder)
    heard -= set(again)
    if again:
        with run_lock(folder.path):
            write_sealed(folder.deliveries, {"heard": sorted(heard), "answering": answering})
    rest = [name for name in models if name not in heard]
    if not rest and not answering:
        return
    certs = open_certs(service.certs)
    listed = listed_clients(service.certs)
    may_join = [name for name in models if name in listed and name not in service.without]
    awaited = [name for name in may_join if name not in heard]
    unanswered = [name for name in may_join if name in heard and answering]
    if rest and not awaited:
        names = ", ".join(rest)
        on_event(Note(f"{names} did not get the model, and may not join now; start this again once they may"))
    if not awaited and not unanswered:
        return
    # models under a mask go as its values, here as in the rounds: the whole one may be longer than a frame
    mask = read_tensors(folder.mask) if folder.mask.exists() else None
    seconds = service.wait
    listens = listening(config, service, certs, on_event=on_event, listed=listed, late=False, mask=mask)
    with run_lock(folder.path), listens as (manager, bridge, where):
        until = [f"for up to {seconds:g} seconds for {', '.join(awaited)}, without a model yet"] if awaited else []
        if unanswered:
            names = ", ".join(unanswered)
            until.append(f"for up to {FAREWELL_SECONDS:g} seconds for {names}, recorded and perhaps not answered")
        on_event(Note(f"run {folder.path} is complete; listening on {where} {'; '.join(until)}"))
        with service.companion(manager, bridge):
            deliver_final_models(
                folder, manager, bridge, service, seconds=seconds, awaited=awaited, unanswered=unanswered
            )


def last_plan(folder: RunFolder) -> tuple[checkpoint.Checkpoint, tuple[str, ...]] | None:
    """(newest checkpoint, clients of its plan); None where there is no checkpoint to go on from."""
    newest, _ = checkpoint.load_latest(folder.checkpoints)
    if newest is None:
        return None
    plan = read_plan(folder, folder.path / newest.state["plan"])
    return newest, tuple(client.name for client in plan.clients)


def _deliveries(folder: RunFolder) -> tuple[set[str], bool]:
    """(clients that have confirmed their model, whether the server was killed while it answered them)."""
    record = read_sealed(folder.deliveries, "heard")
    return set(record["heard"]), bool(record.get("answering"))


def _final_models(folder: RunFolder) -> Mapping[str, Params]:
    checkpoint.load_newest(folder.checkpoints)  # raises: an older one holds other models
    last = last_plan(folder)
    assert last is not None, "a complete run has written its last checkpoint"
    state, config = FederationState.from_checkpoint(*last), load_config(folder.config, within=folder.path)
    # a model that stays at its client is named; of others the client predicts with what it holds
    return state.predicting_models(config) if keeps_models(config) else state.client_models
