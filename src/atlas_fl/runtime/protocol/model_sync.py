"""The two ends between which jobs and updates travel: each knows what the other holds, and sends only what it has not.

One pair for adapters is here; whole models have theirs in `runtime.protocol.full_model_sync`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from atlas_fl.client.job import Job, Update
from atlas_fl.errors import ProtocolError
from atlas_fl.params import Params, digest
from atlas_fl.partial_sharing import transmitted_params
from atlas_fl.runtime.protocol.messages import Told, job_message, model_message, read_job, read_update, update_message
from atlas_fl.runtime.transport.frames import Head


class Sender(Protocol):
    """The server's end of one client or worker."""

    def job(self, action: str, job: Job, *, number: int, told: Told | None = None) -> tuple[Head, Params]:
        """What asks for this job."""
        ...

    def update(self, action: str, head: Mapping[str, Any], tensors: Params, *, job: Job) -> Update:
        """The update that an answer holds; raises `ProtocolError` for one that is not of its form."""
        ...

    def farewell(self, model: Params) -> tuple[Head, Params]:
        """What brings the client its own model at the end of the run; the head's `sha256` names that model."""
        ...

    def unanswered(self) -> None:
        """What the other end trained last is unknown here."""
        ...

    def forget(self) -> None:
        """The other end holds nothing."""
        ...


class Receiver(Protocol):
    """The end of a client or worker."""

    def job(self, head: Mapping[str, Any], tensors: Params, *, client: str) -> tuple[str, Job, Told | None]:
        """(action, job, what is told of its cut) of a message; raises `ProtocolError` for one that is none."""
        ...

    def update(self, action: str, update: Update, job: Job, *, number: int) -> tuple[Head, Params]:
        """What goes back."""
        ...

    def farewell(self, head: Mapping[str, Any], tensors: Params) -> Params:
        """The client's own model at the end of the run; empty where there is none."""
        ...

    def forget(self) -> None:
        """Hold nothing any more."""
        ...


NewSender: TypeAlias = Callable[[], Sender]
"""A sender to an end that holds nothing yet."""


@dataclass(kw_only=True, eq=False)
class AdapterSender:
    """Sends a model unless it is the last one that was sent, or the last one trained there."""

    held: dict[str, str] = field(default_factory=dict)
    """Digests of these two."""

    def job(self, action: str, job: Job, *, number: int, told: Told | None = None) -> tuple[Head, Params]:
        """What asks for this job."""
        head, params = job_message(action, job, number=number, held=self.held, told=told)
        if params:
            self.held["got"] = head["model"]
        return head, params

    def update(self, action: str, head: Mapping[str, Any], tensors: Params, *, job: Job) -> Update:
        """The update that an answer holds."""
        found = read_update(head, tensors, job=job)
        if action == "train" and found.params is not job.params:
            self.held["trained"] = digest(transmitted_params(found.params))
        return found

    def farewell(self, model: Params) -> tuple[Head, Params]:
        """The model, or of one that is at its client in part what is not there."""
        private, sent = model_message(model)
        return {"kind": "done", "model": True, "sha256": digest(model), **private}, sent

    def unanswered(self) -> None:
        """What the other end trained last is unknown here."""
        self.held.pop("trained", None)

    def forget(self) -> None:
        """The other end holds nothing."""
        self.held.clear()


@dataclass(kw_only=True, eq=False)
class AdapterReceiver:
    """Keeps the models that the other end counts on."""

    held: dict[str, tuple[str, Params]] = field(default_factory=dict)
    """The last one that came whole and the last one trained here, each with its digest."""

    def job(self, head: Mapping[str, Any], tensors: Params, *, client: str) -> tuple[str, Job, Told | None]:
        """(action, job, what is told of its cut) of a message."""
        return read_job(head, self._model(head, tensors), client=client)

    def update(self, action: str, update: Update, job: Job, *, number: int) -> tuple[Head, Params]:
        """What goes back."""
        if action == "train":
            self.held["trained"] = digest(update.params), update.params
        return update_message(update, job, number=number)

    def farewell(self, head: Mapping[str, Any], tensors: Params) -> Params:
        """The model that came."""
        return tensors if head.get("model") is True else {}

    def forget(self) -> None:
        """Hold nothing any more."""
        self.held.clear()

    def _model(self, head: Mapping[str, Any], params: Params) -> Params:
        """The job's model: what came with it, or one that is here."""
        wanted = str(head.get("model"))
        if not params and wanted != digest({}):
            found = next((own for key, own in self.held.values() if key == wanted), None)
            if found is None:
                raise ProtocolError("the server names a model that is not here; install its version of atlas-fl")
            return found
        if digest(params) != wanted:
            raise ProtocolError("a model came with another digest than the server named; the message was altered")
        self.held["got"] = wanted, params
        return params
