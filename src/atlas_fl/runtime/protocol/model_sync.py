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
from typing import Any, TypeAlias

import torch

from atlas_fl.client.job import Job, Update
from atlas_fl.errors import ProtocolError
from atlas_fl.params import HEAD, PRIVATE, Params, digest
from atlas_fl.partial_sharing import transmitted_params
from atlas_fl.runtime.protocol.messages import (
    SENT,
    CutInfo,
    PrivateRef,
    as_bytes,
    as_tensor,
    job_head,
    job_message,
    model_message,
    read_job,
    read_private,
    read_sent,
    read_update,
    update_message,
    write_trees,
)
from atlas_fl.runtime.protocol.private_params import PrivateParamStore
from atlas_fl.runtime.transport.frames import Head
from atlas_fl.sparse.codec import decode_mask, decode_values, encode_mask, encode_values
from atlas_fl.sparse.masks import Mask


@dataclass(kw_only=True, eq=False)
class AdapterSender:
    """Sends of a model the tensors that neither the last one that was sent nor the last one trained there has."""

    held: dict[str, tuple[str, dict[str, str]]] = field(default_factory=dict)
    """Digest, and digests of the tensors, of these two."""

    def job(self, action: str, job: Job, *, number: int, cut_info: CutInfo | None = None) -> tuple[Head, Params]:
        """The message that asks for this job."""
        held = [model for model, _ in self.held.values()]
        head, params = job_message(action, job, number=number, sent_digests=held, cut_info=cut_info)
        if params:
            digests = _digests(params)
            candidates = [model for model in self.held.values() if model[1].keys() == digests.keys()]
            # the one that has the most of these tensors
            base, there = max(candidates, key=lambda model: len(model[1].items() & digests.items()), default=("", {}))
            changed = {key: tensor for key, tensor in params.items() if digests[key] != there.get(key)}
            self.held["got"] = head["model"], digests
            if len(changed) < len(params):
                head, params = {**head, "base": base}, changed
        return head, {**params, **write_trees(SENT, job.sent)} if job.sent else params

    def update(self, action: str, head: Mapping[str, Any], tensors: Params, *, job: Job) -> Update:
        """The update that an answer holds; raises `ProtocolError` for one that is not of its form."""
        received = read_update(head, tensors, job=job)
        if action == "train" and received.params is not job.params:
            received = replace(received, params=_with_untrained(received.params, job, head))
            sent = transmitted_params(received.params)
            self.held["trained"] = digest(sent), _digests(sent)
        return received

    def final_model_message(self, model: Params) -> tuple[Head, Params]:
        """The client's own model at the end, without the part that stays at the client; `sha256` names the model."""
        private, sent = model_message(model)
        return {"kind": "done", "model": True, "sha256": digest(model), **private}, sent

    def forget(self) -> None:
        """Assume that the other end holds nothing."""
        self.held.clear()


def _digests(params: Params) -> dict[str, str]:
    """The digest of each tensor."""
    return {key: digest({key: tensor}) for key, tensor in params.items()}


def _untrained_keys(job: Job) -> set[str]:
    """The names of the tensors that do not train in the round of this job of a client with the whole model."""
    names = set() if job.cut is not None or PRIVATE in job.params else job.params.keys()
    return {key for key in names if not job.options.trains(key, round=job.round)}


def _with_untrained(params: Params, job: Job, head: Mapping[str, Any]) -> Params:
    """The trained model completed with the tensors that do not train; raises `ProtocolError` where one of them came."""
    untrained = set() if head.get("private") is not None else _untrained_keys(job)
    if came := sorted(untrained & params.keys()):
        raise ProtocolError(f"{came[0]} came back and does not train in round {job.round}; install the same atlas-fl")
    if not untrained:
        return params
    whole = {**params, **{key: job.params[key] for key in untrained}}
    return {key: whole[key] for key in (*job.params, *whole) if key in whole}


@dataclass(kw_only=True, eq=False)
class AdapterReceiver:
    """Keeps the models that the other end counts on; with a `store`, what a client does not share stays there."""

    store: PrivateParamStore | None = None
    held: dict[str, tuple[str, Params]] = field(default_factory=dict)
    """The last one that came whole and the last one trained here, each with its digest; of both what is shared."""
    _opened: tuple[Params, PrivateRef | None] = ({}, None)
    """The part of the newest job's model that came, and the name of the rest."""

    def job(self, head: Mapping[str, Any], tensors: Params, *, client: str) -> tuple[str, Job, CutInfo | None]:
        """(action, job, cut info) of a message; raises `ProtocolError` for one that is none.

        Raises `ModelError` where the part of the model that stays here is lost.
        """
        model, sent = read_sent(tensors)
        base = {} if head.get("base") is None else resolve_model(self.held, {}, expected=str(head["base"]))
        params = resolve_model(self.held, {**base, **model}, expected=str(head.get("model")))
        action, job, cut_info = read_job(head, params, client=client)
        if self.store is not None:
            self._opened = params, read_private(head)
            whole = self.store.whole(*self._opened, cut=job.cut, round=job.round)
            job = replace(job, params=whole)
        return action, replace(job, sent=sent), cut_info

    def update(self, action: str, update: Update, job: Job, *, number: int) -> tuple[Head, Params]:
        """The message with this update: with a store its shared part, and the name of the rest."""
        private: dict[str, Any] = {}
        if self.store is not None:
            update, reference = self.store.split_private(update, job, *self._opened)
            private = {} if reference is None else {"private": asdict(reference)}
        if action == "train" and update.params is not job.params:
            self.held["trained"] = digest(update.params), update.params
            untrained = _untrained_keys(job) if update.params.keys() == job.params.keys() else set()
            params = {key: tensor for key, tensor in update.params.items() if key not in untrained}
            update = replace(update, params=params)
        head, tensors = update_message(update, job, number=number)
        return {**head, **private}, tensors

    def read_final_model(self, head: Mapping[str, Any], tensors: Params) -> Params:
        """The client's own model at the end of the run; empty where there is none."""
        if head.get("model") is not True:
            return {}
        if self.store is None:
            return tensors
        private = read_private(head)
        model = self.store.whole(tensors, private, cut=None, round=0)
        self.store.end(private)
        return model

    def forget(self) -> None:
        """Forget all models; the parts that stay here are kept."""
        self.held.clear()


def resolve_model(
    held: dict[str, tuple[str, Params]], came: Params, *, expected: str, home: tuple[str, Params] | None = None
) -> Params:
    """The tensors of this digest: those that came, which are held from now on, or others that are here already."""
    if digest(came) == expected:
        held["got"] = expected, came
        return came
    if came:
        raise ProtocolError("a model came with another digest than the server named; the message was altered")
    for key, params in held.values() if home is None else (*held.values(), home):
        if key == expected:
            return params
    raise ProtocolError("the server names a model that is not here; install its version of atlas-fl")


@dataclass(kw_only=True, eq=False)
class SharedModelCache:
    """The parts of models that all senders of a run have in common."""

    home: str
    """Digest of the body that every other end has in its files."""
    mask: Mask | None = None
    """The weights of the body that may move, from the first job on that brings a mask."""
    lock: Any = field(default_factory=threading.RLock)
    _message: torch.Tensor | None = None
    _known: dict[tuple[int, ...], tuple[tuple[weakref.ref[torch.Tensor], ...], str]] = field(default_factory=dict)

    def mask_message(self) -> torch.Tensor:
        """The mask as it travels, (bytes,) uint8."""
        assert self.mask is not None, "asked for under a mask alone"
        with self.lock:
            if self._message is None:
                self._message = as_tensor(encode_mask(self.mask))
            return self._message

    def digest(self, params: Params) -> str:
        """The digest of these tensors, computed once as long as they live: many clients are sent the very same."""
        key = tuple(map(id, params.values()))
        with self.lock:
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


_BODY, _HEAD, _MASK, _VALUES = "body/", "top/", "mask", "values"


@dataclass(kw_only=True, eq=False)
class FullModelSender:
    """Sends of every model the parts that the other end has not."""

    common: SharedModelCache
    bodies: dict[str, str] = field(default_factory=dict)
    """Digests of the bodies at the other end beside its home: the last one that it got, and the last one it trained."""
    heads: dict[str, str] = field(default_factory=dict)
    counts_on_trained: bool = True
    """The other end keeps the model that it trained last."""
    has_mask: bool = False

    def job(self, action: str, job: Job, *, number: int, cut_info: CutInfo | None = None) -> tuple[Head, Params]:
        """The message that asks for this job."""
        assert job.cut is None and cut_info is None, "whole models are not cut"
        with self.common.lock:
            if job.mask is not None and self.common.mask is None:
                self.common.mask = split_body_and_head(job.mask)[0]
        model, tensors = self._model(job.params)
        return job_head(action, job, number=number, cut_info=None) | model, {**tensors, **write_trees(SENT, job.sent)}

    def update(self, action: str, head: Mapping[str, Any], tensors: Params, *, job: Job) -> Update:
        """The update that an answer holds."""
        received = read_update(head, tensors, job=job)
        if action == "train":
            received = replace(received, params=self._trained_model(received.params, job.params))
            if self.counts_on_trained:
                body, top = split_body_and_head(received.params)
                self.bodies["trained"] = self.common.digest(body)
                self.heads["trained"] = self.common.digest(top)
        return received

    def final_model_message(self, model: Params) -> tuple[Head, Params]:
        """The parts of the client's own model that it has not."""
        head, tensors = self._model(model)
        whole = sha256(f"{head['body']} {head['top']}".encode()).hexdigest()
        return {"kind": "done", "model": True, "sha256": whole, **head}, tensors

    def forget(self) -> None:
        """Assume that the other end holds nothing but its home."""
        self.bodies.clear()
        self.heads.clear()
        self.has_mask = False

    def _model(self, params: Params) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """(names of the parts of a model, the tensors that are sent of them)."""
        body, top = split_body_and_head(params)
        named = {"body": self.common.digest(body), "top": self.common.digest(top)}
        mask = self.common.mask
        tensors: dict[str, torch.Tensor] = {}
        if mask is not None and not self.has_mask:
            tensors[_MASK] = self.common.mask_message()
            self.has_mask = True
        if named["body"] not in (self.common.home, *self.bodies.values()):
            self.bodies["got"] = named["body"]
            if mask is None:
                tensors |= {_BODY + key: tensor for key, tensor in body.items()}
            else:
                tensors[_VALUES] = as_tensor(encode_values(body, mask))
        if named["top"] not in self.heads.values():
            self.heads["got"] = named["top"]
            tensors |= {_HEAD + key: tensor for key, tensor in top.items()}
        return {**named, "masked": mask is not None}, tensors

    def _trained_model(self, params: Params, start: Params) -> Params:
        """The whole trained model, from the tensors that came back and the start."""
        if _VALUES not in params:
            return {key: params[key].clone() for key in (*start, *params) if key in params}
        body, top = split_body_and_head(start)
        heads = {key: tensor.clone() for key, tensor in params.items() if key != _VALUES}
        if self.common.mask is None or not heads.keys() <= top.keys():
            raise ProtocolError("values under a mask came where there is none; install the same atlas-fl on both ends")
        return {**decode_values(as_bytes(params[_VALUES]), self.common.mask, body, into=body), **top, **heads}


@dataclass(kw_only=True, eq=False)
class FullModelReceiver:
    """Holds the models that the other end counts on: the body of the files, and the last one that came."""

    home: Params
    keeps_trained: bool = True
    """The last one trained here is held too, whose scores a server may ask for."""
    trains_heads: bool = False
    """Heads train where a mask freezes weights; those that are fitted before round one do not."""
    bodies: dict[str, tuple[str, Params]] = field(default_factory=dict)
    heads: dict[str, tuple[str, Params]] = field(default_factory=dict)
    mask: Mask | None = None

    def job(self, head: Mapping[str, Any], tensors: Params, *, client: str) -> tuple[str, Job, CutInfo | None]:
        """(action, job, None) of a message."""
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
        """The message with this update; under a mask it has the masked values of a trained model."""
        if action == "train":
            body, top = split_body_and_head(update.params)
            if self.keeps_trained:
                self.bodies["trained"] = digest(body), body
                self.heads["trained"] = digest(top), top
            if self.mask is not None:
                values = {_VALUES: as_tensor(encode_values(body, self.mask))}
                update = replace(update, params={**values, **(top if self.trains_heads else {})})
        return update_message(update, job, number=number)

    def read_final_model(self, head: Mapping[str, Any], tensors: Params) -> Params:
        """The client's own model at the end of the run."""
        return self._model(head, tensors) if head.get("model") is True else {}

    def forget(self) -> None:
        """Forget all but the home."""
        self.bodies.clear()
        self.heads.clear()
        self.mask = None

    def _model(self, head: Mapping[str, Any], tensors: Params) -> Params:
        """The model that a message names, from the parts that came with it and those that are here."""
        if head.get("masked") is True and _MASK in tensors:
            self.mask = decode_mask(as_bytes(tensors[_MASK]), self.home)
        if (head.get("masked") is True) is (self.mask is None):
            raise ProtocolError("the server's mask is not here; install its version of atlas-fl")
        received_head = {
            key.removeprefix(_HEAD): tensor.clone() for key, tensor in tensors.items() if key.startswith(_HEAD)
        }
        top = resolve_model(self.heads, received_head, expected=str(head.get("top")))
        body: Params = {}
        if any(key == _VALUES or key.startswith(_BODY) for key in tensors):
            self.bodies.pop("got", None)  # before another one comes into memory
            if self.mask is not None and _VALUES in tensors:
                body = decode_values(as_bytes(tensors[_VALUES]), self.mask, self.home, into=self.home)
            else:
                # memory of its own: in a message it lies anywhere, and sums may end in other last bits
                body = {key: tensors[_BODY + key].clone() for key in self.home if _BODY + key in tensors}
        home = self._home_digest, self.home
        return {**resolve_model(self.bodies, body, expected=str(head.get("body")), home=home), **top}

    @cached_property
    def _home_digest(self) -> str:
        return digest(self.home)


Sender: TypeAlias = AdapterSender | FullModelSender
"""The server's end of one client or worker."""
Receiver: TypeAlias = AdapterReceiver | FullModelReceiver
"""The end of a client or worker."""
NewSender: TypeAlias = Callable[[], Sender]
"""Makes a sender to an end that holds nothing yet."""
