"""The server halves of all cut clients of a run; requests are answered one at a time, in the order of their arrival.

Requests come from streams, in the network's event loop; passes are computed in one thread. A server half lives for one
job; a client whose job is sent again gets a new half, at the start of the job.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.registry import SERVER_SIDE
from atlas_fl.client.split_server import ServerHalf, merge_updates
from atlas_fl.errors import ProtocolError
from atlas_fl.models.loading import first_block_tensors
from atlas_fl.params import Params, digest, select
from atlas_fl.runtime.protocol.messages import CutInfo, read_payloads, write_payloads
from atlas_fl.runtime.transport.frames import Head, Message

ResultT = TypeVar("ResultT")


def _answer_request(half: ServerHalf | None, head: Head, tensors: Params) -> Params:
    """The answer to a cut client by its server half; raises `ProtocolError` for a malformed request, or no half."""
    what = head.get("what")
    done = head.get("done")
    if half is None or not isinstance(what, str) or type(done) is not int:
        raise ProtocolError(
            "a question about a cut names no job that is here, no step or no kind; install the same atlas-fl on both"
            " ends"
        )
    return write_payloads(half.ask(what, done, read_payloads(tensors)))


class SplitServer:
    """Server halves computed in this process. A context manager; all methods run in one event loop."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="atlas-split-server")
        self._halves: dict[int, ServerHalf] = {}
        self._part_digests: dict[int, str] = {}
        # Kept apart: a pass that measures has other weights in the model while it computes.
        self._frozen = site.backbone.parameters

    def __enter__(self) -> "SplitServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def begin_job(self, number: int, action: str, job: Job) -> tuple[Job, CutInfo]:
        """(the client's half of the job, its cut info); the server half begins anew.

        Raises `ProtocolError` for an action that cannot be carried out over a cut.
        """
        if action not in SERVER_SIDE:
            raise ProtocolError(f"{action} is not carried out over a cut; known: {', '.join(SERVER_SIDE)}")
        half = SERVER_SIDE[action](job, self.site)
        self._halves[number] = half
        part = self._part_digest(half.side.cut.blocks)
        return half.side.below, CutInfo(places=half.places, tokens=self.site.max_tokens, part=part)

    def _part_digest(self, blocks: int) -> str:
        """The digest of the frozen tensors of a client with this many blocks."""
        if blocks not in self._part_digests:
            names = first_block_tensors(self.site.backbone, blocks=blocks)
            self._part_digests[blocks] = digest(select(self._frozen, names))
        return self._part_digests[blocks]

    async def answer_request(self, number: int, head: Head, tensors: Params) -> Message:
        """The answer to a client's request for the job of this number."""
        half = self._halves.get(number)
        # Of a client that leaves, whose job begins with a new half, what waits for the thread is cancelled with it.
        return {"kind": "cut"}, await self._compute(lambda: _answer_request(half, head, tensors))

    async def finish_job(self, number: int, update: Update, tensors: Params) -> Update:
        """The update of both halves. The server half ends."""
        half = self._halves.pop(number)
        payloads = read_payloads(tensors)
        return await self._compute(lambda: merge_updates(half.side, update, half.end(payloads)))

    def drop_job(self, number: int) -> None:
        """Forget the server half of a closed job."""
        self._halves.pop(number, None)

    async def _compute(self, compute: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, compute)
