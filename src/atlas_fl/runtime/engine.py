"""The engine interface: jobs in, updates out; and a meter of the bytes through cuts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Protocol

from atlas_fl.client.job import Job, Update
from atlas_fl.errors import ProtocolError
from atlas_fl.frozen import Frozen
from atlas_fl.storage.ledger import Direction, Kind, LedgerRow


class Engine(Protocol):
    """Runs the jobs of clients."""

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, in their order; `action` is a key of `client.registry.ACTIONS`.

        A client that cannot be reached has no update.
        """


class MissingAnswersError(ProtocolError):
    """Some clients did not answer an action that needs every client."""

    def __init__(self, message: str, clients: Sequence[str]) -> None:
        super().__init__(message)
        self.clients = tuple(clients)


def run_on_all_clients(engine: Engine, action: str, jobs: Sequence[Job]) -> list[Update]:
    """The updates of all these jobs, in their order, for actions that need every client, as those of planning.

    Raises `MissingAnswersError` where one is missing.
    """
    updates = engine.run(action, jobs)
    answered = {update.client for update in updates}
    if missing := [job.client for job in jobs if job.client not in answered]:
        raise MissingAnswersError(
            f"no {action} of {', '.join(missing)}, and a plan needs that of every client; bring them back and start"
            " again: a run goes on from its last checkpoint",
            missing,
        )
    return updates


class TrafficMeter(Frozen):
    """An engine that counts the bytes through every cut of another engine, by client and action."""

    engine: Engine
    cut_traffic: dict[tuple[str, str], Counter[tuple[Kind, Direction]]] = field(default_factory=dict)

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The wrapped engine's updates of these jobs."""
        updates = self.engine.run(action, jobs)
        for update in updates:
            if update.crossed:
                self.cut_traffic.setdefault((update.client, action), Counter()).update(update.crossed)
        return updates

    def rows(self, *, round: int) -> Iterator[LedgerRow]:
        """One ledger row for each client, action, kind and direction, in the order in which they occurred."""
        for (client, action), sizes in self.cut_traffic.items():
            for (kind, direction), size in sizes.items():
                yield LedgerRow(round=round, client=client, direction=direction, kind=kind, bytes=size, phase=action)
