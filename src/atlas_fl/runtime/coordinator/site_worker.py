"""The client loop of a site: register, run jobs, save the final model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

from atlas_fl.client.job import Job
from atlas_fl.client.options import EvaluateOptions
from atlas_fl.client.registry import ACTIONS, CLIENT_SIDE
from atlas_fl.client.split_client import client_side_of
from atlas_fl.client.split_server import Payloads
from atlas_fl.errors import UNTOLD, AtlasError, DataError, ModelError, ProtocolError, one_line
from atlas_fl.events import Note, OnEvent, PhaseStarted
from atlas_fl.params import Params
from atlas_fl.runtime.coordinator.secure_sums import SUM, SumSite
from atlas_fl.runtime.protocol.messages import CutInfo, read_payloads, write_payloads
from atlas_fl.runtime.protocol.model_sync import Receiver
from atlas_fl.runtime.transport.frames import Head, Message
from atlas_fl.runtime.transport.sessions import NO_TENSORS, Exchange
from atlas_fl.split.channel import Cut

SiteLoader: TypeAlias = Callable[[Cut | None, CutInfo | None], Any]
"""(cut, cut info) -> this site with the blocks below the cut, or with the whole model where there is no cut."""


MAX_REGISTRATIONS = 16
"""Most times in a row that a server may ask this client to register; a restarted server asks once."""


class Policy(Protocol):
    """The consent of a site; each method raises `ProtocolError` for anything else."""

    def check_job(self, head: Head) -> None:
        """Check a job by its head, before anything is loaded."""

    def check_private(self, head: Head) -> Any:
        """Check the ranks that a message names of what stays here, before anything of them is drawn."""

    def check_model(self, action: str, job: Job, *, is_own: bool, own: Params) -> None:
        """Check the model of a job, and the tensors beside it, before anything is computed.

        A model that `is_own` was not made by a server. With an `own` model the job's is combined.
        """

    def check_answer(self, action: str, job: Job, tensors: Params) -> None:
        """Check the tensors of an answer, before it is sent."""

    def check_final_model(self, params: Params, *, own: Params) -> None:
        """Check the client's final model, with which an `own` one is combined, before it is saved."""


class JobCancelledError(Exception):
    """The server has closed the job; `message` is what it sent instead of an answer."""

    def __init__(self, message: Message) -> None:
        self.message = message


def ask_server_half(what: str, done: int, payloads: Payloads, *, link: Exchange, number: int) -> Payloads:
    """The server half's answer, over the stream of the job of this number (`client.split_client.ServerLink`).

    Raises `JobCancelledError` where the server has closed the job.
    """
    head = {"kind": "cut", "number": number, "what": what, "done": done}
    answer, tensors = link.exchange(head, write_payloads(payloads))
    if answer.get("kind") != "cut":
        raise JobCancelledError((answer, tensors))
    return read_payloads(tensors)


def confirm_saved(link: Exchange, sha256: str) -> bool:
    """Tell the server that this client's model is saved; true once it has recorded that, false for another model."""
    answer, _ = link.exchange({"kind": "kept", "sha256": sha256})
    return answer.get("kind") == "over"


@dataclass(kw_only=True, eq=False)
class SiteClient:
    """The client of one site: it runs the server's jobs."""

    name: str
    load_site: SiteLoader
    link: Exchange
    registration: Head
    """Identity, metadata and device that the client registers with."""
    on_event: OnEvent
    receiver: Receiver
    """Decodes jobs, with the models that the server has sent before."""
    on_final_model: Callable[[Params, str], None]
    """Saves the final model, given its digest at the server."""
    policy: Policy
    """The consent of the site."""
    baselines: Mapping[str, str] = field(default_factory=dict)
    """By place, such as ` on test`, what stands beside a score there: the score of no training."""
    sums: SumSite | None = None
    """Sends trained models into secure sums alone; None where the settings have none."""
    _came: Params = field(default_factory=dict)
    """The tensors of the newest message until they are read: no message is held while its job is done."""
    _registrations: int = 0
    """Times in a row that the server asked it to register."""

    def run(self) -> Params:
        """Work until the run ends; the final model, saved and confirmed, or empty where there is none.

        Raises `ProtocolError` where the server refuses or stays away longer than the link waits, and `ModelError` where
        the model that a job needs is not available.
        """
        return self.work(*self._register())

    def work(self, head: Head, tensors: Params) -> Params:
        """Do what this message of the server asks, and the next ones; the final model, as `run`."""
        self._came = tensors
        del tensors
        while head.get("kind") != "done":
            if head.get("kind") == "register":
                head, self._came = self._register()
            elif head.get("kind") == "job":
                try:
                    head, self._came = self.link.exchange(*self._run_job(head))
                except JobCancelledError as cancelled:
                    head, self._came = cancelled.message
            elif head.get("kind") == SUM and self.sums is not None:
                head, self._came = self.link.exchange(*self._take_step(self.sums, head, self._came))
            elif head.get("kind") == "ended":
                raise ProtocolError(f"the server has ended: {one_line(head.get('reason'))}")
            else:
                raise ProtocolError(f"the server says {head.get('kind')!r:.40}; install its version of atlas-fl")
        self.policy.check_private(head)
        model = self.receiver.read_final_model(head, self._came)
        if model:
            own = self.receiver.own_model(model)
            self.policy.check_final_model(model, own=own)
            model = self.receiver.predicting_model(own, model)
            sha256 = str(head.get("sha256"))
            self.on_final_model(model, sha256)
            if not confirm_saved(self.link, sha256):
                raise ProtocolError(
                    "the server has another model for this client; it is not the run that this one is of"
                )
        return model

    def _register(self) -> Message:
        self._registrations += 1
        if self._registrations > MAX_REGISTRATIONS:
            raise ProtocolError(
                f"the server asked {self._registrations} times who this is and gave nothing to do; ask who runs it"
            )
        self.receiver.forget()
        self.on_event(PhaseStarted("waiting for the server and its other sites"))
        return self.link.exchange({"kind": "register", **self.registration})

    def _run_job(self, head: Head) -> Message:
        number = head.get("number")
        closing_messages: Payloads = {}
        self.policy.check_job(head)
        self._registrations = 0
        try:
            action, job, cut_info = self.receiver.job(head, self._came, client=self.name)
            self._came = {}
            if type(number) is not int or (job.cut is None) is not (cut_info is None):
                raise ProtocolError("the server's job has no number, or half of a cut; install its version of atlas-fl")
            on = f" on {job.options.split}" if isinstance(job.options, EvaluateOptions) else ""
            when = f"round {job.round}" if job.round else "for the plan"
            beside = action == "train" and job.options.second_model != "none"
            self.on_event(PhaseStarted(f"{action}{' a model of its own' if beside else on}, {when}"))
            own = self.receiver.own_model(job.params) if action == "evaluate" else {}
            self.policy.check_model(action, job, is_own=self.receiver.is_own, own=own)
            job = replace(job, params=self.receiver.predicting_model(own, job.params))
            site = self.load_site(job.cut, cut_info)
            if job.cut is None or cut_info is None:
                (update,) = ACTIONS[action]([job], site)
            else:
                server = partial(ask_server_half, link=self.link, number=number)
                crossing = client_side_of(job, site, indices=cut_info.places, server=server)
                update = CLIENT_SIDE[action](job, site, crossing)
                closing_messages = crossing.closing
            if "primary" in update.metrics:  # else the server has the head
                self.on_event(Note(f"score{on}, {when}: {update.metrics['primary']:.3f}{self.baselines.get(on, '')}"))
        except ProtocolError:
            raise
        except ModelError:
            # Without its model this site can run no further job.
            self.link.exchange({"kind": "failed", "number": number, "reason": UNTOLD, "leaves": True})
            raise
        except AtlasError as error:
            self.on_event(Note(f"does not do this job: {error}"))
            return {"kind": "failed", "number": number, "reason": UNTOLD}, NO_TENSORS
        trained = update.params
        head, sent = self.receiver.update(action, update, job, number=number)
        sent = {**sent, **write_payloads(closing_messages)}
        self.policy.check_answer(action, job, sent)
        if self.sums is None or action != "train":
            return head, sent
        return self.sums.withhold(job, trained, head, sent)

    def _take_step(self, sums: SumSite, head: Head, tensors: Params) -> Message:
        """The answer to a step of a secure sum."""
        try:
            return {"kind": "result", "number": head.get("number")}, sums.answer(head, tensors)
        except DataError as error:
            return {"kind": "failed", "number": head.get("number"), "reason": str(error)}, NO_TENSORS
