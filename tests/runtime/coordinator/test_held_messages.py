"""No message is held while what it asks for is done: of whole models each would be a model in memory."""

import asyncio
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.options import TrainOptions
from atlas_fl.client.registry import ACTIONS
from atlas_fl.events import ignore
from atlas_fl.params import Params
from atlas_fl.runtime.coordinator.site_worker import SiteClient
from atlas_fl.runtime.protocol.model_sync import Receiver, Sender
from atlas_fl.runtime.transport.frames import Head, Message, encode_frame
from atlas_fl.runtime.transport.sessions import NO_TENSORS, PROTOCOL, Sessions
from tests.runtime.coordinator.test_coordinator import ask, begun, job, played, result

PARAMS = {"a.lora_A": torch.ones(1, 2)}


class AcceptAll:
    def check_job(self, head: Head) -> None: ...
    def check_private(self, head: Head) -> None: ...
    def check_model(self, action: str, job: Job, *, is_own: bool, own: Params) -> None: ...
    def check_answer(self, action: str, job: Job, tensors: Params) -> None: ...
    def check_final_model(self, params: Params, *, own: Params) -> None: ...


def test_a_site_holds_no_message_while_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    came: list[weakref.ref[torch.Tensor]] = []
    held: list[bool] = []
    sender = Sender()

    class Server:
        def exchange(self, head: Head, tensors: Params = NO_TENSORS) -> Message:
            del tensors
            if head["kind"] != "register":
                return {"kind": "done", "model": False}, NO_TENSORS
            asked = Job(client="a", params=PARAMS, round=1, options=TrainOptions(seed=0))
            said, sent = sender.job("train", asked, number=1)
            message = {key: tensor.clone() for key, tensor in sent.items()}
            came.append(weakref.ref(message["a.lora_A"]))
            return said, message

    def train(jobs: list[Job], _: Site) -> list[Update]:
        held.extend(one() is not None for one in came)
        metrics = {"loss": 0.5, "seconds": 0.1, "steps": 1.0}
        return [Update(client=one.client, params=dict(one.params), examples=4, metrics=metrics) for one in jobs]

    monkeypatch.setitem(ACTIONS, "train", train)
    worker = SiteClient(
        name="a",
        load_site=lambda *_: None,
        link=Server(),
        registration={},
        on_event=ignore,
        receiver=Receiver(),
        on_final_model=lambda *_: None,
        policy=AcceptAll(),
    )
    head, tensors = worker._register()
    # as `run` does, and without a name for what came
    asked = [tensors]
    del tensors
    worker.work(head, asked.pop())
    assert held == [False]


@played()
async def test_a_server_holds_no_answer_while_its_site_waits_for_a_job(manager) -> None:
    asked = await begun(manager)
    work = asyncio.create_task(manager.run_jobs("train", [job("site-1")], seconds=60, on_done=id))
    head, _ = await asked
    head, tensors = result(head, "site-1", 1.0)
    came = weakref.ref(next(iter(tensors.values())))
    answered = ask(manager, "site-1", head, tensors)
    del tensors
    (update,) = await work
    assert not answered.done() and float(update.params["a.lora_A"].sum()) == 2.0
    assert came() is None
    answered.cancel()


def test_a_session_holds_no_request_while_it_is_answered() -> None:
    async def script() -> None:
        held: list[bool] = []

        async def answer(_name: str, _head: Mapping[str, Any], tensors: Params) -> Message:
            came = weakref.ref(tensors["t"])
            del tensors
            held.append(came() is not None)
            return {}, {}

        sessions = Sessions(
            answer=answer, admit=lambda _name, _hello: {}, listed=lambda: {"a": None}, on_presence=lambda *_: None
        )
        session, _, _ = sessions.enter("a", encode_frame({"session": "x", "protocol": PROTOCOL}, {}))
        request = encode_frame({"sequence": 1, "body": {"kind": "next"}}, {"t": torch.zeros(1000)})
        await sessions.handle(session, bytearray(request))
        assert held == [False]

    asyncio.run(asyncio.wait_for(script(), 60))


@pytest.mark.parametrize("end", [Sender, Receiver])
def test_what_was_trained_is_dropped_where_the_next_training_begins(end: type[Sender] | type[Receiver]) -> None:
    """Both ends do so, or one would name a model that the other has not."""
    held: dict[str, Any] = {"trained": {"b": PARAMS["a.lora_A"]} if end is Receiver else {"b": "its digest"}}
    one = end(held=held)
    asked = Job(client="a", params=PARAMS, round=2, options=TrainOptions(seed=0))
    head, tensors = Sender().job("train", asked, number=1)
    if isinstance(one, Sender):
        one.job("train", asked, number=1)
    else:
        one.job(head, tensors, client="a")
    assert "trained" not in one.held
