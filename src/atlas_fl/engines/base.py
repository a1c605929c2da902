"""Where clients compute: an engine takes jobs and brings back updates, wherever the sites are."""

from collections.abc import Sequence
from typing import Protocol

from atlas_fl.clients.base import Job, Update
from atlas_fl.errors import ProtocolError


class Engine(Protocol):
    """Anything that can carry out jobs."""

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, in their order; `action` is a key of `clients.ACTIONS`.

        Of a client that is out of reach there is none.
        """
        ...


class MissingAnswersError(ProtocolError):
    """Some clients did not answer what a plan needs of everyone."""

    def __init__(self, message: str, clients: Sequence[str]) -> None:
        super().__init__(message)
        self.clients = tuple(clients)


def run_all(engine: Engine, action: str, jobs: Sequence[Job]) -> list[Update]:
    """The updates of all these jobs, for what cannot be done without one of them, as planning; in their order.

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
