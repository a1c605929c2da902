"""A client's side of a federation: register, work on what comes, end when told."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atlas_fl.clients import ACTIONS
from atlas_fl.clients.base import Site
from atlas_fl.engines.frames import Head
from atlas_fl.engines.stream import NO_TENSORS, Exchange
from atlas_fl.engines.wire import read_job, update_message
from atlas_fl.errors import AtlasError, ProtocolError
from atlas_fl.events import OnEvent, PhaseStarted
from atlas_fl.tree import digest
from atlas_fl.types import Params


@dataclass(kw_only=True, eq=False)
class Worker:
    """Carries out a server's jobs at one site."""

    name: str
    site: Site
    link: Exchange
    registration: Head
    """What the server is told of this client: identity, census, device."""
    on_event: OnEvent
    _held: dict[str, tuple[str, Params]] = field(default_factory=dict)
    """The models that the server counts on: the last one that came whole, and the last one trained here."""

    def work(self) -> Params:
        """The client's model at the end of the run; empty where the run has none for it.

        Raises `ProtocolError` where the server refuses, or stays away longer than the link's patience.
        """
        head, tensors = self._registered()
        while head.get("kind") != "done":
            if head.get("kind") == "register":
                head, tensors = self._registered()
            elif head.get("kind") == "job":
                head, tensors = self.link.exchange(*self._carried_out(head, tensors))
            else:
                raise ProtocolError(f"the server says {head.get('kind')!r:.40}; install its version of atlas-fl")
        return tensors

    def _registered(self) -> tuple[Mapping[str, Any], Params]:
        self._held.clear()
        return self.link.exchange({"kind": "register", **self.registration})

    def _carried_out(self, head: Mapping[str, Any], params: Params) -> tuple[Head, Params]:
        action, job = read_job(head, self._model(head, params), client=self.name)
        number = head.get("number")
        if type(number) is not int:
            raise ProtocolError("the server's job has no number; install its version of atlas-fl")
        self.on_event(PhaseStarted(f"{action}, round {job.round}"))
        try:
            (update,) = ACTIONS[action]([job], self.site)
        except AtlasError as error:
            return {"kind": "failed", "number": number, "reason": str(error)}, NO_TENSORS
        if action == "train":
            self._held["trained"] = digest(update.params), update.params
        return update_message(update, job, number=number)

    def _model(self, head: Mapping[str, Any], params: Params) -> Params:
        """The job's model: what came with it, or one that is here."""
        wanted = str(head.get("model"))
        if not params:
            found = next((own for key, own in self._held.values() if key == wanted), None)
            if found is None:
                raise ProtocolError("the server names a model that is not here; install its version of atlas-fl")
            return found
        if digest(params) != wanted:
            raise ProtocolError("a model came with another digest than the server named; the message was altered")
        self._held["got"] = wanted, params
        return params
