"""The loop of a client site, and the halves that it hosts for others.

A host's side: the upper parts of its guests' jobs, and answers to what they ask through the server.

A client's side of a federation: register, work on what comes, end when told.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import torch

from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.options import EvaluateOptions
from atlas_fl.client.registry import ACTIONS, CLIENT_SIDE, SERVER_SIDE
from atlas_fl.client.split_client import crossing_of
from atlas_fl.client.split_server import Asked, Half, Payloads, answers_to
from atlas_fl.errors import AtlasError, ModelError, ProtocolError, one_line
from atlas_fl.events import OnEvent, PhaseStarted
from atlas_fl.params import Params, digest
from atlas_fl.runtime.coordinator.peer_relay import ABOUT, numbered
from atlas_fl.runtime.protocol.client_metadata import Census, read_census, stand_in
from atlas_fl.runtime.protocol.messages import Told, read_job, read_payloads, update_message, write_payloads
from atlas_fl.runtime.protocol.model_sync import AdapterReceiver, Receiver
from atlas_fl.runtime.transport.frames import Head
from atlas_fl.runtime.transport.sessions import NO_TENSORS, Exchange, Message
from atlas_fl.split.channel import Cut
from atlas_fl.storage.jsonl import from_json


@dataclass(kw_only=True, eq=False)
class Guests:
    """The guests of one site; a guest's data is not here, only how many examples and tokens there are."""

    _halves: dict[str, Half] = field(default_factory=dict)
    _models: dict[str, Params] = field(default_factory=dict)
    """The upper part that each guest's last job began with, by guest."""

    def clear(self) -> None:
        """Forget everyone, as the server has."""
        self._halves.clear()
        self._models.clear()

    def answer(self, head: Mapping[str, Any], tensors: Params, site: Site) -> tuple[Head, Params]:
        """The answers to all items of a message; questions about cuts are one pass.

        Raises `ProtocolError` for what is no such message; an item that cannot be is refused in its answer.
        """
        items, live, guests = (_listed(head.get(name)) for name in ("items", "live", "guests"))
        if not all(isinstance(item, dict) for item in items):
            raise ProtocolError("the server's message to a host has an item that is none; install its version")
        self._halves = {key: half for key, half in self._halves.items() if key in live}
        self._models = {key: model for key, model in self._models.items() if key in guests}
        answers: dict[int, tuple[Head, Params]] = {}
        asked: dict[int, Asked] = {}
        for k, item in enumerate(items):
            key, own = str(item.get("half")), numbered(tensors, k)
            try:
                if item.get("kind") == "begin":
                    self._halves[key] = self._begun(item, own, site)
                elif item.get("kind") == "end":
                    answers[k] = self._ended(key, own)
                else:
                    asked[k] = self._asked(key, item, own)
            except ProtocolError as error:
                answers[k] = {"refused": str(error)}, {}
        for k, found in zip(asked, answers_to(list(asked.values()), site), strict=True):
            refused = isinstance(found, ProtocolError)
            answers[k] = ({"refused": str(found)}, {}) if refused else ({}, write_payloads(found))  # type: ignore[arg-type]
        told = [{**answers[k][0], "half": items[k].get("half")} for k in answers]
        sent = {f"{n}:{key}": tensor for n, k in enumerate(answers) for key, tensor in answers[k][1].items()}
        return {"kind": "hosted", "items": told}, sent

    def _begun(self, item: Mapping[str, Any], tensors: Params, site: Site) -> Half:
        """The half of a guest that begins its job, for the first time or again."""
        guest, about = str(item.get("client")), tensors.get(f"/{ABOUT}")
        above = {key: tensor for key, tensor in tensors.items() if key != f"/{ABOUT}"} or self._models.get(guest)
        if about is None or above is None or digest(above) != item.get("model"):
            raise ProtocolError("a guest came without its model or what is known of it; install the server's version")
        self._models[guest] = above
        below, census = _known(about)
        action, job, _ = read_job(item, {**dict.fromkeys(below, torch.empty(0)), **above}, client=guest)
        _, data = stand_in(guest, census)
        if job.cut is None or action not in SERVER_SIDE:
            raise ProtocolError(f"{action} of a guest without a cut; install the server's version of atlas-fl")
        return SERVER_SIDE[action](job, replace(site, data={**site.data, guest: data}))

    def _half(self, key: str) -> Half:
        if key not in self._halves:
            raise ProtocolError("a guest asks for what its host does not have; install the same atlas-fl on both ends")
        return self._halves[key]

    def _asked(self, key: str, item: Mapping[str, Any], tensors: Params) -> Asked:
        what, done = item.get("what"), item.get("done")
        if not isinstance(what, str) or type(done) is not int:
            raise ProtocolError("a question about a cut names no step or kind; install the same atlas-fl on both ends")
        return Asked(half=self._half(key), what=what, done=done, payloads=read_payloads(tensors))

    def _ended(self, key: str, tensors: Params) -> tuple[Head, Params]:
        half = self._half(key)
        own: Update = half.end(read_payloads(tensors))
        del self._halves[key]
        job: Job = replace(half.side.job, params=half.side.above)
        return update_message(own, job, number=0)


def _known(about: torch.Tensor) -> tuple[list[str], Census]:
    """(names of a guest's own tensors, what is known of its data); raises `ProtocolError` for anything else."""
    try:
        known = from_json(about.numpy().tobytes())
        return [str(name) for name in known["below"]], read_census(known["census"])
    except (KeyError, TypeError, ValueError):
        raise ProtocolError("what is said of a guest cannot be read; install the server's version") from None


def _listed(found: Any) -> Sequence[Any]:
    if not isinstance(found, list):
        raise ProtocolError("the server's message to a host has no list; install its version of atlas-fl")
    return found


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
    """The server's side of the cut, over the link that the job came by (`client.split_client.Far`)."""

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
