"""Delta sync of models between server and client: adapters or whole models; only what the other end lacks is sent.

Each end knows by digest what the other holds. Of adapters, a model that differs from one that is held in some tensors
alone is sent as these tensors, with the digest of the one that has the others; what does not train in a round (such as
one factor of RoLoRA) does not come back. Of a whole model, body and head travel apart. The body is every weight
but the head's; both ends have that of the backbone's files from the start (`home`). Once there is a mask,

    body = home where the mask is 0, the sent values where it is 1

in both directions, since frozen weights keep every bit. The mask is sent to a client once, in its shortest form
(`sparse.codec`).
"""

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, Protocol, TypeAlias

import torch

from atlas_fl.client.job import Job, Update
from atlas_fl.errors import ProtocolError
from atlas_fl.params import HEAD, PRIVATE, Params, digest
from atlas_fl.partial_sharing import transmitted_params
from atlas_fl.runtime.protocol.messages import (
    CutInfo,
    job_message,
    model_message,
    read_job,
    read_sent,
    read_update,
    update_message,
    write_sent,
)
from atlas_fl.runtime.transport.frames import Head
from atlas_fl.sparse.codec import RandomMask, decode_mask, decode_values, encode_mask, encode_values
from atlas_fl.sparse.masks import Mask


class Sender(Protocol):
    """The server's end of one client or worker."""

    def job(self, action: str, job: Job, *, number: int, cut_info: CutInfo | None = None) -> tuple[Head, Params]:
        """What asks for this job."""
        ...

    def update(self, action: str, head: Mapping[str, Any], tensors: Params, *, job: Job) -> Update:
        """The update that an answer holds; raises `ProtocolError` for one that is not of its form."""
        ...

    def final_model_message(self, model: Params) -> tuple[Head, Params]:
        """What brings the client its own model at the end of the run; the head's `sha256` names that model."""
        ...

    def forget_trained(self) -> None:
        """What the other end trained last is unknown here."""
        ...

    def forget(self) -> None:
        """The other end holds nothing."""
        ...


class Receiver(Protocol):
    """The end of a client or worker."""

    def job(self, head: Mapping[str, Any], tensors: Params, *, client: str) -> tuple[str, Job, CutInfo | None]:
        """(action, job, what is told of its cut) of a message; raises `ProtocolError` for one that is none."""
        ...

    def update(self, action: str, update: Update, job: Job, *, number: int) -> tuple[Head, Params]:
        """What goes back."""
        ...

    def read_final_model(self, head: Mapping[str, Any], tensors: Params) -> Params:
        """The client's own model at the end of the run; empty where there is none."""
        ...

    def forget(self) -> None:
        """Hold nothing any more."""
        ...


NewSender: TypeAlias = Callable[[], Sender]
"""A sender to an end that holds nothing yet."""


@dataclass(kw_only=True, eq=False)
class AdapterSender:
    """Sends of a model what neither the last one that was sent nor the last one trained there has."""

    held: dict[str, str] = field(default_factory=dict)
    """Digests of these two."""
    tensors: dict[str, dict[str, str]] = field(default_factory=dict)
    """Digests of their tensors."""

    def job(self, action: str, job: Job, *, number: int, cut_info: CutInfo | None = None) -> tuple[Head, Params]:
        """What asks for this job."""
        head, params = job_message(action, job, number=number, sent_digests=self.held, cut_info=cut_info)
        if params:
            base, params = self._encode_changes(head["model"], params)
            head = {**head, **base}
        return head, {**params, **write_sent(job)} if job.sent else params

    def _encode_changes(self, name: str, params: Params) -> tuple[dict[str, str], Params]:
        """(the model that the rest of this one is taken from, what of it is sent); the other end holds it from then."""
        digests = _digests(params)
        base = self._base(digests)
        self.held["got"], self.tensors["got"] = name, digests
        if base is None:
            return {}, params
        base_name, there = base
        return {"base": base_name}, {key: params[key] for key in params if digests[key] != there[key]}

    def _base(self, digests: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
        """(digest, digests of its tensors) of the model there that has the most of these tensors; None without any."""
        known = [(self.held[name], there) for name, there in self.tensors.items() if there.keys() == digests.keys()]
        common = [sum(there[key] == value for key, value in digests.items()) for _, there in known]
        return known[common.index(max(common))] if any(common) else None

    def update(self, action: str, head: Mapping[str, Any], tensors: Params, *, job: Job) -> Update:
        """The update that an answer holds."""
        received = read_update(head, tensors, job=job)
        if action == "train" and received.params is not job.params:
            received = replace(received, params=_with_untrained(received.params, job, head))
            sent = transmitted_params(received.params)
            self.held["trained"], self.tensors["trained"] = digest(sent), _digests(sent)
        return received

    def final_model_message(self, model: Params) -> tuple[Head, Params]:
        """The model, or of one that is at its client in part what is not there."""
        private, sent = model_message(model)
        return {"kind": "done", "model": True, "sha256": digest(model), **private}, sent

    def forget_trained(self) -> None:
        """What the other end trained last is unknown here."""
        self.held.pop("trained", None)
        self.tensors.pop("trained", None)

    def forget(self) -> None:
        """The other end holds nothing."""
        self.held.clear()
        self.tensors.clear()


def _digests(params: Params) -> dict[str, str]:
    """The digest of each tensor."""
    return {key: digest({key: tensor}) for key, tensor in params.items()}


def _untrained_keys(job: Job) -> set[str]:
    """The names of what does not train in the round of this training job, of a client with the whole model."""
    names = set() if job.cut is not None or PRIVATE in job.params else job.params.keys()
    return {key for key in names if not job.options.trains(key, round=job.round)}


def _with_untrained(params: Params, job: Job, head: Mapping[str, Any]) -> Params:
    """The trained model with what did not come back because it does not train; raises `ProtocolError` where it came."""
    untrained = set() if head.get("private") is not None else _untrained_keys(job)
    if came := sorted(untrained & params.keys()):
        raise ProtocolError(f"{came[0]} came back and does not train in round {job.round}; install the same atlas-fl")
    if not untrained:
        return params
    known = {
        key: job.params[key] if key in untrained else params[key]
        for key in job.params
        if key in untrained | params.keys()
    }
    return {**known, **{key: tensor for key, tensor in params.items() if key not in known}}


@dataclass(kw_only=True, eq=False)
class AdapterReceiver:
    """Keeps the models that the other end counts on."""

    held: dict[str, tuple[str, Params]] = field(default_factory=dict)
    """The last one that came whole and the last one trained here, each with its digest."""

    def job(self, head: Mapping[str, Any], tensors: Params, *, client: str) -> tuple[str, Job, CutInfo | None]:
        """(action, job, what is told of its cut) of a message."""
        model, sent = read_sent(tensors)
        action, job, cut_info = read_job(head, self._model(head, model), client=client)
        return action, replace(job, sent=sent), cut_info

    def update(self, action: str, update: Update, job: Job, *, number: int) -> tuple[Head, Params]:
        """What goes back."""
        if action == "train" and update.params is not job.params:
            self.held["trained"] = digest(update.params), update.params
            untrained = _untrained_keys(job) if update.params.keys() == job.params.keys() else set()
            params = {key: tensor for key, tensor in update.params.items() if key not in untrained}
            update = replace(update, params=params)
        return update_message(update, job, number=number)

    def read_final_model(self, head: Mapping[str, Any], tensors: Params) -> Params:
        """The model that came."""
        return tensors if head.get("model") is True else {}

    def forget(self) -> None:
        """Hold nothing any more."""
        self.held.clear()

    def _model(self, head: Mapping[str, Any], params: Params) -> Params:
        """The job's model: what came with it, or one that is here."""
        expected = str(head.get("model"))
        if not params and expected != digest({}):
            return self._held_model(expected)
        if (base := head.get("base")) is not None:
            params = {**self._held_model(str(base)), **params}
        if digest(params) != expected:
            raise ProtocolError("a model came with another digest than the server named; the message was altered")
        self.held["got"] = expected, params
        return params

    def _held_model(self, expected: str) -> Params:
        """The model of this digest that is here."""
        model = next((params_of_digest for key, params_of_digest in self.held.values() if key == expected), None)
        if model is None:
            raise ProtocolError("the server names a model that is not here; install its version of atlas-fl")
        return model


@dataclass(kw_only=True, eq=False)
class SharedModelCache:
    """What the senders of a run have in common."""

    home: str
    """Digest of the body that every other end has in its files."""
    mask: Mask | None = None
    """Which weights of the body may move, from the first job on that says so."""
    drawn: RandomMask | None = None
    """How the mask was drawn, if it was."""
    _message: torch.Tensor | None = None
    _lock: Any = field(default_factory=threading.RLock)
    _known: dict[tuple[int, ...], tuple[tuple[weakref.ref[torch.Tensor], ...], str]] = field(default_factory=dict)

    def see(self, job: Job) -> None:
        """Take note of the mask that this job brings."""
        with self._lock:
            if job.mask is not None and self.mask is None:
                self.mask = split_body_and_head(job.mask)[0]

    def mask_message(self) -> torch.Tensor:
        """The mask as it travels, (bytes,) uint8."""
        assert self.mask is not None, "asked for under a mask alone"
        with self._lock:
            if self._message is None:
                self._message = as_tensor(encode_mask(self.mask, random_mask=self.drawn))
            return self._message

    def digest(self, params: Params) -> str:
        """The digest of these tensors, computed once as long as they live: many clients are sent the very same."""
        key = tuple(map(id, params.values()))
        with self._lock:
            # without the tensor an id means nothing: another one may have got it
            self._known = {
                key: entry for key, entry in self._known.items() if all(ref() is not None for ref in entry[0])
            }
            if key not in self._known:
                self._known[key] = tuple(weakref.ref(tensor) for tensor in params.values()), digest(params)
            return self._known[key][1]


def split_body_and_head(params: Params) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(body, head) of a model."""
    body = {key: tensor for key, tensor in params.items() if not key.startswith(HEAD)}
    return body, {key: tensor for key, tensor in params.items() if key.startswith(HEAD)}


def as_tensor(message: bytes) -> torch.Tensor:
    """The message as it lies in a frame, (bytes,) uint8."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def as_bytes(message: torch.Tensor) -> bytes:
    """The message that `as_tensor` was given; raises `ProtocolError` for what is no row of bytes."""
    if message.dtype is not torch.uint8 or message.ndim != 1:
        raise ProtocolError("a mask or its values are no row of bytes; install the same atlas-fl on both ends")
    return message.numpy().tobytes()


_BODY, _HEAD, _MASK, _VALUES = "body/", "top/", "mask", "values"


@dataclass(kw_only=True, eq=False)
class FullModelSender:
    """Sends of every model the part that the other end has not."""

    common: SharedModelCache
    bodies: dict[str, str] = field(default_factory=dict)
    """Digests of what the other end holds beside its home: the last body that it got, and the last one it trained."""
    heads: dict[str, str] = field(default_factory=dict)
    counts_on_trained: bool = True
    """Whether the other end keeps what it trained last."""
    has_mask: bool = False

    def job(self, action: str, job: Job, *, number: int, cut_info: CutInfo | None = None) -> tuple[Head, Params]:
        """What asks for this job."""
        assert job.cut is None and cut_info is None, "whole models are not cut"
        self.common.see(job)
        model, tensors = self._model(job.params)
        head = {
            "kind": "job",
            "number": number,
            "action": action,
            "round": job.round,
            "options": asdict(job.options),
            "cut": None,
            "told": cut_info,
            **model,
        }
        return head, {**tensors, **write_sent(job)}

    def update(self, action: str, head: Mapping[str, Any], tensors: Params, *, job: Job) -> Update:
        """The update that an answer holds."""
        received = read_update(head, tensors, job=job)
        if action == "train":
            received = replace(received, params=self._trained_model(received.params, job.params))
            if self.counts_on_trained:
                body, top = split_body_and_head(received.params)
                self.bodies["trained"], self.heads["trained"] = self.common.digest(body), self.common.digest(top)
        return received

    def final_model_message(self, model: Params) -> tuple[Head, Params]:
        """What of the client's own model it has not."""
        head, tensors = self._model(model)
        whole = sha256(f"{head['body']} {head['top']}".encode()).hexdigest()
        return {"kind": "done", "model": True, "sha256": whole, **head}, tensors

    def forget_trained(self) -> None:
        """What the other end trained last is unknown here."""
        self.bodies.pop("trained", None)
        self.heads.pop("trained", None)

    def forget(self) -> None:
        """The other end holds nothing but its home."""
        self.bodies.clear()
        self.heads.clear()
        self.has_mask = False

    def _model(self, params: Params) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """(what names the parts of a model, what of them is sent)."""
        body, top = split_body_and_head(params)
        named = {"body": self.common.digest(body), "top": self.common.digest(top)}
        masked = self.common.mask is not None
        tensors: dict[str, torch.Tensor] = {}
        if masked and not self.has_mask:
            tensors[_MASK], self.has_mask = self.common.mask_message(), True
        if named["body"] not in (self.common.home, *self.bodies.values()):
            self.bodies["got"] = named["body"]
            tensors |= self._body_message(body)
        if named["top"] not in self.heads.values():
            self.heads["got"] = named["top"]
            tensors |= {_HEAD + key: tensor for key, tensor in top.items()}
        return {**named, "masked": masked}, tensors

    def _body_message(self, body: Params) -> dict[str, torch.Tensor]:
        if self.common.mask is None:
            return {_BODY + key: tensor for key, tensor in body.items()}
        return {_VALUES: as_tensor(encode_values(body, self.common.mask))}

    def _trained_model(self, params: Params, start: Params) -> Params:
        """The trained model of what came back for this one."""
        if _VALUES not in params:
            order = [*(key for key in start if key in params), *(key for key in params if key not in start)]
            return {key: params[key].clone() for key in order}
        body, top = split_body_and_head(start)
        heads = {key: tensor.clone() for key, tensor in params.items() if key != _VALUES}
        if self.common.mask is None or not heads.keys() <= top.keys():
            raise ProtocolError("values under a mask came where there is none; install the same atlas-fl on both ends")
        return {**decode_values(as_bytes(params[_VALUES]), self.common.mask, body, into=body), **top, **heads}


@dataclass(kw_only=True, eq=False)
class FullModelReceiver:
    """Holds of models what the other end counts on: the body of the files, and the last one that came."""

    home: Params
    keeps_trained: bool = True
    """Whether the last one trained here is held too, whose scores a server may ask for."""
    trains_heads: bool = False
    """Whether heads train where a mask freezes weights; those that are fitted before round one do not."""
    bodies: dict[str, tuple[str, Params]] = field(default_factory=dict)
    heads: dict[str, tuple[str, Params]] = field(default_factory=dict)
    mask: Mask | None = None

    def job(self, head: Mapping[str, Any], tensors: Params, *, client: str) -> tuple[str, Job, CutInfo | None]:
        """(action, job, nothing) of a message."""
        model, sent = read_sent(tensors)
        params = self._model(head, model)
        action, job, cut_info = read_job(head, params, client=client)
        job = replace(job, sent=sent)
        if action == "train" and self.mask is not None:
            heads = {key: tensor for key, tensor in params.items() if key not in self.mask}
            tops = {key: torch.full_like(tensor, self.trains_heads, dtype=torch.bool) for key, tensor in heads.items()}
            job = replace(job, mask={**self.mask, **tops})
        return action, job, cut_info

    def update(self, action: str, update: Update, job: Job, *, number: int) -> tuple[Head, Params]:
        """What goes back: of a trained model under a mask its values."""
        if action == "train":
            body, top = split_body_and_head(update.params)
            if self.keeps_trained:
                self.bodies["trained"], self.heads["trained"] = (digest(body), body), (digest(top), top)
            if self.mask is not None:
                values = {_VALUES: as_tensor(encode_values(body, self.mask))}
                update = replace(update, params={**values, **(top if self.trains_heads else {})})
        return update_message(update, job, number=number)

    def read_final_model(self, head: Mapping[str, Any], tensors: Params) -> Params:
        """The client's own model at the end of the run."""
        return self._model(head, tensors) if head.get("model") is True else {}

    def forget(self) -> None:
        """Hold nothing but the home."""
        self.bodies.clear()
        self.heads.clear()
        self.mask = None

    def _model(self, head: Mapping[str, Any], tensors: Params) -> Params:
        """The model that a message names, of what came with it and what is here."""
        if head.get("masked") is True and _MASK in tensors:
            self.mask = decode_mask(as_bytes(tensors[_MASK]), self.home)
        if (head.get("masked") is True) is (self.mask is None):
            raise ProtocolError("the server's mask is not here; install its version of atlas-fl")
        received_head = {
            key.removeprefix(_HEAD): tensor.clone() for key, tensor in tensors.items() if key.startswith(_HEAD)
        }
        top = _resolve_part(self.heads, received_head, expected=str(head.get("top")), besides=())
        came = any(key == _VALUES or key.startswith(_BODY) for key in tensors)
        if came:
            self.bodies.pop("got", None)  # before another one comes into memory
        body = _resolve_part(
            self.bodies,
            self._body(tensors) if came else {},
            expected=str(head.get("body")),
            besides=((self._home_digest, self.home),),
        )
        return {**body, **top}

    def _body(self, tensors: Params) -> Params:
        if self.mask is not None and _VALUES in tensors:
            return decode_values(as_bytes(tensors[_VALUES]), self.mask, self.home, into=self.home)
        # memory of its own: what came in a message lies wherever it happens to, and sums may end in other last bits
        return {key: tensors[_BODY + key].clone() for key in self.home if _BODY + key in tensors}

    @cached_property
    def _home_digest(self) -> str:
        return digest(self.home)


def _resolve_part(
    parts_by_name: dict[str, tuple[str, Params]],
    came: Params,
    *,
    expected: str,
    besides: tuple[tuple[str, Params], ...],
) -> Params:
    """What came, which is held from now on, or what of this digest is here already."""
    if came:
        if digest(came) != expected:
            raise ProtocolError("a model came with another digest than the server named; the message was altered")
        parts_by_name["got"] = expected, came
        return came
    part = next((params for key, params in (*parts_by_name.values(), *besides) if key == expected), None)
    if part is None:
        raise ProtocolError("the server names a model that is not here; install its version of atlas-fl")
    return part
