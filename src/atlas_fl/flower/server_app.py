"""Flower ServerApp: a run whose clients are SuperNodes, each invited by one message that lasts until the end."""

import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from atlas_fl.cli.display import show, show_progress
from atlas_fl.deployment.consent import ServiceChoices, choices_of
from atlas_fl.errors import AtlasError, ConfigError, ProtocolError, one_line
from atlas_fl.events import Note, OnEvent, ignore
from atlas_fl.flower import messages
from atlas_fl.runtime.transport.certificates import CA, CERT, KEY, check_name

if TYPE_CHECKING:
    from atlas_fl.runtime.coordinator.coordinator import ClientManager
    from atlas_fl.runtime.transport.event_loop import LoopThread
    from atlas_fl.runtime.transport.sessions import Tokens


POLL_SECONDS = 0.5
DAY_SECONDS = 86400.0
RUN_DAYS = 30
"""Days that a node's long message holds, and with it a run."""
GONE = 5
GONE_REMEDY = " Start its SuperNode again, or the run once `flwr supernode list` shows it offline"
CRASHED = (GONE, 8)
"""Flower's codes for a SuperNode that has gone and for a ClientApp that has ended without a word."""
MOST_STARTS = 4
"""Most times that a node's part of one run is begun."""
LAST_SECONDS = 20.0
"""Seconds that replies are waited for once the run has ended."""


@dataclass(kw_only=True, eq=False)
class _Sent:
    """Messages of one kind that are out."""

    grid: messages.serverapp.Grid
    kind: str
    ttl: float
    pending: dict[str, int] = field(default_factory=dict)
    """Node by the message's id."""

    def push(self, content: Mapping[int, messages.app.RecordDict]) -> None:
        """Send every node its content."""
        out = [messages.app.Message(records, node, self.kind, ttl=self.ttl) for node, records in content.items()]
        self.pending |= dict(zip(self.grid.push_messages(out), content, strict=True))

    def pull(self) -> list[tuple[int, messages.app.Message]]:
        """(node, reply) of those who have replied since the last time."""
        replies = self.grid.pull_messages(list(self.pending))
        return [(self.pending.pop(reply.metadata.reply_to_message_id), reply) for reply in replies]


def name_nodes(
    grid: messages.serverapp.Grid, *, count: int, seconds: float, min_clients: int = 0, on_event: OnEvent = ignore
) -> dict[str, int]:
    """The node behind every client's name, of `count` nodes, or for 0 of those that are connected.

    Of two nodes with one name the one with the lower number has it, in every run; the other one is refused with a note,
    and so is a node that does not answer, or answers with an error, where `min_clients` others are there.
    Raises `ProtocolError` where fewer remain; 0 is all, but for those that took another's name.
    """
    until = time.monotonic() + seconds
    while len(connected := sorted(grid.get_node_ids())) < max(count, 1):
        if time.monotonic() > until:
            raise ProtocolError(
                f"{len(connected)} of {max(count, 1)} SuperNodes are connected after {seconds:g} seconds; start them,"
                " or lower nodes in --run-config"
            )
        time.sleep(POLL_SECONDS)
    queries = _Sent(grid=grid, kind=messages.app.MessageType.QUERY, ttl=max(seconds, 60.0))
    queries.push({node: messages.app.RecordDict() for node in connected})
    answers: dict[int, messages.app.Message] = {}
    while queries.pending and time.monotonic() < until:
        answers |= queries.pull()
        time.sleep(POLL_SECONDS)
    nodes: dict[str, int] = {}
    faults: list[str] = []
    for node in connected:
        try:
            name = _name_in(answers.get(node), seconds=seconds)
        except AtlasError as error:
            faults.append(f"node {node} cannot take part: {one_line(error)}")
            continue
        holder = nodes.setdefault(name, node)
        if holder != node:
            taken = f"node {holder} is named {name!r} too"
            on_event(Note(f"node {node} was refused: {taken}; give one another name in its --node-config"))
    if len(nodes) < max(min_clients, 1) or (faults and min_clients == 0):
        raise ProtocolError(faults[0] if faults else f"{len(nodes)} of {min_clients} clients have a name of their own")
    for line in faults:
        on_event(Note(f"begins without it: {line}"))
    return nodes


def _name_in(reply: messages.app.Message | None, *, seconds: float) -> str:
    """The name that a node has told; raises an `AtlasError` where it has told none, or none that can be one."""
    if reply is None:
        raise ProtocolError(f"no answer within {seconds:g} seconds; look at its SuperNode's log")
    if reply.has_error():
        # a SuperNode that was killed counts as connected for a while
        raise ProtocolError(f"{reply.error.reason}{GONE_REMEDY if reply.error.code == GONE else ''}")
    try:
        name = str(reply.content[messages.RECORD]["name"])
    except (KeyError, TypeError):
        raise ProtocolError("it told no name; install the same atlas-fl there") from None
    check_name(name)
    return name


@dataclass(kw_only=True, eq=False)
class Invitations:
    """The long message of every node, sent again where its ClientApp or its SuperNode crashes."""

    grid: messages.serverapp.Grid
    nodes: Mapping[str, int]
    certs: Path
    """The folder that `make_certs` made."""
    tokens: "Tokens"
    address: str

    def __post_init__(self) -> None:
        self._names = {node: name for name, node in self.nodes.items()}
        self._sent = _Sent(grid=self.grid, kind=messages.app.MessageType.TRAIN, ttl=RUN_DAYS * DAY_SECONDS)
        self._starts = dict.fromkeys(self._names, 0)
        self._waiting = set(self._names)
        self._over = threading.Event()

    @contextmanager
    def beside(self, manager: "ClientManager", bridge: "LoopThread") -> Iterator[None]:
        """Invite and watch all nodes; at the end, wait for them, and tell them where the run has failed."""
        watcher = threading.Thread(target=self._watch, args=(manager, bridge), name="atlas-replies", daemon=True)
        watcher.start()
        try:
            yield
        except AtlasError:
            for name in self.nodes:  # what went wrong may name others, and is in the log of the run
                bridge.wait(manager.remove, name, "the server has ended the run; ask who started it")
            raise
        finally:
            self._over.set()
            watcher.join()

    def _watch(self, manager: "ClientManager", bridge: "LoopThread") -> None:
        until = float("inf")
        while (self._sent.pending or self._waiting) and time.monotonic() < until:
            self.step(manager, bridge)
            if self._over.is_set():
                self._waiting.clear()
                until = min(until, time.monotonic() + LAST_SECONDS)
            time.sleep(POLL_SECONDS)

    def step(self, manager: "ClientManager", bridge: "LoopThread") -> None:
        """Invite who waits for that, and hear who has ended."""
        if self._waiting and not self._over.is_set():
            self._invite()
        for node, reply in self._sent.pull():
            if reply.has_error() and not self._over.is_set():
                error = reply.error
                name = self._names[node]
                reason = one_line(str(error.reason).strip())
                if error.code in CRASHED and self._starts[node] < MOST_STARTS:
                    bridge.note(f"{name}: {reason} It is started again")
                    self._waiting.add(node)
                else:
                    bridge.note(f"{name}: {reason}")
                    bridge.submit(manager.remove, name, reason)

    def _invite(self) -> None:
        there = self._waiting & set(self.grid.get_node_ids())
        self._waiting -= there
        content = {}
        for node in sorted(there):
            name = self._names[node]
            pem = {file: (self.certs / name / file).read_bytes() for file in (CA, CERT, KEY)}
            invitation = {"address": self.address, "token": self.tokens.issue(name), **pem}
            content[node] = messages.app.RecordDict({messages.RECORD: messages.app.ConfigRecord(invitation)})
            self._starts[node] += 1
        if content:
            self._sent.push(content)


class Order(ServiceChoices):
    """The settings of `flwr run --run-config` (`KEYS`), with `_` for `-`."""

    config: str
    address: str
    """`host:port` under which the nodes reach the stream."""
    nodes: int
    """Number of SuperNodes that are waited for; 0 for those that are connected."""


KEYS = ("config", "address", "host", "nodes", "min_clients", "wait", "deadline")


def order_of(values: Mapping[str, Any]) -> Order:
    """The order that this run config gives."""
    kinds = get_type_hints(Order)
    try:
        return Order(**{name: kinds[name](values[name.replace("_", "-")]) for name in KEYS})
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"the run config cannot be read ({error!r}); begin with the one of examples/flower/pyproject.toml"
        ) from None


def natural(name: str) -> list[tuple[bool, int, str]]:
    """Sorts movie-2 before movie-10."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def begin(grid: messages.serverapp.Grid, context: messages.app.Context) -> None:
    """Carry out the run of this context and leave its folder, as `atlas serve` does."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as in `atlas serve`
    try:
        with show_progress() as on_event:
            serve(grid, order_of(context.run_config), on_event=on_event)
    except AtlasError as error:
        show([f"atlas: {error}"])
        raise type(error)(str(error)) from None  # Flower logs where it comes from; that is no news


def serve(grid: messages.serverapp.Grid, order: Order, *, on_event: OnEvent) -> None:
    """Serve this order to the nodes of this grid; its config file may lie in the app's folder."""
    from atlas_fl.cli.tables import outcome
    from atlas_fl.config import load_config, validate
    from atlas_fl.deployment.server import remote_backend, serve_final_models
    from atlas_fl.deployment.service import ServerOptions
    from atlas_fl.experiment.run import run_config
    from atlas_fl.runtime.transport.certificates import make_certs
    from atlas_fl.runtime.transport.client import split_address
    from atlas_fl.runtime.transport.sessions import Tokens

    app_dir = messages.get_project_dir(grid.run.fab_id, grid.run.fab_version, grid.run.fab_hash)
    config = validate(load_config(app_dir / order.config), at_sites=True)
    host, port = split_address(order.address)
    nodes = name_nodes(grid, count=order.nodes, seconds=order.wait, min_clients=order.min_clients, on_event=on_event)
    names = sorted(nodes, key=natural)
    with tempfile.TemporaryDirectory(prefix="atlas-") as folder:
        certs, tokens = Path(folder) / "certs", Tokens()
        make_certs(certs, servers=[host], clients=names, days=RUN_DAYS)
        invitations = Invitations(grid=grid, nodes=nodes, certs=certs, tokens=tokens, address=order.address)
        service = ServerOptions(
            **choices_of(ServiceChoices, replace(order, port=port)),
            certs=certs / "server",
            tokens=tokens,
            companion=invitations.beside,
        )
        serve_final_models(config, service, on_event)
        result = run_config(config, on_event=on_event, resume=True, backend=remote_backend(service))
    show(outcome(result.folder, result.summary, complete=result.complete))


app = messages.serverapp.ServerApp()
app.main()(begin)
