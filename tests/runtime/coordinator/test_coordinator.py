import asyncio
import functools
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch

from atlas_fl.client.job import Job, Update
from atlas_fl.client.options import TrainOptions
from atlas_fl.data.registry import TASKS
from atlas_fl.errors import ProtocolError
from atlas_fl.methods.method import Wait
from atlas_fl.params import Params
from atlas_fl.runtime.coordinator.client_registry import ANSWERS_UNTIL_FORGIVEN, MAX_REFUSALS, ClientProxy
from atlas_fl.runtime.coordinator.coordinator import ClientManager, accept_client, late_clients, reject_client
from atlas_fl.runtime.protocol.client_metadata import labels_of_task, read_metadata
from atlas_fl.runtime.protocol.messages import Identity, read_job, update_message
from atlas_fl.runtime.transport.sessions import MOST_TOLD, NO_TENSORS, Sessions

NAMES = ("site-1", "site-2")
IDENTITY = Identity(version="1", config="c", model="m", architecture="a", tokenizer="t")
CENSUS: Mapping[str, Any] = {
    "kind": "register",
    "task": "movie",
    "num_labels": 2,
    "metric": "accuracy",
    "label_names": ["bad", "good"],
    "max_length": 16,
    "examples": {"train": 4, "validation": 2, "test": 2},
    "labels": {"train": [2, 2], "validation": [1, 1], "test": [1, 1]},
    "lengths": {"train": [[5, 0, 4]], "validation": [[5, 0, 2]], "test": [[5, 0, 2]]},
    "images": False,
    "positive": None,
    "multilabel": False,
    "left_out": 0,
    "device": "cpu_2gb",
}
PARAMS = {"a.lora_A": torch.ones(1, 2)}


def played(names: Sequence[str] = NAMES, **how: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Give a test, in a loop of its own, a manager of these listed clients, and its `notes` where it names them."""

    def decorate(script: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        own = inspect.signature(script).parameters

        def test(**given: Any) -> None:
            async def run() -> None:
                notes: list[str] = []
                told = {"notes": notes} if "notes" in own else {}
                manager = ClientManager(names, IDENTITY, settings="", on_note=notes.append, **how)
                await asyncio.wait_for(script(manager, **told, **given), 60)

            asyncio.run(run())

        functools.update_wrapper(test, script)
        asked = [own[name] for name in own if name not in ("manager", "notes")]
        test.__signature__ = inspect.Signature(asked)
        return test

    return decorate


def sessions_of(manager: ClientManager, names: Sequence[str] = NAMES) -> Sessions:
    return Sessions(
        answer=manager.answer,
        admit=manager.handshake,
        listed=lambda: dict.fromkeys(names),
        on_presence=manager.on_presence,
        on_refused=manager.on_refused,
    )


def job(name: str) -> Job:
    return Job(client=name, params=PARAMS, round=1, options=TrainOptions(seed=0))


def result(head: Mapping[str, Any], name: str, value: float) -> tuple[Any, Any]:
    _, work, _ = read_job(json.loads(json.dumps(head)), PARAMS, client=name)
    metrics = {"loss": 0.5, "seconds": 0.1, "steps": 1.0}
    update = Update(client=name, params={"a.lora_A": torch.full((1, 2), value)}, examples=4, metrics=metrics)
    return update_message(update, work, number=head["number"])


def ask(
    manager: ClientManager, name: str, head: Mapping[str, Any], tensors: Params = NO_TENSORS
) -> "asyncio.Task[Any]":
    """A request that waits for its answer."""
    task = asyncio.create_task(manager.answer(name, head, tensors))
    task.add_done_callback(id)
    return task


async def register(manager: ClientManager, name: str, **changes: Any) -> "asyncio.Task[Any]":
    manager.on_presence(name, True)
    return ask(manager, name, {**CENSUS, **changes})


async def begun(manager: ClientManager) -> "asyncio.Task[Any]":
    """What site-1 is told next, with which alone the run has begun."""
    asked = await register(manager, "site-1")
    await manager.wait_for_clients(("site-1",), min_clients=1, seconds=60)
    return asked


async def train(manager: ClientManager, name: str, asked: "asyncio.Task[Any]") -> Any:
    """The update of a client that answers, in `asked`, the job that it is given."""
    work = asyncio.create_task(manager.run_jobs("train", [job(name)], seconds=60, on_done=id))
    head, _ = await asked
    ask(manager, name, *result(head, name, 1.0))
    return (await work)[0]


@played()
async def test_jobs_go_to_their_clients_and_updates_come_back_in_order(manager, notes) -> None:
    asked = [await register(manager, name) for name in NAMES]
    assert await manager.wait_for_clients(NAMES, min_clients=2, seconds=60) == NAMES
    done: list[int] = []
    work = asyncio.create_task(
        manager.run_jobs("train", [job(name) for name in NAMES], seconds=60, on_done=done.append)
    )
    for name, task in reversed(list(zip(NAMES, asked))):
        head, params = await task
        assert params == PARAMS
        ask(manager, name, *result(head, name, float(name[-1])))
    found = await work
    assert [float(one.params["a.lora_A"][0, 0]) for one in found if isinstance(one, Update)] == [1.0, 2.0]
    assert done[-1] == 2
    assert "site-2: movie, 4 training examples, cpu_2gb (2 of 2 here)" in notes


@played()
async def test_a_client_that_comes_back_gets_its_job_again_and_the_old_answer_is_not_taken_twice(manager, notes):
    first = await begun(manager)
    work = asyncio.create_task(manager.run_jobs("train", [job("site-1")], seconds=60, on_done=id))
    head, _ = await first
    manager.on_presence("site-1", False)
    again, params = await (await register(manager, "site-1"))
    assert again["number"] == head["number"]
    assert params == PARAMS, "the new process holds no model"
    ask(manager, "site-1", *result(again, "site-1", 1.0))
    (update,) = await work
    assert isinstance(update, Update)
    ask(manager, "site-1", *result(head, "site-1", 9.0))
    (late,) = await manager.run_jobs("train", [job("site-1")], seconds=0.05, on_done=id)
    assert late == "no answer within 0.05 seconds"
    assert "site-1 is gone (0 of 2 here)" in notes
    assert "site-1 is back (1 of 2 here)" in notes


@played()
async def test_nobody_waits_again_for_who_let_a_deadline_pass_until_it_is_back(manager: ClientManager) -> None:
    first = await begun(manager)
    first.cancel()
    manager.on_presence("site-1", False)
    answers = [
        (await manager.run_jobs("train", [job("site-1")], seconds=seconds, on_done=id))[0] for seconds in (0.05, 1e6)
    ]
    assert answers == ["no answer within 0.05 seconds", "it has been away since it let a deadline pass"]
    task = await register(manager, "site-1")
    assert isinstance(await train(manager, "site-1", task), Update)


@played()
async def test_a_job_that_fails_is_told(manager: ClientManager) -> None:
    task = await register(manager, "site-1")
    work = asyncio.create_task(manager.run_jobs("train", [job("site-1")], seconds=60, on_done=id))
    head, _ = await task
    failed = {"kind": "failed", "number": head["number"], "reason": "no memory"}
    ask(manager, "site-1", failed, {})
    assert await work == ["no memory"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"label_names": ["good", "bad"]},
            r"site-2 has labels \(good, bad\) judged by accuracy for task 'movie', and in this run they are others;",
        ),
        ({"tokenizer": "other"}, "has tokenizer other, the server t; its texts would be other tokens: give the server"),
        ({"architecture": "other"}, "has architecture other, the server a; its config.json computes something else"),
        ({"model": "other"}, "client 'site-2' has model other, the server m; give the server's model with --model"),
        ({"config": "other"}, "has config other, the server c; ask who runs the server which settings hold"),
        ({"version": "0"}, "has version 0, the server 1; install the same atlas-fl"),
        ({"device": "mainframe"}, "unknown device 'mainframe'"),
        ({"examples": {}}, "what the client tells of its data"),
    ],
)
@played()
async def test_what_does_not_fit_is_refused(manager: ClientManager, changes: dict[str, Any], message: str) -> None:
    await begun(manager)
    with pytest.raises(ProtocolError, match=message):
        await (await register(manager, "site-2", **changes))


THREE = ("site-1", "site-2", "site-3")
OTHER = {"label_names": ["secret", "other"]}
MORE: Mapping[str, Any] = {
    "task": "mine",
    "num_labels": 3,
    "label_names": ["a", "b", "c"],
    "labels": {"train": [2, 1, 1], "validation": [1, 1, 0], "test": [1, 1, 0]},
}


@pytest.mark.parametrize("first", THREE)
@played(THREE)
async def test_the_labels_of_a_task_are_those_of_most_of_its_clients_whoever_comes_first(manager, notes, first) -> None:
    order = sorted(THREE, key=lambda name: name != first)
    asked = {name: await register(manager, name, **(OTHER if name == "site-1" else {})) for name in order}
    assert await manager.wait_for_clients(THREE, min_clients=2, seconds=0.2) == ("site-2", "site-3")
    with pytest.raises(ProtocolError, match=r"site-1 has labels \(secret, other\) .* they are others;") as refused:
        await asked["site-1"]
    assert "good" not in str(refused.value)
    assert "site-2" not in str(refused.value)
    (told,) = [note for note in notes if note.startswith("site-1 was refused: ")]
    assert "and in this run they are (bad, good) judged by accuracy" in told
    assert any(note.startswith("begins without site-1 (refused: site-1 has labels") for note in notes)


@played(THREE)
async def test_who_was_outvoted_and_mends_its_data_is_waited_for(manager: ClientManager) -> None:
    asked = [await register(manager, name, **(OTHER if name == "site-1" else {})) for name in THREE]
    waiting = asyncio.create_task(manager.wait_for_clients(THREE, min_clients=3, seconds=60))
    with pytest.raises(ProtocolError, match="has labels"):
        await asked[0]
    await register(manager, "site-1")
    assert await waiting == THREE


@played()
async def test_of_two_clients_that_disagree_the_one_that_is_listed_first_stays(manager: ClientManager) -> None:
    asked = [await register(manager, name, **words) for name, words in (("site-2", OTHER), ("site-1", {}))]
    assert await manager.wait_for_clients(NAMES, min_clients=1, seconds=0.2) == ("site-1",)
    with pytest.raises(ProtocolError, match="has labels"):
        await asked[0]


@played(THREE, task_labels={"movie": labels_of_task(TASKS["movie"])})
async def test_the_labels_of_a_task_that_the_server_knows_are_fixed_for_the_first_one_too(manager) -> None:
    with pytest.raises(ProtocolError, match=r"site-1 has labels \(secret, other\)"):
        await (await register(manager, "site-1", **OTHER))


@played(THREE)
async def test_after_a_restart_the_plan_fixes_the_labels_and_its_clients_come_back_with_their_data(manager) -> None:
    manager.known = {name: read_metadata(CENSUS) for name in ("site-2", "site-3")}
    with pytest.raises(ProtocolError, match="site-1 has labels"):
        await (await register(manager, "site-1", **OTHER))
    with pytest.raises(ProtocolError, match="site-2 came back with other data than it had; join with the same"):
        await (await register(manager, "site-2", left_out=1))
    (await register(manager, "site-3")).cancel()


@played(THREE, accepts_late=True)
async def test_newcomers_of_a_task_that_nobody_has_do_not_fix_its_labels_one_by_one(manager: ClientManager) -> None:
    asked = [await begun(manager)]
    asked += [await register(manager, "site-3", task="mine", **OTHER), await register(manager, "site-2", task="mine")]
    await asyncio.sleep(0.01)
    assert [client.name for client in await late_clients(manager)] == ["site-2"]
    with pytest.raises(ProtocolError, match="site-3 has labels"):
        await asked[1]


@played(THREE, one_head=True)
async def test_under_a_mask_most_clients_fix_the_number_of_classes(manager: ClientManager) -> None:
    asked = [await register(manager, name, **(MORE if name == "site-1" else {})) for name in THREE]
    assert await manager.wait_for_clients(THREE, min_clients=2, seconds=0.2) == ("site-2", "site-3")
    with pytest.raises(ProtocolError, match="site-1 has 3 classes, and one mask holds for the heads of all clients"):
        await asked[0]


@played(THREE, accepts_late=True, one_head=True)
async def test_a_newcomer_whose_head_fits_no_mask_learns_nothing_of_the_tasks_of_others(manager: ClientManager) -> None:
    asked = [await begun(manager)]
    asked += [await register(manager, name, **MORE) for name in ("site-2", "site-3")]
    await asyncio.sleep(0.01)
    assert await late_clients(manager) == ()
    for task in asked[1:]:
        with pytest.raises(ProtocolError, match="has 3 classes, and one mask holds") as refused:
            await task
        assert "movie" not in str(refused.value)


@played(THREE)
async def test_the_line_that_ends_waiting_says_who_was_refused_and_why(manager: ClientManager) -> None:
    with pytest.raises(ProtocolError):
        manager.handshake("site-1", {**vars(IDENTITY), "model": "another"})
    manager.on_refused("site-1", "client 'site-1' has model another, the server m")
    manager.on_presence("site-2", True)
    manager.on_presence("site-2", False)
    with pytest.raises(ProtocolError) as ended:
        await manager.wait_for_clients(THREE, min_clients=3, seconds=0.01)
    assert str(ended.value).startswith(
        "0 of 3 clients are here after 0.01 seconds, missing: site-1 (refused: client 'site-1' has model another,"
        " the server m), site-2 (it was here and did not register; its own last line says why), site-3; 3 are"
    )


@played()
async def test_who_was_here_and_is_gone_is_not_counted(manager: ClientManager, notes) -> None:
    await begun(manager)
    manager.on_presence("site-1", False)
    assert "site-1 is gone (0 of 2 here)" in notes
    gone = r"^0 of 2 clients are here after 0.01 seconds, missing: site-1 \(it was here and is gone\), site-2; 2 are"
    with pytest.raises(ProtocolError, match=gone):
        await manager.wait_for_clients(NAMES, min_clients=2, seconds=0.01)


@played()
async def test_who_is_refused_is_shown_once_and_as_a_terminal_may_have_it(manager, notes) -> None:
    for _again in range(3):
        manager.on_refused("site-1", "labels (\x1b[2J, good) are others")
    manager.on_refused("stranger", "client 'stranger' is not listed")
    await manager.remove("site-2", "nothing fits its device")  # as it was told by whoever turned it away
    manager.on_refused("site-2", "nothing fits its device")
    assert notes == [
        "site-1 was refused: labels (?[2J, good) are others",
        "stranger was refused: client 'stranger' is not listed",
    ]


@played()
async def test_who_comes_late_or_with_other_data_is_refused_and_who_is_missing_is_named(manager, notes) -> None:
    await register(manager, "site-1")
    with pytest.raises(ProtocolError, match=r"1 of 2 clients are here after 0.01 seconds, missing: site-2"):
        await manager.wait_for_clients(NAMES, min_clients=2, seconds=0.01)
    assert await manager.wait_for_clients(NAMES, min_clients=1, seconds=0.01) == ("site-1",)
    assert "begins without site-2" in notes
    with pytest.raises(ProtocolError, match="this federation was planned without site-2"):
        await (await register(manager, "site-2"))
    with pytest.raises(ProtocolError, match="site-1 came back with other data than it had"):
        await (await register(manager, "site-1", max_length=17))


@played()
async def test_who_comes_late_waits_to_be_let_in_or_turned_away_and_may_come_again_as_another(manager, notes) -> None:
    manager.accepts_late = True
    await begun(manager)
    assert await late_clients(manager) == ()
    late = await register(manager, "site-2")
    await asyncio.sleep(0)
    assert [client.name for client in await late_clients(manager)] == ["site-2"]
    assert notes[-1] == "site-2 came after the plan was made and joins before the next round"
    manager.on_presence("site-2", False)
    assert await late_clients(manager) == (), "it has gone"
    manager.on_presence("site-2", True)
    await reject_client(manager, "site-2", "nothing fits")
    with pytest.raises(ProtocolError, match=r"^site-2 cannot join: nothing fits$"):
        await late
    assert await late_clients(manager) == ()
    again = await register(manager, "site-2", max_length=17, device="laptop_8gb")
    await asyncio.sleep(0)
    (client,) = await late_clients(manager)
    assert client.device is not None and client.device.name == "laptop_8gb"
    await accept_client(manager, "site-2")
    assert await late_clients(manager) == ()
    assert isinstance(await train(manager, "site-2", again), Update)
    with pytest.raises(ProtocolError, match="site-2 came back with other data than it had"):
        await (await register(manager, "site-2", max_length=16))


@played()
async def test_who_is_lost_is_not_waited_for_and_is_told_why(manager: ClientManager, notes: list[str]) -> None:
    first = await register(manager, "site-1")
    waiting = asyncio.create_task(manager.wait_for_clients(NAMES, min_clients=1, seconds=3600))
    await manager.remove("site-2", "its disk is full")
    assert await waiting == ("site-1",)
    assert "begins without site-2 (its disk is full)" in notes
    work = asyncio.create_task(manager.run_jobs("train", [job("site-1")], seconds=3600, on_done=lambda _: None))
    await first
    await manager.remove("site-1", "the run is over")
    assert await work == ["the run is over"]
    with pytest.raises(ProtocolError, match=r"^the run is over$"):
        await manager.answer("site-1", {"kind": "next"}, {})


@played()
async def test_a_federation_that_has_lost_too_many_ends_at_once(manager: ClientManager) -> None:
    waiting = asyncio.create_task(manager.wait_for_clients(NAMES, min_clients=2, seconds=3600))
    await manager.remove("site-1", "its disk is full")
    missing = r"^0 of 2 clients are here, missing: site-1 \(its disk is full\), site-2; 2 are needed"
    with pytest.raises(ProtocolError, match=missing):
        await waiting


@played()
async def test_a_server_that_was_started_again_asks_for_registration(manager: ClientManager) -> None:
    assert await manager.answer("site-1", {"kind": "result", "number": 5}, {}) == ({"kind": "register"}, {})


@pytest.mark.parametrize("kind", ["register", "next", "kept"])
@played()
async def test_requests_that_bring_no_result_bring_no_tensors(manager: ClientManager, kind: str) -> None:
    with pytest.raises(ProtocolError, match=rf"^a request '{kind}' of site-1 has tensors; only an answer to a job"):
        await asyncio.wait_for(manager.answer("site-1", {**CENSUS, "kind": kind}, PARAMS), 0.5)


Told: TypeAlias = "asyncio.Task[Any]"


async def given(
    manager: ClientManager, asked: Told, *, round: int, seconds: float
) -> tuple[Mapping[str, Any] | None, Told]:
    """(head of the job that whoever waits in `asked` is given in this round, None for none; the server's work)."""
    work = asyncio.create_task(
        manager.run_jobs("train", [replace(job("site-1"), round=round)], seconds=seconds, on_done=id)
    )
    await asyncio.wait([work, asked], return_when=asyncio.FIRST_COMPLETED)
    return (asked.result()[0] if asked.done() else None), work


@played()
async def test_who_is_silent_and_answers_in_between_is_waited_for_less_and_less(manager: ClientManager) -> None:
    """The first job of each round is not answered, the second at once, as by who trains not and is evaluated."""
    waited = list[int]()
    asked = await register(manager, "site-1")
    for round in range(1, 28):
        head, work = await given(manager, asked, round=round, seconds=0.01)
        if "no answer" in str(await work):
            waited.append(round)
        if head is not None:
            asked = ask(manager, "site-1", {"kind": "next"}, {})
        head, work = await given(manager, asked, round=round, seconds=60)
        if head is not None:
            asked = ask(manager, "site-1", *result(head, "site-1", 1.0))
        await work
    assert waited == [1, 2, 3, 5, 9, 17, 25]


@played()
async def test_a_deadline_is_forgotten_after_enough_answers_that_were_taken(manager: ClientManager) -> None:
    asked = await register(manager, "site-1")
    for round in range(1, 2 * ANSWERS_UNTIL_FORGIVEN + 4):
        silent = round % (ANSWERS_UNTIL_FORGIVEN + 1) == 1
        head, work = await given(manager, asked, round=round, seconds=0.01 if silent else 60)
        assert head is not None, round
        said = ({"kind": "next"}, {}) if silent else result(head, "site-1", 1.0)
        if silent:
            await work
        asked = ask(manager, "site-1", *said)
        await work


@played()
async def test_who_registers_anew_after_every_refusal_is_asked_less_and_less(manager: ClientManager) -> None:
    rounds = list[int]()
    asked = await register(manager, "site-1")
    for round in range(1, 28):
        head, work = await given(manager, asked, round=round, seconds=60)
        if head is not None:
            rounds.append(round)
            said, _tensors = result(head, "site-1", 1.0)
            wrong = ask(manager, "site-1", said, {})
            assert "its answer was refused" in (await work)[0]
            wrong.cancel()
            await asyncio.wait([wrong])
            asked = await register(manager, "site-1")
        await work
    assert rounds == [1, 2, 3, 4, 6, 10, 18, 26]


def test_who_was_refused_too_often_and_has_mended_it_is_asked_in_every_round_again() -> None:
    client = ClientProxy("site-1")
    for _ in range(MAX_REFUSALS):
        client.record_refusal(round=1)
    assert client.skip_reason(round=2).startswith("3 of its answers were refused; it is asked again once")
    client.allow_retry()
    assert client.skip_reason(round=1) == "3 of its answers were refused; it is asked again from round 2 on"
    assert client.skip_reason(round=2) == ""
    for _ in range(ANSWERS_UNTIL_FORGIVEN):
        assert client.refusals == MAX_REFUSALS - 1
        client.record_accepted_answer()
    assert client.refusals == 0


def test_a_site_that_comes_and_goes_without_end_is_told_of_ten_times_a_minute_with_a_count() -> None:
    now = [0.0]

    @played(clock=lambda: now[0])
    async def script(manager: ClientManager, notes: list[str]) -> None:
        await begun(manager)
        notes.clear()
        for _ in range(100):
            manager.on_presence("site-1", False)
            manager.on_presence("site-1", True)
        assert len(notes) == MOST_TOLD
        now[0] = 61.0
        assert await manager.run_jobs("train", [], seconds=1, on_done=id) == []
        assert notes[MOST_TOLD:] == ["site-1 is back (1 of 2 here) (190 times more within a minute)"]

    script()


Asked: TypeAlias = dict[str, "asyncio.Task[Any]"]


async def all_of_three(manager: ClientManager) -> Asked:
    """What each of three registered clients is told next."""
    asked = {name: await register(manager, name) for name in THREE}
    await manager.wait_for_clients(THREE, min_clients=3, seconds=60)
    return asked


async def send(manager: ClientManager, asked: Asked, name: str) -> None:
    """The answer of this client to the job that it has, once it is taken."""
    head, _ = await asked[name]
    asked[name] = ask(manager, name, *result(head, name, 1.0))
    while not manager.open_jobs[name].future.done():
        await asyncio.sleep(0)


async def step(
    manager: ClientManager, asked: Asked, *arriving: str, wait: Wait, seconds: float = 60, round: int = 1
) -> dict[str, Any]:
    """The answers of an asynchronous step, in which these clients answer one after the other."""
    jobs = [job(name) for name in THREE]
    work = asyncio.create_task(manager.run_until(jobs, wait, round=round, seconds=seconds, on_done=id))
    await asyncio.sleep(0)
    for name in arriving:
        await send(manager, asked, name)
    return {name: one if isinstance(one, str) else "came" for name, one in (await work).items()}


@played(THREE)
async def test_a_step_takes_the_first_updates_and_the_next_one_those_that_came_since(manager: ClientManager) -> None:
    asked = await all_of_three(manager)
    assert await step(manager, asked, "site-1", wait=Wait(updates=1)) == {"site-1": "came"}
    numbers = {name: (await asked[name])[0]["number"] for name in ("site-2", "site-3")}
    await send(manager, asked, "site-3")
    await send(manager, asked, "site-2")
    # each step gives a job to who has none, and to nobody else
    assert [await step(manager, asked, wait=Wait(updates=1)) for _ in range(2)] == [
        {"site-3": "came"},
        {"site-2": "came"},
    ]
    assert {*manager.open_jobs} == {"site-1", "site-3"}
    assert numbers == {"site-2": 2, "site-3": 3} and manager.open_jobs["site-1"].number == 4
    assert await step(manager, asked, *THREE, wait=Wait(updates=3)) == dict.fromkeys(THREE, "came")
    assert not manager.open_jobs


@played(THREE)
async def test_a_step_of_a_length_takes_all_that_came_and_waits_for_one(manager: ClientManager) -> None:
    asked = await all_of_three(manager)
    found = await step(manager, asked, "site-3", "site-1", wait=Wait(updates=1, seconds=0.2))
    assert found == {"site-3": "came", "site-1": "came"}
    assert await step(manager, asked, "site-2", wait=Wait(updates=1, seconds=1e-9)) == {"site-2": "came"}


@played(THREE)
async def test_a_deadline_ends_a_step_and_the_work_of_who_is_away(manager: ClientManager) -> None:
    asked = await all_of_three(manager)
    manager.on_presence("site-3", False)
    late = "no answer within 0.3 seconds"
    assert await step(manager, asked, "site-1", wait=Wait(updates=2), seconds=0.3) == {"site-1": "came", "site-3": late}
    assert {*manager.open_jobs} == {"site-2"}, "it is here, and goes on"
    found = await step(manager, asked, "site-1", wait=Wait(updates=3), seconds=0.3, round=2)
    away = "it has been away since it let a deadline pass"
    assert found == {"site-1": "came", "site-2": late, "site-3": away}, "all are waited for"
    assert not manager.open_jobs
