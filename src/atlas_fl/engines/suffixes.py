"""The upper blocks of all cut clients of a run: those that ask at one moment are answered by one pass.

Questions come from streams, in the network's loop; passes are computed in a thread of their own. A question waits until
every client with a cut job has asked, the pack is full, or nobody new has asked for a few milliseconds, and no longer.
A client's half lives for one job. Whoever gets its job again begins a new half, as of the job's start.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from atlas_fl.clients import SERVER_SIDE
from atlas_fl.clients.base import Job, Site, Update
from atlas_fl.clients.halves import Half, answer_all
from atlas_fl.clients.side import Payloads
from atlas_fl.engines.frames import Head
from atlas_fl.engines.wire import Told, read_payloads, write_payloads
from atlas_fl.errors import ProtocolError
from atlas_fl.models.parts import bottom_tensors
from atlas_fl.tree import digest, select
from atlas_fl.types import Params

GATHER_SECONDS = 0.003
"""How long a question waits for others after the newest one."""

ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class _Asked:
    half: Half
    what: str
    done: int
    payloads: Payloads
    answer: "asyncio.Future[dict[str, bytes]]"


class Suffixes:
    """The server's halves. Used as a context; its methods run in one loop."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="atlas-suffixes")
        self._halves: dict[int, Half] = {}
        self._waiting: list[_Asked] = []
        self._runner: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._parts: dict[int, str] = {}
        # Held apart, because a pass that measures has other weights in the model while it computes.
        self._frozen = dict(site.backbone.model.named_parameters())

    def __enter__(self) -> "Suffixes":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def begin(self, number: int, action: str, job: Job) -> tuple[Job, Told]:
        """The job as its client gets it, and what the client is told of its cut; its half here begins anew.

        Raises `ProtocolError` for an action that cannot be carried out over a cut.
        """
        if action not in SERVER_SIDE:
            raise ProtocolError(f"{action} is not carried out over a cut; known: {', '.join(SERVER_SIDE)}")
        half = self._halves[number] = SERVER_SIDE[action](job, self._site)
        return half.side.below, Told(
            places=half.places, tokens=self._site.max_tokens, part=self._part(half.side.cut.blocks)
        )

    def _part(self, blocks: int) -> str:
        """The digest of the frozen tensors that a client with so many blocks holds."""
        if blocks not in self._parts:
            self._parts[blocks] = digest(select(self._frozen, bottom_tensors(self._site.backbone, blocks=blocks)))
        return self._parts[blocks]

    async def ask(self, number: int, head: Mapping[str, Any], tensors: Params) -> tuple[Head, Params]:
        """The answer to a client's question about the job of this number, as soon as its pack has been computed."""
        what, done, half = head.get("what"), head.get("done"), self._halves.get(number)
        if half is None or not isinstance(what, str) or type(done) is not int:
            raise ProtocolError("a question about a cut names no job, step or kind; install the same atlas-fl")
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(_Asked(half, what, done, read_payloads(tensors), answer))
        self._news.set()
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._answer_waiting())
        return {"kind": "cut"}, write_payloads(await answer)

    async def finish(self, number: int, update: Update, tensors: Params) -> Update:
        """The whole update, of the client's own and its half here, which ends."""
        half = self._halves.pop(number)
        return await self._computed(lambda: half.finish(update, read_payloads(tensors)))

    def drop(self, number: int) -> None:
        """Forget the half of a job that nobody waits for any more."""
        self._halves.pop(number, None)

    async def _answer_waiting(self) -> None:
        while self._waiting:
            await self._gathered()
            asked, self._waiting = self._waiting, []
            # Whoever is gone by now has its half begun anew when it is back.
            asked = [one for one in asked if not one.answer.cancelled()]
            work = asyncio.ensure_future(self._computed(lambda asked=asked: _answers(asked, self._site)))  # type: ignore[misc]
            await asyncio.wait([work])
            for k, one in enumerate(asked):
                found = work.exception() or work.result()[k]
                if one.answer.done():
                    continue
                if isinstance(found, BaseException):
                    one.answer.set_exception(found)
                else:
                    one.answer.set_result(found)

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
        size = sum(len(message) for one in self._waiting for message in one.payloads.values())
        most = self._site.max_tokens * self._site.backbone.hidden * torch.float32.itemsize
        return len(self._waiting) >= len(self._halves) or size >= most

    async def _computed(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _answers(asked: Sequence[_Asked], site: Site) -> list[dict[str, bytes] | ProtocolError]:
    """What each is answered, or why it is refused: a client's mistake is its own, not its pack's."""
    found: dict[int, dict[str, bytes] | ProtocolError] = {}
    questions = {}
    for k, one in enumerate(asked):
        try:
            questions[k] = one.half.read(one.what, one.done, one.payloads)
        except ProtocolError as error:
            found[k] = error
    answers = answer_all(list(questions.values()), site)
    found |= dict(zip(questions, answers, strict=True))
    return [found[k] for k in range(len(asked))]
