"""At the end everybody who is here or awaited hears that it is over, and has its model once it has said so."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from atlas_fl.errors import ProtocolError
from atlas_fl.runtime.coordinator import coordinator
from atlas_fl.runtime.coordinator.coordinator import ClientManager, shutdown_clients
from tests.runtime.coordinator.test_coordinator import PARAMS, played, register


async def say_kept(manager: ClientManager, name: str, sha256: object) -> Any:
    """The answer to a client that says its model of this name lies on its disk."""
    return await manager.answer(name, {"kind": "kept", "sha256": sha256}, {})


@played()
async def test_who_is_awaited_gets_its_model_when_it_comes_and_is_known_to_have_it_when_it_says_so(manager) -> None:
    kept: list[str] = []
    manager.on_model_saved = kept.append
    first = await register(manager, "site-1")
    over = asyncio.create_task(shutdown_clients(manager, {"site-2": PARAMS}, seconds=3600, wait_for=["site-2"]))
    assert await first == ({"kind": "done", "model": False}, {})
    manager.on_presence("site-1", False)
    head, model = await (await register(manager, "site-2"))
    assert head["model"]
    assert torch.equal(model["a.lora_A"], PARAMS["a.lora_A"])
    # it is killed before it has written anything, and gets the same once more
    manager.on_presence("site-2", False)
    assert await (await register(manager, "site-2")) == (head, model)
    await asyncio.wait({over}, timeout=0.05)
    assert kept == []
    assert await say_kept(manager, "site-2", head["sha256"]) == ({"kind": "over"}, {})
    assert kept == ["site-2"]
    await asyncio.wait({over}, timeout=0.05)
    assert not over.done(), "who has not gone may not have heard that this is known"
    manager.on_presence("site-2", False)
    await over


@played()
async def test_who_was_killed_after_it_wrote_its_model_says_so_without_registering(manager: ClientManager) -> None:
    kept: list[str] = []
    manager.on_model_saved = kept.append
    over = asyncio.create_task(shutdown_clients(manager, {"site-2": PARAMS}, seconds=3600, wait_for=["site-2"]))
    await asyncio.sleep(0)
    farewell = manager.clients["site-2"].shutdown_message
    assert farewell is not None
    manager.on_presence("site-2", True)
    assert await say_kept(manager, "site-2", "of another run") == ({"kind": "another"}, {})
    assert await say_kept(manager, "site-2", None) == ({"kind": "another"}, {})
    assert kept == []
    for _again in range(2):
        assert await say_kept(manager, "site-2", farewell[0]["sha256"]) == ({"kind": "over"}, {})
    assert kept == ["site-2"]
    manager.on_presence("site-2", False)
    await over


@played()
async def test_a_server_in_mid_run_knows_of_no_model_that_is_kept(manager, monkeypatch) -> None:
    monkeypatch.setattr(coordinator, "CONFIRM_SECONDS", 0.02)
    manager.on_presence("site-1", True)
    assert await say_kept(manager, "site-1", None) == ({"kind": "another"}, {})


@played()
async def test_what_cannot_be_written_down_is_not_confirmed(manager: ClientManager) -> None:
    def full(_name: str) -> None:
        raise ProtocolError("no space left")

    manager.on_model_saved = full
    over = asyncio.create_task(shutdown_clients(manager, {"site-1": PARAMS}, seconds=0.1))
    head, _model = await (await register(manager, "site-1"))
    with pytest.raises(ProtocolError, match="no space left"):
        await say_kept(manager, "site-1", head["sha256"])
    assert not manager.clients["site-1"].model_saved
    await over


@played()
async def test_who_writes_its_model_is_waited_for_longer_than_who_says_nothing(manager: ClientManager) -> None:
    silent = await register(manager, "site-2")
    writes = await register(manager, "site-1")
    over = asyncio.create_task(shutdown_clients(manager, {"site-1": PARAMS}, seconds=0.02, writing_seconds=3600))
    (head, _model), _ = await writes, await silent
    await asyncio.wait({over}, timeout=0.1)
    assert not over.done()
    await say_kept(manager, "site-1", head["sha256"])
    await over


@played()
async def test_who_is_away_or_lost_is_not_waited_for(manager: ClientManager) -> None:
    await manager.remove("site-1", "its disk is full")
    await asyncio.wait_for(shutdown_clients(manager, {}, seconds=3600, wait_for=["site-1"]), 10)
    await asyncio.wait_for(shutdown_clients(manager, {}, seconds=0, wait_for=["site-2"]), 10)


@played()
async def test_who_may_not_know_that_its_model_is_recorded_is_waited_for_a_while(manager: ClientManager) -> None:
    """A server that is started again knows from its record alone that this one has confirmed."""

    def shutdown(*, return_seconds: float) -> Coroutine[Any, Any, None]:
        ends = {"may_return": ["site-1"], "return_seconds": return_seconds}
        return shutdown_clients(manager, {"site-1": PARAMS}, seconds=3600, **ends)

    await asyncio.wait_for(shutdown(return_seconds=0.05), 10)
    over = asyncio.create_task(shutdown(return_seconds=3600))
    await asyncio.wait({over}, timeout=0.1)
    assert not over.done()
    farewell = manager.clients["site-1"].shutdown_message
    assert farewell is not None
    manager.on_presence("site-1", True)
    assert await say_kept(manager, "site-1", farewell[0]["sha256"]) == ({"kind": "over"}, {})
    manager.on_presence("site-1", False)
    await asyncio.wait_for(over, 10)
