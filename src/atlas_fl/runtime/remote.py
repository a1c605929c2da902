"""Clients in other processes and on other machines: jobs go out over their streams, updates come back in order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from atlas_fl.client.job import Job, Update
from atlas_fl.errors import ProtocolError
from atlas_fl.events import Note
from atlas_fl.runtime.coordinator.coordinator import ClientManager
from atlas_fl.runtime.coordinator.split_server import SplitServer
from atlas_fl.runtime.local import spill_to_disk
from atlas_fl.runtime.transport.event_loop import Desk


@dataclass(frozen=True, kw_only=True)
class RemoteEngine:
    """An `Engine` whose clients sit in a `ClientManager`."""

    manager: ClientManager
    desk: Desk
    deadline_seconds: float
    """How long a job may take, its journeys included."""
    split_server: SplitServer | None
    """Where the upper blocks of cut clients are computed; None where no client is cut."""
    min_clients: int
    """Fewest clients that must answer, or all of the asked where these are fewer; 0 for all."""
    max_concurrent: int | None = None
    """Most clients that have a job at the same time; None for all that are asked."""
    excluded: frozenset[str] = frozenset()
    """Clients that are asked nothing: the run goes on without them."""

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of those who answered, in the order of the jobs.

        Raises `ProtocolError` where too few did: the run stops there and goes on from its checkpoint.
        """
        jobs = [job for job in jobs if job.client not in self.excluded]
        if self.split_server is not None:
            self.split_server.begin_round(action, jobs)
        size = self.max_concurrent or max(1, len(jobs))
        updates = list[Update]()
        for first in range(0, len(jobs), size):
            updates += spill_to_disk(action, self._run_batch(action, jobs, first, size), updates)
        needed = min(self.min_clients or len(jobs), len(jobs))
        if len(updates) < needed:
            answered = {update.client for update in updates}
            missing = [job.client for job in jobs if job.client not in answered]
            raise ProtocolError(
                f"{len(updates)} of {len(jobs)} clients answered {action} in round {jobs[0].round}, not"
                f" {', '.join(missing)}, and {needed} are needed; bring them back and start `atlas serve` again: it"
                " goes on from its last checkpoint; or lower --min-clients"
            )
        return [replace(update, travelled=True) for update in updates]

    def _run_batch(self, action: str, jobs: Sequence[Job], first: int, size: int) -> list[Update]:
        """The updates to so many of the jobs, from the first of them; why others have none is told."""
        batch = jobs[first : first + size]
        answers = self.desk.call(
            self.manager.run_jobs(
                action,
                batch,
                seconds=self.deadline_seconds,
                split_server=self.split_server,
                on_done=lambda done: self.desk.progress(action, first + done, len(jobs)),
            )
        )
        for job, answer in zip(batch, answers, strict=True):
            if isinstance(answer, str):
                self.desk.on_event(Note(f"no {action} of {job.client} in round {job.round}: {answer}"))
        return [answer for answer in answers if isinstance(answer, Update)]
