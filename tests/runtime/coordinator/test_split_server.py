"""Cut clients at their sites, in threads, and a server that holds the rest: bits and bytes of a simulation."""

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call

from atlas_fl.client import split_server
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.options import EvaluateOptions
from atlas_fl.client.registry import ACTIONS
from atlas_fl.errors import ProtocolError
from atlas_fl.events import ignore
from atlas_fl.models.loading import load_backbone
from atlas_fl.params import digest
from atlas_fl.runtime.coordinator.coordinator import ClientManager, shutdown_clients
from atlas_fl.runtime.coordinator.site_worker import SiteClient, SiteLoader
from atlas_fl.runtime.coordinator.split_server import SplitServer
from atlas_fl.runtime.protocol.messages import read_payloads
from atlas_fl.runtime.protocol.model_sync import Receiver
from atlas_fl.runtime.remote import RemoteEngine
from atlas_fl.runtime.transport.event_loop import LoopThread
from atlas_fl.runtime.transport.frames import decode_frame, encode_frame
from atlas_fl.runtime.transport.sessions import Sessions
from atlas_fl.split.channel import Cut
from atlas_fl.split.model import load_client_part
from tests.client.split.test_measure import options_of
from tests.laws.test_packs import HARD
from tests.runtime.coordinator.test_coordinator import CENSUS, IDENTITY, sessions_of
from tests.runtime.in_process import AcceptAll, InProcess

CUTS = {"a-0": Cut(blocks=1), "b-0": Cut(blocks=2, head="client"), "c-0": None, "d-0": Cut(blocks=1, wire="int8")}


@dataclasses.dataclass(kw_only=True)
class Counting:
    """An end in the same process that keeps every frame, and dies or sends twice where it is told to."""

    inner: InProcess
    frames: list[tuple[bytes, bytes]] = dataclasses.field(default_factory=list)
    dies_at: int = 0
    twice: bool = False

    def exchange(self, head: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] = {}) -> Any:
        cut = head.get("kind") == "cut"
        if cut and len(self.frames) + 1 == self.dies_at:
            raise KeyboardInterrupt
        found = self.inner.exchange(head, tensors)
        if cut or head.get("kind") == "result":
            request = encode_frame({"sequence": self.inner._number, "body": head}, tensors)
            if self.twice:  # a stream that is cut after the work is done sends its question again
                self.inner._in_loop(self.inner._sessions.handle(self.inner._session, request))
            answer = encode_frame({"sequence": self.inner._number, "body": found[0]}, found[1])
            self.frames.append((request, answer if cut else b""))
        return found


@dataclasses.dataclass(kw_only=True)
class Federation:
    """A server in a loop of its own, and sites in threads."""

    site: Site
    path: str
    engine: RemoteEngine
    sessions: Sessions
    threads: LoopThread
    running: list[threading.Thread] = dataclasses.field(default_factory=list)
    told: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    """The registration of a client's data."""

    def join_all(self) -> dict[str, Counting]:
        return {name: self.join(name) for name in CUTS}

    def come_back(self, name: str, **how: Any) -> threading.Thread:
        """Start the client that joined last again, in a thread, once it has died."""
        first = self.running[-1]

        def comes_back() -> None:
            first.join(60)
            self.threads.wait(left, self.sessions, self.sessions.by_name[name])
            self.join(name, **how)

        back = threading.Thread(target=comes_back)
        back.start()
        return back

    def join(self, name: str, home: SiteLoader | None = None, **how: Any) -> Counting:
        hello = {**vars(IDENTITY), "session": f"{name} {len(self.running)}"}
        link = Counting(inner=InProcess(self.sessions, self.threads.loop, name=name, hello=hello), **how)
        census = {**CENSUS, "task": name, **self.told.get(name, {})}
        worker = SiteClient(
            name=name,
            load_site=home or home_of(self.site, self.path, CUTS[name]),
            link=link,
            registration=census,
            on_event=ignore,
            receiver=Receiver(),
            on_final_model=lambda *_: None,
            policy=AcceptAll(),
        )
        thread = threading.Thread(target=quietly, args=(worker.run,), daemon=True)
        self.running.append(thread)
        thread.start()
        return link


def told(site: Site) -> dict[str, Mapping[str, object]]:
    """The registration of each client: numbers of its examples and tokens."""
    return {
        name: {
            "num_labels": own.task.num_labels,
            "metric": own.task.metric,
            "label_names": [],
            "max_length": own.task.max_length,
            "examples": {split: len(data) for split, data in own.splits.items()},
            "labels": {split: spread(own.task.num_labels, data.labels) for split, data in own.splits.items()},
            "lengths": {split: [[int(n), 0, 1] for n in data.lengths] for split, data in own.splits.items()},
            "images": False,
            "positive": None,
            "multilabel": False,
            "left_out": 0,
        }
        for name, own in site.data.items()
    }


def spread(classes: int, labels: np.ndarray) -> list[float]:
    return np.bincount(labels, minlength=classes).tolist() if classes > 1 else [0.0, 1.0]


def home_of(site: Site, path: str, cut: Cut | None) -> SiteLoader:
    """A site with a backbone of its own, since threads would share the server's; loaded here, one after another."""
    backbone = load_backbone(path) if cut is None else load_client_part(path, blocks=cut.blocks)
    own = dataclasses.replace(site, backbone=backbone)
    return lambda _, told: own if told is None else dataclasses.replace(own, max_tokens=told.tokens)


def quietly(work: Callable[[], object]) -> None:
    with suppress(KeyboardInterrupt, ProtocolError):
        work()


@contextmanager
def federation(site: Site, path: str, names: Sequence[str]) -> Iterator[Federation]:
    with LoopThread() as threads, SplitServer(site) as split_server:
        manager = ClientManager(names, IDENTITY, settings="", on_note=lambda _: None)
        sessions = sessions_of(manager, names)
        engine = RemoteEngine(
            manager=manager, bridge=threads, split_server=split_server, deadline_seconds=60, min_clients=len(names)
        )
        fed = Federation(site=site, path=path, engine=engine, sessions=sessions, threads=threads, told=told(site))
        try:
            yield fed
        finally:
            for session in sessions.by_name.values():
                threads.wait(left, sessions, session)
            threads.wait(shutdown_clients, manager, {}, seconds=60)
            for thread in fed.running:
                thread.join(60)


async def left(sessions: Sessions, session: Any) -> None:
    sessions.leave(session, session.streams)


@pytest.fixture
def clients(tiny_of, site_of, spec_of) -> tuple[Site, str, list[Job]]:
    tiny = tiny_of("bert")
    specs = [
        spec_of(name="a-0", labels=2, examples=8, ranks=(1, 4, 2)),
        spec_of(name="b-0", labels=5, examples=5, ranks=(3, 3, 3), pairs=True),
        spec_of(name="c-0", labels=0, examples=9, ranks=(4, 1, 1)),
        spec_of(name="d-0", labels=2, examples=6, ranks=(2, 2, 4)),
    ]
    jobs = [
        Job(client=spec.name, params=tiny.params(spec, seed=i), round=1, options=HARD, cut=CUTS[spec.name])
        for i, spec in enumerate(specs)
    ]
    return site_of(tiny, *specs, max_tokens=1), str(tiny.path), jobs


def scored(jobs: Sequence[Job]) -> list[Job]:
    return [dataclasses.replace(job, options=EvaluateOptions(split="test")) for job in jobs]


def alone(action: str, jobs: Sequence[Job], site: Site) -> list[Update]:
    return [update for job in jobs for update in ACTIONS[action]([job], site)]


def assert_same(found: Sequence[Update], expected: Sequence[Update]) -> None:
    for update, other in zip(found, expected, strict=True):
        assert {**update.metrics, "seconds": 0} == {**other.metrics, "seconds": 0}, update.client
        assert all(torch.equal(update.params[key], other.params[key]) for key in other.params), update.client
        assert update.params.keys() == other.params.keys()
        assert dict(update.crossed) == dict(other.crossed), update.client


@pytest.mark.slow
def test_mixed_cuts_at_their_sites_end_in_the_bits_of_a_simulation(clients) -> None:
    site, path, jobs = clients
    with federation(site, path, list(CUTS)) as fed:
        fed.join_all()
        for action, asked in (("train", jobs), ("evaluate", scored(jobs)), ("train", jobs)):
            assert_same(fed.engine.run(action, asked), alone(action, asked, site))


@pytest.mark.parametrize("what", ["fingerprint fisher", "importance gradient"])
def test_what_a_plan_needs_is_measured_over_streams_as_in_a_simulation(clients, what: str) -> None:
    """In the middle of a pass that measures, another site asks for its job: its part is that of the frozen model."""
    site, path, jobs = clients
    action, options = what.partition(" ")[0], options_of(what)
    asked = [dataclasses.replace(job, round=0, options=options) for job in jobs]
    with federation(site, path, list(CUTS)) as fed:
        fed.join_all()
        assert_same(fed.engine.run(action, asked), alone(action, asked, site))


def test_the_part_that_a_site_must_hold_is_told_of_the_frozen_weights_alone(clients) -> None:
    site, path, jobs = clients
    (name, weight), *_ = site.backbone.model.named_parameters()
    with SplitServer(site) as split_server:
        before = split_server.begin_job(1, "train", jobs[0])[1]
        assert before.part == digest(dict(load_client_part(path, blocks=1).model.named_parameters()))
        other = SplitServer(site)
        found = functional_call(
            Telling(site.backbone.model, lambda: other.begin_job(1, "train", jobs[0])[1]),
            {f"model.{name}": weight + 1},
            (),
        )
        other.__exit__()
        assert found == before


class Telling(torch.nn.Module):
    """A module that calls a function in its forward pass, in which the model has other weights."""

    def __init__(self, model: torch.nn.Module, tell: Callable[[], object]) -> None:
        super().__init__()
        self.model, self._tell = model, tell

    def forward(self) -> object:
        return self._tell()


def test_the_ledger_counts_what_crossed_and_the_rest_of_a_frame_is_what_is_stated(clients) -> None:
    """A frame is 24 bytes, its head and the list of its tensors, both padded to eight, and the payloads."""
    site, path, jobs = clients
    with federation(site, path, list(CUTS)) as fed:
        links = fed.join_all()
        updates = fed.engine.run("train", jobs)
    for update in updates:
        counted: Counter[str] = Counter()
        for request, answer in links[update.client].frames:
            for direction, frame in (("up", request), ("down", answer)):
                if not frame:
                    continue
                head, tensors = decode_frame(frame)
                payloads = read_payloads(tensors)
                for key, message in payloads.items():
                    counted[f"{key.partition('/')[2]} {direction}"] += len(message)
                if head["body"].get("kind") == "cut":
                    size = 24 + int.from_bytes(frame[8:16], "little")
                    listed = 8 + int.from_bytes(frame[size : size + 8], "little") if payloads else 0
                    assert len(frame) == size + listed + sum(map(len, payloads.values()))
        assert counted == {f"{kind} {way}": size for (kind, way), size in update.crossed.items()}


def test_a_question_that_is_sent_again_steps_once(clients) -> None:
    site, path, jobs = clients
    with federation(site, path, ["a-0"]) as fed:
        fed.join("a-0", twice=True)
        assert_same(fed.engine.run("train", jobs[:1]), alone("train", jobs[:1], site))


@pytest.mark.parametrize("dies_at", [1, 4])
def test_a_client_that_dies_in_the_middle_begins_its_job_again(clients, dies_at: int) -> None:
    site, path, jobs = clients
    with federation(site, path, ["b-0"]) as fed:
        fed.join("b-0", dies_at=dies_at)
        back = fed.come_back("b-0")
        assert_same(fed.engine.run("train", jobs[1:2]), alone("train", jobs[1:2], site))
        back.join(60)


def test_a_client_whose_rows_cannot_be_is_refused_and_the_others_go_on(clients) -> None:
    site, path, jobs = clients
    other_data = dataclasses.replace(site, data={**site.data, "a-0": site.data["b-0"]})
    with federation(site, path, ["a-0", "d-0"]) as fed:
        fed.join("a-0", home=home_of(other_data, path, CUTS["a-0"]))
        fed.join("d-0")
        engine = dataclasses.replace(fed.engine, min_clients=1)
        found = engine.run("train", [jobs[0], jobs[3]])
        assert_same(found, alone("train", [jobs[3]], site))


def test_a_job_that_nobody_waits_for_any_more_is_left(clients) -> None:
    site, path, jobs = clients
    let, plain = threading.Event(), home_of(site, path, CUTS["a-0"])

    def slow(cut: Cut | None, told: Any) -> Site:
        assert let.wait(60)
        return plain(cut, told)

    with federation(site, path, ["a-0"]) as fed:
        link = fed.join("a-0", home=slow)
        late = dataclasses.replace(fed.engine, deadline_seconds=0.1)
        with pytest.raises(ProtocolError, match="0 of 1 clients answered train"):
            late.run("train", jobs[:1])
        let.set()
        assert_same(fed.engine.run("train", jobs[:1]), alone("train", jobs[:1], site))
        steps = split_server.TrainingHalf(jobs[0], site)._member.steps
        assert sum(decode_frame(frame)[0]["body"]["kind"] == "cut" for frame, _ in link.frames) == steps + 1
