"""A client's side of a federation: register, work on what comes, end when told."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from atlas_fl.clients import ACTIONS, CLIENT_SIDE
from atlas_fl.clients.base import Job, Update
from atlas_fl.clients.cut.client_side import crossing_of
from atlas_fl.clients.cut.side import Payloads
from atlas_fl.clients.evaluate import EvaluateOptions
from atlas_fl.engines.hall.guests import Guests
from atlas_fl.engines.messages.ends import AdapterReceiver, Receiver
from atlas_fl.engines.messages.wire import Told, read_payloads, write_payloads
from atlas_fl.engines.stream.frames import Head
from atlas_fl.engines.stream.sessions import NO_TENSORS, Exchange, Message
from atlas_fl.errors import AtlasError, ModelError, ProtocolError, one_line
from atlas_fl.events import OnEvent, PhaseStarted
from atlas_fl.split.step import Cut
from atlas_fl.types import Params

Home: TypeAlias = Callable[[Cut | None, Told | None], Any]
"""(the cut, what is told of it) -> this site with its part of the model, or with all of it where there is no cut."""


class AnotherModelError(ProtocolError):
    """The model that lies here is not the one that the server has for this client."""


MOST_REGISTRATIONS = 16
"""How often in a row a server may ask who this client is: each time it was started again, and not for ever."""


class Policy(Protocol):
    """What a site has agreed to; each method returns nothing, or raises `ProtocolError` for what it has not."""

    def check_job(self, head: Mapping[str, Any]) -> None:
        """By the head of its message, before anything is loaded."""
        ...

    def check_model(self, action: str, params: Params, cut: Cut | None) -> None:
        """Of the model that a job begins with, before anything is computed."""
        ...

    def check_answer(self, action: str, tensors: Params) -> None:
        """Of what is about to leave."""
        ...

    def check_host(self, head: Mapping[str, Any]) -> None:
        """Of a message to this client as the host of others."""
        ...

    def check_farewell(self, params: Params) -> None:
        """Of the client's own model at the end."""
        ...


class AnyJob:
    """The policy of a client that does whatever its server says, for one that is in the same process as its server."""

    def check_job(self, head: Mapping[str, Any]) -> None:
        """Any job."""

    def check_model(self, action: str, params: Params, cut: Cut | None) -> None:
        """Any model."""

    def check_answer(self, action: str, tensors: Params) -> None:
        """Any answer."""

    def check_host(self, head: Mapping[str, Any]) -> None:
        """Any guest."""

    def check_farewell(self, params: Params) -> None:
        """Any model."""


class JobOverError(Exception):
    """The server no longer waits for the job; what it says instead."""

    def __init__(self, message: Message) -> None:
        self.message = message


@dataclass(frozen=True, kw_only=True)
class OverLink:
    """The server's side of the cut, over the link that the job came by (`clients.cut.client_side.Far`)."""

    link: Exchange
    number: int

    def ask(self, what: str, done: int, payloads: Payloads) -> Payloads:
        """What comes back; raises `JobOverError` where the job has ended at the server."""
        head = {"kind": "cut", "number": self.number, "what": what, "done": done}
        answer, tensors = self.link.exchange(head, write_payloads(payloads))
        if answer.get("kind") != "cut":
            raise JobOverError((answer, tensors))
        return read_payloads(tensors)


def confirm(link: Exchange, sha256: str) -> None:
    """Nothing, once the server has written down that this client's model lies on its disk.

    Raises `ProtocolError` where it does not, and `AnotherModelError` where the client's own is another one.
    """
    answer, _ = link.exchange({"kind": "kept", "sha256": sha256})
    if answer.get("kind") != "over":
        raise AnotherModelError("the server has another model for this client; it is not the run that this one is of")


@dataclass(kw_only=True, eq=False)
class Worker:
    """Carries out a server's jobs at one site."""

    name: str
    home: Home
    link: Exchange
    registration: Head
    """What the server is told of this client: identity, census, device."""
    on_event: OnEvent
    receiver: Receiver = field(default_factory=AdapterReceiver)
    """Reads jobs, with the models that the server counts on."""
    actions: Mapping[str, Callable[[Sequence[Job], Any], list[Update]]] = field(default_factory=lambda: ACTIONS)
    """What this client can be asked to do where its model is not cut."""
    keep: Callable[[Params, str], None] = lambda _model, _sha256: None
    """Puts the client's own model on the disk, with the name that the server has for it."""
    policy: Policy = field(default_factory=AnyJob)
    """What it has agreed to."""
    _asked: int = 0
    """How often in a row it was asked who it is."""
    _guests: Guests = field(default_factory=Guests)

    def work(self) -> Params:
        """The client's model at the end of the run, kept and confirmed; empty where the run has none for it.

        Raises `ProtocolError` where the server refuses, or stays away longer than the link's patience; `ModelError`
        where the model that a job needs is not here.
        """
        head, tensors = self._registered()
        while head.get("kind") != "done":
            if head.get("kind") == "register":
                head, tensors = self._registered()
            elif head.get("kind") == "job":
                head, tensors = self._worked(head, tensors)
            elif head.get("kind") == "host":
                self.policy.check_host(head)
                head, tensors = self.link.exchange(*self._guests.answer(head, tensors, self.home(None, None)))
            elif head.get("kind") == "ended":
                raise ProtocolError(f"the server has ended: {one_line(head.get('reason'))}")
            else:
                raise ProtocolError(f"the server says {head.get('kind')!r:.40}; install its version of atlas-fl")
        model = self.receiver.farewell(head, tensors)
        if model:
            self.policy.check_farewell(model)
            self.keep(model, str(head.get("sha256")))
            confirm(self.link, str(head.get("sha256")))
        return model

    def _worked(self, head: Mapping[str, Any], tensors: Params) -> Message:
        """What the server says to the answer, or in the middle of a job that it no longer waits for."""
        try:
            return self.link.exchange(*self._carried_out(head, tensors))
        except JobOverError as turn:
            return turn.message

    def _registered(self) -> tuple[Mapping[str, Any], Params]:
        self._asked += 1
        if self._asked > MOST_REGISTRATIONS:
            raise ProtocolError(
                f"the server asks for the {self._asked}th time who this is and gives nothing to do; ask who runs it"
            )
        self.receiver.forget()
        self._guests.clear()
        self.on_event(PhaseStarted("waiting for the server and its other sites"))
        return self.link.exchange({"kind": "register", **self.registration})

    def _carried_out(self, head: Mapping[str, Any], params: Params) -> tuple[Head, Params]:
        number, closing = head.get("number"), dict[str, bytes]()
        self.policy.check_job(head)
        self._asked = 0
        try:
            action, job, told = self.receiver.job(head, params, client=self.name)
            if type(number) is not int or (job.cut is None) is not (told is None):
                raise ProtocolError("the server's job has no number, or half of a cut; install its version of atlas-fl")
            on = f" on {job.options.split}" if isinstance(job.options, EvaluateOptions) else ""
            self.on_event(PhaseStarted(f"{action}{on}, round {job.round}"))
            self.policy.check_model(action, job.params, job.cut)
            site = self.home(job.cut, told)
            if job.cut is None or told is None:
                (update,) = self.actions[action]([job], site)
            else:
                crossing = crossing_of(job, site, places=told.places, far=OverLink(link=self.link, number=number))
                update = CLIENT_SIDE[action](job, site, crossing)
                closing = crossing.closing
        except ProtocolError:
            raise
        except ModelError as error:
            # Without its model this site can do nothing more for the run.
            self.link.exchange({"kind": "failed", "number": number, "reason": str(error), "leaves": True})
            raise
        except AtlasError as error:
            return {"kind": "failed", "number": number, "reason": str(error)}, NO_TENSORS
        head, sent = self.receiver.update(action, update, job, number=number)
        sent = {**sent, **write_payloads(closing)}
        self.policy.check_answer(action, sent)
        return head, sent
