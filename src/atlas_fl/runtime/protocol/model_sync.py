"""Delta sync of models between server and client: only the tensors that the other end lacks are sent.

Each end knows by digest which models the other holds: the last one that came, the last one that was trained there, and
of whole models the weights of the backbone's files (`home`). A model that differs from one of these in some tensors
alone is sent as these tensors, with the name of the one that has the others (`base`); what does not train in a round
(such as one factor of RoLoRA) does not come back. Once there is a mask, the body, every weight but the head's, is

    body = home where the mask is 0, the sent values where it is 1

in both directions, since frozen weights keep every bit. The mask is sent to a client once, in its shortest form
(`sparse.codec`).
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.weak import WeakIdKeyDictionary

from atlas_fl.client.job import Job, Update
from atlas_fl.errors import ProtocolError
from atlas_fl.params import LORA_GATE, PRIVATE, Params, digest, split_body_and_head
from atlas_fl.partial_sharing import digest_tensor, private_digest, transmitted_params, unshared_keys
from atlas_fl.runtime.protocol import messages, private_params
from atlas_fl.runtime.transport.frames import Head, Message
from atlas_fl.sparse import compression, masks
from atlas_fl.sparse.codec import decode_mask, decode_values, encode_mask, encode_values

_MASK, _VALUES = "mask", "values"
KeptTrees: TypeAlias = tuple[tuple[Literal["momentum", "residual"], messages.Sha256], ...]
"""Kind and name of tensors that a client keeps for its next round (`Job.kept`)."""
Digests: TypeAlias = Mapping[str, str]
"""The digest of each tensor of a model."""


@dataclass(kw_only=True, eq=False)
class DigestCache:
    """Digests of tensors, computed once as long as a tensor lives: many clients are sent the very same."""

    _known: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    _lock: Any = field(default_factory=threading.Lock)

    def digests(self, params: Params) -> dict[str, str]:
        """The digest of each of these tensors; from any thread."""
        with self._lock:
            for tensor in params.values():
                if tensor not in self._known:
                    self._known[tensor] = digest({"": tensor})
            return {key: self._known[tensor] for key, tensor in params.items()}


def model_name(digests: Digests) -> str:
    """The SHA-256 that names a model."""
    return sha256("\n".join(f"{key} {digests[key]}" for key in sorted(digests)).encode()).hexdigest()


@dataclass(kw_only=True, eq=False)
class SenderState:
    """The state that all senders of a run have in common."""

    home: Digests = field(default_factory=dict)
    """Digests of the weights that every other end has in its files; none of them is an adapter's."""
    mask: masks.Mask | None = None
    """The weights of the body that may move, from the first job on that brings a mask."""
    compressed: bool = False
    """Trained tensors come as their change in few bytes (`sparse.compression`), unless there is a mask."""
    cache: DigestCache = field(default_factory=DigestCache)


@dataclass(kw_only=True, eq=False)
class Sender:
    """The server's end of one client or worker: sends of every model the tensors that the other end has not."""

    common: SenderState = field(default_factory=SenderState)
    counts_on_trained: bool = True
    """The other end keeps the model that it trained last."""
    held: dict[str, Digests] = field(default_factory=dict)
    """The last model that was sent there, and the last one that was trained there."""
    has_mask: bool = False

    def job(self, action: str, job: Job, *, number: int, cut_info: messages.CutInfo | None = None) -> Message:
        """The message that asks for this job."""
        assert all(PRIVATE in tree for tree in job.kept.values()), "it stays with the client; other configs are refused"
        if job.mask is not None and self.common.mask is None:
            self.common.mask = split_body_and_head(job.mask)[0]
        head, tensors = self._model(job.params)
        held = self.held.get("got")
        beside = {kind for kind, params in job.sent.items() if held and self.common.cache.digests(params) == held}
        head = {**messages.job_head(action, job, number=number, cut_info=cut_info), **head, "beside": sorted(beside)}
        if job.kept:
            head["kept"] = [[kind, private_digest(tree)] for kind, tree in job.kept.items()]
        sent = {kind: params for kind, params in job.sent.items() if kind not in beside}
        if action == "train":
            self.held.pop("trained", None)  # the other end drops it too
        return head, {**tensors, **messages.write_trees(messages.SENT, sent)}

    def update(self, action: str, head: Head, tensors: Params, *, job: Job) -> Update:
        """The update that an answer holds; raises `ProtocolError` for one that is not of its form."""
        received = messages.read_update(head, tensors, job=job)
        kept = messages.read(KeptTrees, head.get("kept", ()), "the answer: kept")
        received = replace(received, kept={kind: {PRIVATE: digest_tensor(sha256)} for kind, sha256 in kept})
        if action == "train" and received.params is not job.params:
            received = replace(received, params=self._trained_model(received.params, job, head))
            if self.counts_on_trained:
                self.held["trained"] = self.common.cache.digests(transmitted_params(received.params))
        return received

    def final_model_message(self, model: Params) -> Message:
        """The client's own model at the end, without the part that stays at the client; `sha256` names the model.

        All of it that is not in the client's files: who comes for it may have been started again.
        """
        self.forget()
        head, tensors = self._model(model)
        return {"kind": "done", "sha256": model_name(self.common.cache.digests(model)), **head}, tensors

    def forget(self) -> None:
        """Assume that the other end holds nothing but its files."""
        self.held.clear()
        self.has_mask = False

    def _model(self, model: Params) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """(entries of the head that name this model, the tensors that are sent of it)."""
        private, params = messages.model_message(model)
        digests = self.common.cache.digests(params)
        bases = [held for held in (*self.held.values(), self.common.home) if held.keys() <= digests.keys()]
        base = max(bases, key=lambda held: len(held.items() & digests.items()), default={})
        tensors = {key: tensor for key, tensor in params.items() if digests[key] != base.get(key)}
        head = {**private, "model": model_name(digests)}
        if len(tensors) < len(params):
            head["base"] = model_name(base)
        if tensors:
            self.held["got"] = digests
        if (mask := self.common.mask) is not None:
            head["masked"] = True
            body, top = split_body_and_head(tensors)
            if body:
                tensors = {**top, _VALUES: messages.as_tensor(encode_values(split_body_and_head(params)[0], mask))}
            if not self.has_mask:
                tensors[_MASK] = messages.as_tensor(encode_mask(mask))
                self.has_mask = True
        return head, tensors

    def _trained_model(self, params: Params, job: Job, head: Head) -> Params:
        """The whole trained model, from the tensors that came back and the start."""
        if _VALUES in params:
            body, top = split_body_and_head(job.params)
            heads = {key: tensor.clone() for key, tensor in params.items() if key != _VALUES}
            if self.common.mask is None or not heads.keys() <= top.keys():
                raise ProtocolError("values under a mask came where there is none; install the same atlas-fl")
            return {
                **decode_values(messages.as_bytes(params[_VALUES]), self.common.mask, body, into=body),
                **top,
                **heads,
            }
        if self.common.compressed:
            params = compression.decompress(params, job.params)
        untrained = set() if head.get("private") is not None else _untrained_keys(job)
        if came := sorted(untrained & params.keys()):
            raise ProtocolError(
                f"{came[0]} came back and does not train in round {job.round}; install the same atlas-fl"
            )
        # memory of their own: in a message they lie anywhere, and sums may end in other last bits
        whole = {key: tensor if key == PRIVATE else tensor.clone() for key, tensor in params.items()}
        whole |= {key: job.params[key] for key in untrained}
        return {key: whole[key] for key in (*job.params, *whole) if key in whole}


def _untrained_keys(job: Job) -> set[str]:
    """The names of the tensors that do not train in the round of this job of a client with the whole model."""
    names = set() if job.cut is not None or PRIVATE in job.params else job.params.keys()
    return {key for key in names if not job.options.trains(key, round=job.round)}


@dataclass(kw_only=True, eq=False)
class Receiver:
    """The end of a client or worker: keeps the models that the other end counts on."""

    home: Params = field(default_factory=dict)
    """The weights of the files of a whole model."""
    store: private_params.PrivateParamStore | None = None
    """Keeps what a client does not share."""
    keeps_trained: bool = True
    """The last model trained here is held too, whose scores a server may ask for."""
    compresses: bool = False
    """Trained tensors are sent as their change in few bytes, unless there is a mask."""
    combine: Callable[[Params, Params], Params] | None = None
    """Makes the model that this end predicts with of its own and of the shared one; None where it has one model."""
    trains_heads: bool = False
    """Heads train where a mask freezes weights; those that are fitted before round one do not."""
    held: dict[str, Params] = field(default_factory=dict)
    """The last model that came and the last one trained here; of both what is shared."""
    mask: masks.Mask | None = None
    _cache: DigestCache = field(default_factory=DigestCache)
    _opened: tuple[Params, messages.PrivateRef | None] = ({}, None)
    """The part of the newest job's model that came, and the name of the rest."""

    def job(self, head: Head, tensors: Params, *, client: str) -> tuple[str, Job, messages.CutInfo | None]:
        """(action, job, cut info) of a message; raises `ProtocolError` for one that is none.

        Raises `ModelError` where the part of the model that stays here is lost.
        """
        model, sent = messages.read_sent(tensors)
        params = self._model(head, model)
        action, job, cut_info = messages.read_job(head, params, client=client)
        if action == "train":
            self.held.pop("trained", None)  # before another one comes into memory
        kept: dict[str, Params] = {}
        if self.store is not None:
            reference = messages.read_private(head)
            self._opened = params, reference
            named = dict(messages.read(KeptTrees, head.get("kept", ()), "the server's job: kept"))
            own = [] if reference is None or reference.sha256 is None else [reference.sha256]
            self.store.use([*own, *named.values()], job.round)
            kept = {kind: self.store.tree(kind, sha256) for kind, sha256 in named.items()}
            is_named = reference is not None and (action == "evaluate" or reference.sha256 is not None)
            is_pair = self.combine is not None and is_named and bool(params)
            if not is_pair:
                whole = self.store.whole(*self._opened, cut=job.cut, round=job.round)
                gate = {key: one for key, one in whole.items() if key.endswith(LORA_GATE) and key not in params}
                kept |= {"gate": gate} if gate else {}
                job = replace(job, params={key: one for key, one in whole.items() if key not in gate})
            # beside tensors that came stands what no job shares, and no part of a model of the client's own
            share = self.store.share(replace(job, options=None) if params else job)
            hidden = {*unshared_keys(job.params, share)}
            # scores of a whole model show nothing of it, and those beside tensors of the server's choice do, unless
            # these are the shared model (`own_model`), which the policy holds against what honest rounds produce
            is_scored = action == "evaluate" and (not params if self.combine is None else is_pair)
            if not is_scored and (is_pair or not job.params.keys() - params.keys() <= hidden):
                raise ProtocolError(
                    f"the server asks for {action} of a model that never leaves this site, whose answer would show it;"
                    " nothing was sent: ask who runs it"
                )
        if action == "train" and self.mask is not None:
            heads = {key: tensor for key, tensor in params.items() if key not in self.mask}
            tops = {key: torch.full_like(tensor, self.trains_heads, dtype=torch.bool) for key, tensor in heads.items()}
            job = replace(job, mask={**self.mask, **tops})
        kinds: tuple[str, ...] = messages.read(tuple[str, ...], head.get("beside", ()), "the server's job: beside")
        sent |= {kind: dict(self.held.get("got", {})) for kind in kinds}
        return action, replace(job, sent=sent, kept=kept), cut_info

    @property
    def is_own(self) -> bool:
        """The newest job's model is the client's own: nothing of it came."""
        params, reference = self._opened
        return reference is not None and not params

    def own_model(self, shared: Params) -> Params:
        """The own model that the newest evaluation or the end of the run names beside this shared one; empty if none.

        Its gate is among the tensors.
        """
        reference = self._opened[1]
        if self.store is None or self.combine is None or reference is None:
            return {}
        return self.store.own_model(reference.sha256, shared)

    def predicting_model(self, own: Params, shared: Params) -> Params:
        """The model of an evaluation or of the end of the run: the shared one, or combined with the own one."""
        return self.combine(own, shared) if own and self.combine is not None else shared

    def update(self, action: str, update: Update, job: Job, *, number: int) -> Message:
        """The message with this update: its shared part and the name of the rest, under a mask the masked values."""
        private: dict[str, Any] = {}
        if self.store is not None:
            named = {kind: tree for kind, tree in update.kept.items() if kind != "gate"}  # that is kept with its model
            kept = [[kind, self.store.keep_tree(kind, tree, job.round)] for kind, tree in named.items()]
            update, reference = self.store.split_private(update, job, *self._opened)
            private = {} if reference is None else {"private": asdict(reference)}
            private |= {"kept": kept} if kept else {}
        if action == "train" and update.params is not job.params:
            if self.keeps_trained:
                self.held["trained"] = update.params
            update = replace(update, params=self._trained_part(update.params, job))
        head, tensors = messages.update_message(update, job, number=number)
        return {**head, **private}, tensors

    def _trained_part(self, params: Params, job: Job) -> Params:
        """The tensors of a trained model that the server has not."""
        if self.mask is not None:
            body, top = split_body_and_head(params)
            return {_VALUES: messages.as_tensor(encode_values(body, self.mask)), **(top if self.trains_heads else {})}
        untrained = _untrained_keys(job) if params.keys() == job.params.keys() else set()
        trained = {key: tensor for key, tensor in params.items() if key not in untrained}
        return compression.compress(trained, job.params) if self.compresses else trained

    def read_final_model(self, head: Head, tensors: Params) -> Params:
        """The client's model at the end of the run, without what `predicting_model` adds; empty where there is none."""
        if not head.get("model"):
            return {}
        model = self._model(head, tensors)
        if self.store is None:
            return model
        private = messages.read_private(head)
        self._opened = model, private
        whole = model if self.combine else self.store.whole(model, private, cut=None, round=0)
        self.store.end(private)
        return whole

    def forget(self) -> None:
        """Forget all models but the home; the parts that stay here are kept."""
        self.held.clear()
        self.mask = None

    def _model(self, head: Head, tensors: Params) -> Params:
        """The model that a message names, from the tensors that came with it and those that are here."""
        if head.get("masked") is True and _MASK in tensors:
            self.mask = decode_mask(messages.as_bytes(tensors[_MASK]), self.home)
        if (head.get("masked") is True) is (self.mask is None):
            raise ProtocolError("the server's mask is not here; install its version of atlas-fl")
        base = {key: own for key, own in self._held_model(head.get("base")).items() if key not in tensors}
        if tensors.keys() - {_MASK}:
            self.held.pop("got", None)  # before another one comes into memory
        # memory of their own: in a message they lie anywhere, and sums may end in other last bits
        came = {key: own.clone() for key, own in tensors.items() if key not in (_MASK, _VALUES)}
        if self.mask is not None and _VALUES in tensors:
            base = split_body_and_head(base)[1]
            came |= decode_values(messages.as_bytes(tensors[_VALUES]), self.mask, self.home, into=self.home)
        params = {**base, **came}
        if model_name(self._cache.digests(params)) != head.get("model"):
            raise ProtocolError("a model came with another digest than the server named; the message was altered")
        if came:
            self.held["got"] = params
        return params

    def _held_model(self, name: str | None) -> Params:
        """The model of this name that is here; none without a name."""
        if name is None:
            return {}
        for params in (self.home, *self.held.values()):
            if model_name(self._cache.digests(params)) == name:
                return params
        raise ProtocolError("the server names a model that is not here; install its version of atlas-fl")


NewSender: TypeAlias = Callable[[], Sender]
"""Makes a sender to an end that holds nothing yet."""
