"""The server of a federation across machines: the workplace of a run whose clients are at their sites."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from atlas_fl.client.job import ClientTokens
from atlas_fl.config import Config, run_folder
from atlas_fl.config.schema import NONE
from atlas_fl.config.validation import check_cluster_counts, check_cut_names, unknown_cut_names
from atlas_fl.data.registry import find_tasks
from atlas_fl.deployment.end_of_run import begin_to_serve, dismiss, last_plan
from atlas_fl.deployment.service import Service, check_without, listening, read_sites, write_sites
from atlas_fl.errors import BudgetError, CheckpointError, ConfigError
from atlas_fl.events import Note, OnEvent
from atlas_fl.partial_sharing import is_fully_shared
from atlas_fl.ranks.devices import DEVICES
from atlas_fl.runtime.coordinator import coordinator
from atlas_fl.runtime.coordinator.client_registry import Seat
from atlas_fl.runtime.coordinator.coordinator import Hall, leave_out, let_in, newcomers, turn_away
from atlas_fl.runtime.coordinator.split_server import Suffixes
from atlas_fl.runtime.engine import Engine
from atlas_fl.runtime.protocol.client_metadata import Census, stand_in
from atlas_fl.runtime.remote import RemoteEngine
from atlas_fl.runtime.transport.certificates import listed_clients, open_certs
from atlas_fl.runtime.transport.event_loop import Desk
from atlas_fl.setup.assembly import Assembly, Door, Newcomer, assemble, pick_device, trainable_of
from atlas_fl.setup.options import strategy_of
from atlas_fl.storage.run_folder import RunFolder

FAREWELL_SECONDS = 30.0
AT_ONCE = 16
"""Most clients with whole models that work at the same time: the server holds a message of a model for each."""


def across_machines(service: Service) -> Callable[[Config, OnEvent], AbstractContextManager[tuple[Assembly, Engine]]]:
    """The `workplace` of `experiment.run.run` whose clients come over the network.

    Raises `ConfigError` for a config that cannot be kept across machines, before anybody is waited for.
    """

    @contextmanager
    def workplace(config: Config, on_event: OnEvent) -> Iterator[tuple[Assembly, Engine]]:
        check_served(config, service)
        folder, certs, listed = run_folder(config), open_certs(service.certs), listed_clients(service.certs)
        wanted, left_out = _wanted(folder, listed, service.without)
        if service.min_clients > len(wanted):
            raise ConfigError(
                f"--min-clients is {service.min_clients}, and {len(wanted)} clients are waited for; lower it, or list"
                f" more in {service.certs}"
            )
        # adapters that a cluster shares belong to those who were there when the plan was made
        late = service.late and config.split.server_adapters == "per_client"
        names = tuple(dict.fromkeys((*listed, *left_out)))
        with listening(config, service, certs, on_event=on_event, listed=names, late=late) as (hall, desk, where):
            try:
                on_event(Note(f"listening on {where} for {', '.join(wanted)}"))
                _leave_out(folder, hall, left_out, on_event)
                with service.beside(hall, desk):
                    yield from _gathered(config, hall, desk, wanted, service, late=late, left_out=left_out)
                    if folder.summary.exists():
                        writing = service.deadline_seconds
                        dismiss(folder, hall, desk, seconds=FAREWELL_SECONDS, writing_seconds=writing)
            except (BudgetError, ConfigError) as error:
                # Settings that cannot be will not come back: a site need not wait for them.
                desk.call(coordinator.dismiss(hall, {}, seconds=FAREWELL_SECONDS, reason=str(error)))
                raise

    return workplace


def _gathered(
    config: Config,
    hall: Hall,
    desk: Desk,
    wanted: tuple[str, ...],
    service: Service,
    *,
    late: bool,
    left_out: tuple[str, ...],
) -> Iterator[tuple[Assembly, Engine]]:
    """Assembly and engine, once those who are waited for have come."""
    least = service.min_clients or len(wanted)
    come = desk.call(hall.gather(wanted, least=least, seconds=service.wait_seconds))
    for line in check_sites(config, [hall.seats[name] for name in come], listed=tuple(hall.seats), late=late):
        desk.on_event(Note(line))
    folder = run_folder(config)
    known = come if not left_out else tuple(name for name in _planned(folder) if name in {*come, *left_out})
    assembly = _assembly(config, hall, desk, known)
    begin_to_serve(folder)
    write_sites(folder, [hall.seats[name] for name in come])
    with _suffixes(assembly) as suffixes:
        yield assembly, _engine(hall, desk, suffixes, service)


def check_sites(config: Config, seats: Sequence[Seat], *, listed: tuple[str, ...], late: bool) -> tuple[str, ...]:
    """Notes on what the config says of clients, tasks and devices, where it fits those who have come.

    Raises `ConfigError` where it does not: `late` ones may still have a name that nobody here has.
    """
    tasks = [seat.census.task for seat in seats if seat.census is not None]
    devices = [seat.device.name for seat in seats if seat.device is not None]
    known = {*listed, *tasks, *devices, *DEVICES}
    check_cluster_counts(config.clustering, clients=len(seats))
    if not late:
        check_cut_names(config.split.split, known)
    if not (named := unknown_cut_names(config.split.split, known)):
        return ()
    return (f"--split names {', '.join(named)}, and nobody here is called so: it is kept for who comes late",)


def _suffixes(assembly: Assembly) -> AbstractContextManager[Suffixes | None]:
    return nullcontext() if assembly.is_full else Suffixes(assembly.site)


def _engine(hall: Hall, desk: Desk, suffixes: Suffixes | None, service: Service) -> RemoteEngine:
    return RemoteEngine(
        hall=hall,
        desk=desk,
        suffixes=suffixes,
        deadline_seconds=service.deadline_seconds,
        least=service.min_clients,
        at_once=AT_ONCE if suffixes is None else None,
        without=frozenset(service.without),
    )


def check_served(config: Config, service: Service) -> None:
    """Nothing where this config means the same across machines; raises `ConfigError` where it does not."""
    mixing = config.mixing
    _check_simulated(config)
    pick_device(config.run.accelerator)
    if not strategy_of(config).communicates:
        raise ConfigError(
            f"--strategy {mixing.strategy} sends nothing, so there is nothing to serve; use `atlas run` at every site"
        )
    tasks = find_tasks(config.data.tasks, config.data.task)
    trainable = trainable_of(config, tasks)
    if trainable == "full" and (strategy_of(config).clustered or not any(task.images for task in tasks)):
        raise ConfigError(
            "--trainable full is served for images, by strategies without clusters, and simulated for all else: whole"
            " models are not fingerprinted across machines yet; take --trainable lora, or `atlas run`"
        )
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


def _planned(folder: RunFolder) -> tuple[str, ...]:
    """The clients of the plan to go on with; none where there is none."""
    last = last_plan(folder)
    return () if last is None else last[1]


def _wanted(
    folder: RunFolder, listed: tuple[str, ...], without: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(who is waited for, which clients of the plan are left out).

    The clients of the plan where there is one to go on with, else all that are listed; but for those to be left out.
    """
    planned = _planned(folder)
    check_without(without, planned=planned, listed=listed)
    unlisted = [name for name in planned if name not in listed and name not in without]
    if unlisted:
        raise CheckpointError(
            f"run {folder.path} was planned with {', '.join(unlisted)}, not listed here; list them again, go on with"
            f" --without {' '.join(unlisted)}, or choose another --name"
        )
    wanted = tuple(name for name in planned or listed if name not in without)
    return wanted, tuple(name for name in planned if name in without)


def _leave_out(folder: RunFolder, hall: Hall, names: tuple[str, ...], on_event: OnEvent) -> None:
    """Put what is known of these clients of the plan into their seats, where nobody will sit."""
    if not names:
        return
    for name, (census, device) in read_sites(folder, names).items():
        seat = hall.seats[name]
        seat.census, seat.device, seat.given_up = census, device, True
    on_event(
        Note(f"goes on without {', '.join(names)}: missing in every round; their last models stay what others mix with")
    )


def _assembly(config: Config, hall: Hall, desk: Desk, names: tuple[str, ...]) -> Assembly:
    """The parts of a run with stand-ins in the place of the data, which stays where it is."""
    folder, seats = run_folder(config), [hall.seats[name] for name in names]
    censuses: Mapping[str, Census] = {seat.name: seat.census for seat in seats if seat.census is not None}
    stand_ins = {name: stand_in(name, census) for name, census in censuses.items()}
    tokens = {name: own for name, (_, own) in stand_ins.items()}
    clients = tuple(client for client, _ in stand_ins.values())
    devices = tuple(seat.device for seat in seats if seat.device is not None)
    assembly = assemble(config, clients=clients, tokens=tokens, devices=devices)
    return replace(assembly, door=_door(folder, hall, desk, tokens), apart=not is_fully_shared(config.mixing.share))


def _door(folder: RunFolder, hall: Hall, desk: Desk, tokens: dict[str, ClientTokens]) -> Door:
    """The door of a run that is served: those wait there whose seats are in no plan.

    Their stand-ins go to `tokens` as well, where the server's halves of cut models look them up.
    """

    def enter(name: str) -> None:
        desk.call(let_in(hall, name))
        write_sites(folder, [hall.seats[name]])

    def waiting(_round: int) -> tuple[Newcomer, ...]:
        found = []
        for seat in desk.call(newcomers(hall)):
            census, device = seat.census, seat.device
            if census is not None and device is not None:
                client, own = stand_in(seat.name, census)
                tokens[seat.name] = own
                found.append(Newcomer(client=client, device=device, tokens=own))
        return tuple(found)

    return Door(
        waiting=waiting,
        let_in=enter,
        turn_away=lambda name, error: desk.call(turn_away(hall, name, str(error))),
        leave_out=lambda name, _: desk.call(leave_out(hall, name)),
    )
