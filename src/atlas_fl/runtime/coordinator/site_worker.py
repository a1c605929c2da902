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
from atlas_fl.runtime.coordinator.peer_relay import GUEST_INFO, item_tensors
from atlas_fl.runtime.protocol.client_metadata import Census, read_census, stand_in
from atlas_fl.runtime.protocol.messages import Told, read_job, read_payloads, update_message, write_payloads
from atlas_fl.runtime.protocol.model_sync import AdapterReceiver, Receiver
from atlas_fl.runtime.transport.frames import Head
from atlas_fl.runtime.transport.sessions import NO_TENSORS, Exchange, Message
from atlas_fl.split.channel import Cut
from atlas_fl.storage.jsonl import from_json


@dataclass(kw_only=True, eq=False)
class HostedClients:
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
        items, live, guests = (_check_list(head.get(name)) for name in ("items", "live", "guests"))
        if not all(isinstance(item, dict) for item in items):
            raise ProtocolError("the server's message to a host has an item that is none; install its version")
        self._halves = {key: half for key, half in self._halves.items() if key in live}
        self._models = {key: model for key, model in self._models.items() if key in guests}
        answers: dict[int, tuple[Head, Params]] = {}
        requests: dict[int, Asked] = {}
        for index, item in enumerate(items):
            key, item_params = str(item.get("half")), item_tensors(tensors, index)
            try:
                if item.get("kind") == "begin":
                    self._halves[key] = self._begin_half(item, item_params, site)
                elif item.get("kind") == "end":
                    answers[index] = self._finish_half(key, item_params)
                else:
                    requests[index] = self._cut_request(key, item, item_params)
            except ProtocolError as error:
                answers[index] = {"refused": str(error)}, {}
        for index, answer in zip(requests, answers_to(list(requests.values()), site), strict=True):
            refused = isinstance(answer, ProtocolError)
            answers[index] = ({"refused": str(answer)}, {}) if refused else ({}, write_payloads(answer))  # type: ignore[arg-type]
        heads = [{**answers[index][0], "half": items[index].get("half")} for index in answers]
        sent = {f"{n}:{key}": tensor for n, index in enumerate(answers) for key, tensor in answers[index][1].items()}
        return {"kind": "hosted", "items": heads}, sent

    def _begin_half(self, item: Mapping[str, Any], tensors: Params, site: Site) -> Half:
        """The half of a guest that begins its job, for the first time or again."""
        guest, guest_info = str(item.get("client")), tensors.get(f"/{GUEST_INFO}")
        above = {key: tensor for key, tensor in tensors.items() if key != f"/{GUEST_INFO}"} or self._models.get(guest)
        if guest_info is None or above is None or digest(above) != item.get("model"):
            raise ProtocolError("a guest came without its model or what is known of it; install the server's version")
        self._models[guest] = above
        below, metadata = _parse_guest_info(guest_info)
        action, job, _ = read_job(item, {**dict.fromkeys(below, torch.empty(0)), **above}, client=guest)
        _, data = stand_in(guest, metadata)
        if job.cut is None or action not in SERVER_SIDE:
            raise ProtocolError(f"{action} of a guest without a cut; install the server's version of atlas-fl")
        return SERVER_SIDE[action](job, replace(site, data={**site.data, guest: data}))

    def _half_of(self, key: str) -> Half:
        if key not in self._halves:
            raise ProtocolError("a guest asks for what its host does not have; install the same atlas-fl on both ends")
        return self._halves[key]

    def _cut_request(self, key: str, item: Mapping[str, Any], tensors: Params) -> Asked:
        what, done = item.get("what"), item.get("done")
        if not isinstance(what, str) or type(done) is not int:
            raise ProtocolError("a question about a cut names no step or kind; install the same atlas-fl on both ends")
        return Asked(half=self._half_of(key), what=what, done=done, payloads=read_payloads(tensors))

    def _finish_half(self, key: str, tensors: Params) -> tuple[Head, Params]:
        half = self._half_of(key)
        update: Update = half.end(read_payloads(tensors))
        del self._halves[key]
        job: Job = replace(half.side.job, params=half.side.above)
        return update_message(update, job, number=0)


def _parse_guest_info(encoded: torch.Tensor) -> tuple[list[str], Census]:
    """(names of a guest's own tensors, what is known of its data); raises `ProtocolError` for anything else."""
    try:
        guest_info = from_json(encoded.numpy().tobytes())
        return [str(name) for name in guest_info["below"]], read_census(guest_info["census"])
    except (KeyError, TypeError, ValueError):
        raise ProtocolError("what is said of a guest cannot be read; install the server's version") from None


def _check_list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ProtocolError("the server's message to a host has no list; install its version of atlas-fl")
    return value


SiteLoader: TypeAlias = Callable[[Cut | None, Told | None], Any]
"""(the cut, what is told of it) -> this site with its part of the model, or with all of it where there is no cut."""


class ModelMismatchError(ProtocolError):
    """The model that lies here is not the one that the server has for this client."""


MAX_REGISTRATIONS = 16
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

    def check_final_model(self, params: Params) -> None:
        """Of the client's own model at the end."""
        ...


class AcceptAll:
    """The policy of a client that does whatever its server says, for one that is in the same process as its server."""

    def check_job(self, head: Mapping[str, Any]) -> None:
        """Any job."""

    def check_model(self, action: str, params: Params, cut: Cut | None) -> None:
        """Any model."""

    def check_answer(self, action: str, tensors: Params) -> None:
        """Any answer."""

    def check_host(self, head: Mapping[str, Any]) -> None:
        """Any guest."""

    def check_final_model(self, params: Params) -> None:
        """Any model."""


class JobCancelledError(Exception):
    """The server no longer waits for the job; what it says instead."""

    def __init__(self, message: Message) -> None:
        self.message = message


@dataclass(frozen=True, kw_only=True)
class RemoteCutChannel:
    """The server's side of the cut, over the link that the job came by (`client.split_client.Far`)."""

    link: Exchange
    number: int

    def ask(self, what: str, done: int, payloads: Payloads) -> Payloads:
        """What comes back; raises `JobCancelledError` where the job has ended at the server."""
        head = {"kind": "cut", "number": self.number, "what": what, "done": done}
        answer, tensors = self.link.exchange(head, write_payloads(payloads))
        if answer.get("kind") != "cut":
            raise JobCancelledError((answer, tensors))
        return read_payloads(tensors)


def confirm_saved(link: Exchange, sha256: str) -> None:
    """Nothing, once the server has written down that this client's model lies on its disk.

    Raises `ProtocolError` where it does not, and `ModelMismatchError` where the client's own is another one.
    """
    answer, _ = link.exchange({"kind": "kept", "sha256": sha256})
    if answer.get("kind") != "over":
        raise ModelMismatchError("the server has another model for this client; it is not the run that this one is of")


@dataclass(kw_only=True, eq=False)
class SiteClient:
    """Carries out a server's jobs at one site."""

    name: str
    load_site: SiteLoader
    link: Exchange
    registration: Head
    """What the server is told of this client: identity, census, device."""
    on_event: OnEvent
    receiver: Receiver = field(default_factory=AdapterReceiver)
    """Reads jobs, with the models that the server counts on."""
    actions: Mapping[str, Callable[[Sequence[Job], Any], list[Update]]] = field(default_factory=lambda: ACTIONS)
    """What this client can be asked to do where its model is not cut."""
    save_model: Callable[[Params, str], None] = lambda _model, _sha256: None
    """Puts the client's own model on the disk, with the name that the server has for it."""
    policy: Policy = field(default_factory=AcceptAll)
    """What it has agreed to."""
    _registrations: int = 0
    """How often in a row it was asked who it is."""
    _hosted_clients: HostedClients = field(default_factory=HostedClients)

    def run(self) -> Params:
        """The client's model at the end of the run, kept and confirmed; empty where the run has none for it.

        Raises `ProtocolError` where the server refuses, or stays away longer than the link's patience; `ModelError`
        where the model that a job needs is not here.
        """
        head, tensors = self._register()
        while head.get("kind") != "done":
            if head.get("kind") == "register":
                head, tensors = self._register()
            elif head.get("kind") == "job":
                head, tensors = self._handle_job(head, tensors)
            elif head.get("kind") == "host":
                self.policy.check_host(head)
                head, tensors = self.link.exchange(
                    *self._hosted_clients.answer(head, tensors, self.load_site(None, None))
                )
            elif head.get("kind") == "ended":
                raise ProtocolError(f"the server has ended: {one_line(head.get('reason'))}")
            else:
                raise ProtocolError(f"the server says {head.get('kind')!r:.40}; install its version of atlas-fl")
        model = self.receiver.farewell(head, tensors)
        if model:
            self.policy.check_final_model(model)
            self.save_model(model, str(head.get("sha256")))
            confirm_saved(self.link, str(head.get("sha256")))
        return model

    def _handle_job(self, head: Mapping[str, Any], tensors: Params) -> Message:
        """What the server says to the answer, or in the middle of a job that it no longer waits for."""
        try:
            return self.link.exchange(*self._run_job(head, tensors))
        except JobCancelledError as cancelled:
            return cancelled.message

    def _register(self) -> tuple[Mapping[str, Any], Params]:
        self._registrations += 1
        if self._registrations > MAX_REGISTRATIONS:
            raise ProtocolError(
                f"the server asks for the {self._registrations}th time who this is and gives nothing to do; ask who"
                " runs it"
            )
        self.receiver.forget()
        self._hosted_clients.clear()
        self.on_event(PhaseStarted("waiting for the server and its other sites"))
        return self.link.exchange({"kind": "register", **self.registration})

    def _run_job(self, head: Mapping[str, Any], params: Params) -> tuple[Head, Params]:
        number, closing_messages = head.get("number"), dict[str, bytes]()
        self.policy.check_job(head)
        self._registrations = 0
        try:
            action, job, cut_info = self.receiver.job(head, params, client=self.name)
            if type(number) is not int or (job.cut is None) is not (cut_info is None):
                raise ProtocolError("the server's job has no number, or half of a cut; install its version of atlas-fl")
            on = f" on {job.options.split}" if isinstance(job.options, EvaluateOptions) else ""
            self.on_event(PhaseStarted(f"{action}{on}, round {job.round}"))
            self.policy.check_model(action, job.params, job.cut)
            site = self.load_site(job.cut, cut_info)
            if job.cut is None or cut_info is None:
                (update,) = self.actions[action]([job], site)
            else:
                crossing = crossing_of(
                    job, site, places=cut_info.places, far=RemoteCutChannel(link=self.link, number=number)
                )
                update = CLIENT_SIDE[action](job, site, crossing)
                closing_messages = crossing.closing
        except ProtocolError:
            raise
        except ModelError as error:
            # Without its model this site can do nothing more for the run.
            self.link.exchange({"kind": "failed", "number": number, "reason": str(error), "leaves": True})
            raise
        except AtlasError as error:
            return {"kind": "failed", "number": number, "reason": str(error)}, NO_TENSORS
        head, sent = self.receiver.update(action, update, job, number=number)
        sent = {**sent, **write_payloads(closing_messages)}
        self.policy.check_answer(action, sent)
        return head, sent
