"""The remote engine: sends jobs to clients on other machines and returns their updates in order."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from atlas_fl.aggregation.secure_mean import SumGroup, SumSettings
from atlas_fl.client.job import Job, Update
from atlas_fl.errors import ProtocolError
from atlas_fl.events import Note
from atlas_fl.frozen import Frozen
from atlas_fl.methods.method import Wait
from atlas_fl.runtime.coordinator.coordinator import ClientManager
from atlas_fl.runtime.coordinator.secure_sums import SUM, SumStep
from atlas_fl.runtime.coordinator.split_server import SplitServer
from atlas_fl.runtime.local import spill_to_disk
from atlas_fl.runtime.protocol.messages import read_packed, write_packed
from atlas_fl.runtime.transport.event_loop import LoopThread
from atlas_fl.secure_sums import KeyBook, Messages, SumResult, run_sum
from atlas_fl.storage.jsonl import read_sealed, write_sealed


class RemoteEngine(Frozen):
    """An `Engine` whose clients are connected to a `ClientManager`."""

    manager: ClientManager
    bridge: LoopThread
    deadline_seconds: float
    """Longest time of a job, network included."""
    split_server: SplitServer | None
    """Computes the server halves of cut clients; None where no client is cut."""
    min_clients: int
    """Fewest clients that must answer, or all that have a job where these are fewer; 0 for all."""
    max_concurrent: int | None = None
    """Most clients that have a job at the same time; None for no limit."""
    excluded: frozenset[str] = frozenset()
    """Clients that get no jobs: the run goes on without them."""
    key_book: KeyBook | None = None
    """The sites' public keys for secure sums; None where there are none."""
    releases: Path = Path("releases.json")
    """File of the rounds whose noisy sums were given out (`--dp client`)."""

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of the clients that answered, in the order of the jobs.

        Raises `ProtocolError` where too few did: the run stops there and resumes from its checkpoint.
        """
        away = {*self.excluded, *self.manager.open_jobs}  # who trains on over rounds is asked for nothing else
        jobs = [job for job in jobs if job.client not in away]
        size = self.max_concurrent or max(1, len(jobs))
        updates = list[Update]()
        for first in range(0, len(jobs), size):
            batch = jobs[first : first + size]
            answers = self.bridge.call(
                self.manager.run_jobs,
                action,
                batch,
                seconds=self.deadline_seconds,
                split_server=self.split_server,
                on_done=lambda done, first=first: self.bridge.progress(action, first + done, len(jobs)),  # type: ignore[misc]
            )
            updates += self._collect(action, zip(batch, answers, strict=True), updates)
        most = 0 if action == SUM else len(jobs)  # a sum has a threshold
        self._check_enough(action, jobs, updates, most=most, round=jobs[0].round if jobs else 0)
        return [replace(update, travelled=True) for update in updates]

    def first_updates(self, jobs: Sequence[Job], wait: Wait, *, round: int) -> list[Update]:
        """The updates of an asynchronous step (`ClientManager.run_until`), in the order of the jobs."""
        jobs = [job for job in jobs if job.client not in self.excluded]
        answers = self.bridge.call(
            self.manager.run_until,
            jobs,
            wait,
            round=round,
            seconds=self.deadline_seconds,
            on_done=lambda done: self.bridge.progress("train", done, len(jobs)),
        )
        updates = self._collect("train", [(job, answers.get(job.client)) for job in jobs], ())
        self._check_enough("train", jobs, updates, most=min(wait.updates, len(jobs)), round=round)
        return [replace(update, travelled=True) for update in updates]

    def _collect(
        self, action: str, answers: Iterable[tuple[Job, Update | str | None]], before: Sequence[Update]
    ) -> list[Update]:
        """The updates among these answers, with a note on each job that failed."""
        updates = list[Update]()
        for job, answer in answers:
            if isinstance(answer, Update):
                updates.append(answer)
            elif answer is not None:
                self.bridge.on_event(Note(f"no {action} of {job.client} in round {job.round}: {answer}"))
        return spill_to_disk(action, updates, before)

    def _check_enough(
        self, action: str, jobs: Sequence[Job], updates: Sequence[Update], *, most: int, round: int
    ) -> None:
        """Raise `ProtocolError` where fewer than `--min-clients` answered, and fewer than `most`."""
        needed = min(self.min_clients or most, most)
        if len(updates) < needed:
            clients = {update.client for update in updates}
            missing = [job.client for job in jobs if job.client not in clients]
            raise ProtocolError(
                f"{len(updates)} of {len(jobs)} clients answered {action} in round {round}, not"
                f" {', '.join(missing)}, and {needed} are needed; bring them back and start `atlas serve` again: it"
                " goes on from its last checkpoint; or lower --min-clients"
            )

    def release(self, round: int) -> list[int]:
        """The rounds whose noisy sums were given out, with this one from now on; one that is done again twice."""
        released = read_sealed(self.releases, "rounds")
        rounds = [*released["rounds"], round]
        write_sealed(self.releases, {**released, "rounds": rounds})
        return rounds

    def sum_of(self, settings: SumSettings, group: SumGroup, size: int, round: int, /) -> SumResult:
        """The secure sum of these sites' vectors of this size; raises `ProtocolError` where it is lost."""
        assert self.key_book is not None, "the settings have secure sums"

        def ask(step: str, told: Mapping[str, Messages]) -> dict[str, Messages]:
            job = Job(client="", params={}, round=round, options=SumStep(step=step, group=group))
            jobs = [replace(job, client=name, sent={SUM: write_packed(heard)}) for name, heard in told.items()]
            return {update.client: read_packed(update.reported[SUM]) for update in self.run(SUM, jobs)}

        return run_sum(settings.terms(group, round=round), self.key_book, ask, size=size)
