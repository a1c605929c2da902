"""The upper blocks of all cut clients of a run: those that ask at one moment are answered by one pass.

Questions come from streams, in the network's loop; passes are computed in a thread of their own. A question waits until
every client with a cut job has asked, the pack is full, or nobody new has asked for a few milliseconds, and no longer.
A client's half lives for one job. Whoever gets its job again begins a new half, as of the job's start. Where clients of
a cluster share the adapters above their cuts, a question also waits until all of them have taken the step before it;
and when one of them begins again, or is gone, what the others have trained with it is void: they get their jobs again.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.registry import SERVER_SIDE
from atlas_fl.client.split_server import Asked, Half, Payloads, Together, TrainingHalf, answers_to, joined
from atlas_fl.errors import ProtocolError
from atlas_fl.models.loading import first_block_tensors
from atlas_fl.params import Params, digest, select
from atlas_fl.runtime.protocol.messages import Told, read_payloads, write_payloads
from atlas_fl.runtime.transport.frames import Head

GATHER_SECONDS = 0.003
"""How long a question waits for others after the newest one."""

ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class _Waiting:
    asked: Asked
    answer: "asyncio.Future[dict[str, bytes] | None]"


class Suffixes:
    """The server's halves. Used as a context; its methods run in one loop."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="atlas-suffixes")
        self._halves: dict[int, Half] = {}
        self._waiting: list[_Waiting] = []
        self._held: list[_Waiting] = []
        self._ending: list[tuple[Together, asyncio.Future[bool]]] = []
        self._together: dict[str, Together] = {}
        self._runner: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._parts: dict[int, str] = {}
        # Held apart, because a pass that measures has other weights in the model while it computes.
        self._frozen = dict(site.backbone.model.named_parameters())

    def __enter__(self) -> "Suffixes":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def open(self, action: str, jobs: Sequence[Job]) -> None:
        """These are the jobs of a round: whose clients share adapters, and wait for each other, is known from here."""
        self._together = {}
        groups: dict[int, list[Job]] = {}
        for job in jobs if action == "train" else ():
            if job.cut is not None and job.cut.shared is not None:
                groups.setdefault(job.cut.shared, []).append(job)
        for group in groups.values():
            self._gather(group)

    def _gather(self, jobs: Sequence[Job]) -> None:
        together = Together(jobs, self.site)
        self._together |= {job.client: together for job in jobs}

    def _again(self, together: Together, *, without: str | None = None) -> None:
        """What these clients have trained is void; they begin again, all or without the one that is gone."""
        together.is_void = True
        for job in together.jobs:
            self._together.pop(job.client, None)
        if rest := [job for job in together.jobs if job.client != without]:
            self._gather(rest)
        self._tell_void()

    def _tell_void(self) -> None:
        """Answer those who wait for what is void or over."""
        for one in [*self._waiting, *self._held]:
            together = one.asked.half.together
            if together is not None and together.is_void and not one.answer.done():
                one.answer.set_result(None)
        for own, future in self._ending:
            if (own.is_void or own.is_over) and not future.done():
                future.set_result(own.is_over)
        self._ending = [(own, future) for own, future in self._ending if not future.done()]

    def begin(self, number: int, action: str, job: Job) -> tuple[Job, Told]:
        """The job as its client gets it, and what the client is told of its cut; its half here begins anew.

        Raises `ProtocolError` for an action that cannot be carried out over a cut.
        """
        if action not in SERVER_SIDE:
            raise ProtocolError(f"{action} is not carried out over a cut; known: {', '.join(SERVER_SIDE)}")
        together = self._together.get(job.client) if action == "train" else None
        if together is not None and job.client in together.begun:
            self._again(together)
            together = self._together[job.client]
        make = SERVER_SIDE[action]
        half = self._halves[number] = (
            make(job, self.site) if together is None else TrainingHalf(job, self.site, together=together)
        )
        return half.side.below, Told(
            places=half.places, tokens=self.site.max_tokens, part=self.part(half.side.cut.blocks)
        )

    def part(self, blocks: int) -> str:
        """The digest of the frozen tensors that a client with so many blocks holds."""
        if blocks not in self._parts:
            self._parts[blocks] = digest(select(self._frozen, first_block_tensors(self.site.backbone, blocks=blocks)))
        return self._parts[blocks]

    async def ask(self, number: int, head: Mapping[str, Any], tensors: Params) -> tuple[Head, Params] | None:
        """The answer to a client's question about the job of this number, as soon as its pack has been computed.

        None where the job has to begin again.
        """
        what, done, half = head.get("what"), head.get("done"), self._halves.get(number)
        if half is None or not isinstance(what, str) or type(done) is not int:
            raise ProtocolError("a question about a cut names no job, step or kind; install the same atlas-fl")
        if half.together is not None:
            if half.together.is_void:
                return None
            half.together.begun.add(half.side.job.client)
        answer = asyncio.get_running_loop().create_future()
        asked = Asked(half=half, what=what, done=done, payloads=read_payloads(tensors))
        self._waiting.append(_Waiting(asked, answer))
        self._run()
        found = await answer
        return None if found is None else ({"kind": "cut"}, write_payloads(found))

    def _run(self) -> None:
        self._news.set()
        if self._waiting and (self._runner is None or self._runner.done()):
            self._runner = asyncio.create_task(self._answer_waiting())

    async def finish(self, number: int, update: Update, tensors: Params) -> Update | None:
        """The whole update, of the client's own and its half here, which ends; None where the job begins again."""
        half, payloads = self._halves[number], read_payloads(tensors)
        if half.together is not None and not await self._over(half, half.together, payloads):
            return None
        self._halves.pop(number, None)
        return await self._computed(lambda: joined(half.side, update, half.end(payloads)))

    async def _over(self, half: Half, together: Together, payloads: Payloads) -> bool:
        """Whether all have taken all their steps, once this one has; not where something was void before."""
        if together.is_void:
            return False
        await self._computed(lambda: half.last(payloads))
        over = asyncio.get_running_loop().create_future()
        self._ending.append((together, over))
        self._tell_void()
        # Those who were waiting for this one's last step.
        self._waiting, self._held = [*self._held, *self._waiting], []
        self._run()
        return bool(await over)

    def drop(self, number: int, client: str) -> None:
        """Forget the half of a job that nobody waits for any more."""
        self._halves.pop(number, None)
        together = self._together.get(client)
        if together is not None and not together.is_over:
            self._again(together, without=client)

    async def _answer_waiting(self) -> None:
        while self._waiting:
            await self._gathered()
            asked, self._waiting, self._held = [*self._held, *self._waiting], [], []
            # Whoever is gone by now has its half begun anew when it is back.
            asked = [one for one in asked if not one.answer.done()]
            pack = [one.asked for one in asked]
            work = asyncio.ensure_future(self._computed(lambda pack=pack: answers_to(pack, self.site)))  # type: ignore[misc]
            await asyncio.wait([work])
            for k, one in enumerate(asked):
                found = work.exception() or work.result()[k]
                if one.answer.done():
                    continue
                if found is None:
                    self._held.append(one)
                elif isinstance(found, BaseException):
                    one.answer.set_exception(found)
                else:
                    one.answer.set_result(found)
            # Whose turn has come meanwhile: who made it so has found nobody to wake.
            ready = [one for one in self._held if one.asked.half.is_ready()]
            self._waiting, self._held = [*ready, *self._waiting], [one for one in self._held if one not in ready]
            self._tell_void()

    async def _gathered(self) -> None:
        """Wait for those who are about to ask as well."""
        while not self._is_complete():
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), GATHER_SECONDS)
            except TimeoutError:
                return

    def _is_complete(self) -> bool:
        """Whether everybody has asked, or no more fit a pack."""
        size = sum(len(message) for one in self._waiting for message in one.asked.payloads.values())
        most = self.site.max_tokens * self.site.backbone.hidden * torch.float32.itemsize
        return len(self._waiting) + len(self._held) >= len(self._halves) or size >= most

    async def _computed(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
