"""At the end everybody who is here or awaited hears that it is over, and nobody else is waited for."""

import asyncio

import torch

from atlas_fl.engines.hall.farewells import dismiss
from atlas_fl.engines.hall.hall import Hall
from tests.engines.hall.test_hall import PARAMS, play, register


def test_who_is_awaited_gets_its_model_when_it_comes() -> None:
    async def script(hall: Hall, _: list[str]) -> None:
        first = await register(hall, "site-1")
        over = asyncio.create_task(dismiss(hall, {"site-2": PARAMS}, seconds=3600, awaited=["site-2"]))
        assert await first == ({"kind": "done", "model": False}, {})
        hall.on_presence("site-1", False)
        head, model = await (await register(hall, "site-2"))
        assert not over.done(), "who has not gone may not have read it"
        hall.on_presence("site-2", False)
        assert await over == {"site-1", "site-2"}
        assert head["model"] is True
        assert torch.equal(model["a.lora_A"], PARAMS["a.lora_A"])

    play(script)


def test_who_is_away_or_lost_is_not_waited_for() -> None:
    async def script(hall: Hall, _: list[str]) -> None:
        await hall.lose("site-1", "its disk is full")
        assert await dismiss(hall, {}, seconds=3600, awaited=["site-1"]) == frozenset()
        late = asyncio.create_task(dismiss(hall, {}, seconds=0, awaited=["site-2"]))
        assert await late == frozenset()

    play(script)
