"""Well-formed frames with anything in them: a site that is not what it says gets a refusal, and the server goes on."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
import torch

from atlas_fl.errors import ProtocolError
from atlas_fl.runtime.coordinator.coordinator import ClientManager
from atlas_fl.runtime.transport.frames import decode_frame, encode_frame
from atlas_fl.runtime.transport.sessions import PROTOCOL
from tests.runtime.coordinator.test_coordinator import CENSUS, IDENTITY, NAMES, job, result, sessions_of
from tests.runtime.transport.test_frames import hostile

HELLO = {"session": "s", "protocol": PROTOCOL, "version": "1", "config": "c", "model": "m"}
ODD = (
    *(None, True, 0, -1, 2**70, 1.5, -1e300, "", "\x1b[2J", "a" * 2000),
    *([], {}, [[]], [None], {"train": -1}, {"train": [1]}),
)
KINDS = ("result", "failed", "cut", "hosted", "register", "unknown")


def altered(value: Any, draw: random.Random) -> Any:
    """The same with one place of it missing, added or anything."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        rest = {name: own for name, own in value.items() if name != key}
        return draw.choice(
            [rest, {**value, f"{key}s": draw.choice(ODD)}, *[{**value, key: altered(value[key], draw)}] * 5]
        )
    if isinstance(value, list) and value and draw.random() < 0.7:
        place = draw.randrange(len(value))
        return [*value[:place], altered(value[place], draw), *value[place + 1 :]]
    return draw.choice(ODD)


def odd_tensor(draw: random.Random) -> torch.Tensor:
    shape = [draw.randrange(3) for _ in range(draw.randrange(4))]
    return torch.zeros(shape, dtype=draw.choice([torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool]))


async def became(draw: random.Random, kind: str) -> str:
    """The fate of an altered message of this kind: taken as the job's end, refused, or without effect."""
    manager = ClientManager(NAMES, IDENTITY, settings="", on_note=lambda _: None)
    sessions = sessions_of(manager)
    session, _, _ = sessions.enter("site-1", encode_frame(HELLO, {}))
    first = asyncio.create_task(sessions.handle(session, encode_frame({"sequence": 1, "body": CENSUS}, {})))
    work = asyncio.create_task(manager.run_jobs("train", [job("site-1")], seconds=3600, on_done=lambda _: None))
    head, tensors = result(decode_frame(bytes(await first))[0]["body"], "site-1", 2.0)
    head = {**(CENSUS if kind == "register" else head), "kind": kind, "what": "loss", "done": 0, "reason": "r"}
    if draw.random() < 0.6:
        tensors = {**tensors, draw.choice([*tensors, "x", "0/activation"]): odd_tensor(draw)}
    frame = encode_frame({"sequence": 2, "body": altered(head, draw)}, tensors)
    asked = asyncio.create_task(sessions.handle(session, hostile(frame, draw) if draw.random() < 0.1 else frame))
    for _ in range(10):
        await asyncio.sleep(0)
    await manager.remove("site-1", "over")  # so that nobody waits for more work
    ended = await work
    try:
        told = decode_frame(bytes(await asked))[0].get("refused", "over")
    except ProtocolError as error:
        told = str(error)
    assert "\n" not in told
    return "taken" if ended != ["over"] else "nothing" if told == "over" else "refused"


@pytest.mark.slow
def test_hundreds_of_altered_messages_are_taken_or_refused_and_nothing_else() -> None:
    async def all_of_them() -> Counter[str]:
        draw = random.Random(0)
        return Counter([await became(draw, KINDS[n % len(KINDS)]) for n in range(600)])

    found = asyncio.run(all_of_them())
    assert found["taken"] > 60, found
    assert found["refused"] > 60, found


def test_a_thousand_altered_greetings_are_answered_or_refused() -> None:
    draw, refused = random.Random(0), 0
    for _ in range(1_000):
        manager = ClientManager(NAMES, IDENTITY, settings="", on_note=lambda _: None)
        sessions = sessions_of(manager)
        try:
            sessions.enter(draw.choice([*NAMES, "stranger"]), encode_frame(altered(HELLO, draw), {}))
        except ProtocolError:
            refused += 1
    assert 300 < refused < 1_000
