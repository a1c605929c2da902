"""Messages to nodes and their replies: one short question, then one message that lasts as long as the run."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atlas_fl.engines.hall import Hall
from atlas_fl.engines.loops import Desk
from atlas_fl.engines.tokens import Tokens
from atlas_fl.errors import AtlasError, ProtocolError
from atlas_fl.flower.api import ConfigRecord, Grid, Message, MessageType, RecordDict
from atlas_fl.flower.node import RECORD, Invitation
from atlas_fl.io.certs import CA, CERT, KEY

POLL_SECONDS = 0.5
DAY_SECONDS = 86400.0
RUN_DAYS = 30
"""How long a node's long message holds, and with it a run."""
LAST_SECONDS = 20.0
"""How long replies are waited for once the run has ended."""


@dataclass(kw_only=True, eq=False)
class _Sent:
    """Messages of one kind that are out, and what came back."""

    grid: Grid
    pending: dict[str, int] = field(default_factory=dict)
    """Node by the message's id."""
    results: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def push(self, content: Mapping[int, RecordDict], *, kind: str, ttl: float) -> None:
        """Send every node its content."""
        messages = [Message(records, node, kind, ttl=ttl) for node, records in content.items()]
        self.pending |= dict(zip(self.grid.push_messages(messages), content, strict=True))

    def pull(self) -> list[int]:
        """The nodes that have replied since the last time."""
        come = []
        for reply in self.grid.pull_messages(list(self.pending)):
            node = self.pending.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                continue
            come.append(node)
            if reply.has_error():
                self.errors[node] = str(reply.error.reason).strip()
            else:
                self.results[node] = reply.content[RECORD]
        return come


def ask(grid: Grid, count: int, *, seconds: float) -> dict[str, int]:
    """The node behind every client's name: of at least so many nodes, or for 0 of those that are connected.

    Raises `ProtocolError` where a node does not answer, answers with an error, or has another one's name.
    """
    until = time.monotonic() + seconds
    ids = _connected(grid, count, until=until)
    asked = _Sent(grid=grid)
    asked.push({node: RecordDict() for node in ids}, kind=MessageType.QUERY, ttl=max(seconds, 60.0))
    while asked.pending and not asked.errors and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        asked.pull()
    for node, reason in asked.errors.items():
        raise ProtocolError(f"node {node} cannot take part: {reason}")
    if asked.pending:
        silent = ", ".join(str(node) for node in sorted(asked.pending.values()))
        raise ProtocolError(
            f"no answer from node {silent} within the {seconds:g} seconds of wait; look at its SuperNode's log"
        )
    nodes: dict[str, int] = {}
    for node, said in asked.results.items():
        name = str(said["name"])
        if name in nodes:
            raise ProtocolError(f"nodes {nodes[name]} and {node} are both named {name!r}; change one's --node-config")
        nodes[name] = node
    return nodes


def _connected(grid: Grid, count: int, *, until: float) -> list[int]:
    while len(ids := sorted(grid.get_node_ids())) < max(count, 1):
        if time.monotonic() > until:
            raise ProtocolError(f"{len(ids)} of {max(count, 1)} SuperNodes are connected; start more, or lower nodes")
        time.sleep(POLL_SECONDS)
    return ids


def invite(
    grid: Grid, nodes: Mapping[str, int], *, certs: Path, tokens: Tokens, address: str
) -> Callable[[Hall, Desk], AbstractContextManager[None]]:
    """What goes on beside the stream: every node has its long message, and one that ends early is not waited for."""

    def invitation(name: str) -> RecordDict:
        pem = {file: (certs / name / file).read_bytes() for file in (CA, CERT, KEY)}
        invited = Invitation(address=address, token=tokens.issue(name), pem=pem)
        return RecordDict({RECORD: ConfigRecord(invited.record())})

    @contextmanager
    def beside(hall: Hall, desk: Desk) -> Iterator[None]:
        sent, over = _Sent(grid=grid), threading.Event()
        names = {node: name for name, node in nodes.items()}
        sent.push(
            {node: invitation(name) for name, node in nodes.items()},
            kind=MessageType.TRAIN,
            ttl=RUN_DAYS * DAY_SECONDS,
        )

        def watch() -> None:
            until = None
            while sent.pending and (until is None or time.monotonic() < until):
                for node in sent.pull():
                    if node in sent.errors and not over.is_set():
                        desk.note(f"{names[node]}: {sent.errors[node]}")
                        desk.threads.submit(hall.lose(names[node], sent.errors[node]))
                if over.wait(POLL_SECONDS):
                    until = until or time.monotonic() + LAST_SECONDS
                    time.sleep(POLL_SECONDS)

        watcher = threading.Thread(target=watch, name="atlas-replies", daemon=True)
        watcher.start()
        try:
            yield
        except AtlasError as error:
            for name in nodes:
                desk.threads.call(hall.lose(name, f"the server has ended the run: {error}"))
            raise
        finally:
            over.set()
            watcher.join()

    return beside
