"""A real federation in one process whose messages are kept, and servers that say the same to a site but for one lie.

The sites run `deployment.site.join_federation` as `atlas join` does; only the link is another one. What an honest
server said to one of them is said again, message by message, to a site that begins anew, with one message altered on
its way:

    found = lie_to(spoken, lambda head, tensors: {**head, "round": 99} if head["action"] == "train" else None, ...)
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeAlias
from unittest.mock import patch

from atlas_fl.config import Config, config_hash, parse_config
from atlas_fl.data.clients import ClientData
from atlas_fl.deployment import site
from atlas_fl.deployment.site import SiteOptions, SiteResult, join_federation
from atlas_fl.errors import AtlasError
from atlas_fl.events import Event, Note
from atlas_fl.params import Params
from atlas_fl.runtime.coordinator.coordinator import ClientManager
from atlas_fl.runtime.coordinator.site_worker import SiteClient
from atlas_fl.runtime.transport.certificates import make_certs
from atlas_fl.runtime.transport.event_loop import LoopThread
from atlas_fl.runtime.transport.frames import Message, decode_frame, encode_frame
from atlas_fl.runtime.transport.sessions import NO_TENSORS, Sessions
from tests.hostile import federation as in_process
from tests.hostile.federation import DEVICE, Outcome, ServerGoneError
from tests.runtime.in_process import InProcess

Lie: TypeAlias = Callable[[dict[str, Any], dict[str, Any]], Message | None]
"""(head, tensors) of a server's message -> what it says instead; None for the same."""


@dataclass(kw_only=True)
class Spoken:
    """One site's conversation with its server."""

    welcome: dict[str, Any]
    hello: dict[str, Any]
    turns: list[tuple[Message, Message]] = field(default_factory=list)
    """(what the site said, what the server answered)."""
    model: str = ""
    """The folder of its model, which each site names for itself."""
    workers: list[SiteClient | None] = field(default_factory=list)
    """The site as it was when it had each answer; None in the middle of a job."""


@dataclass(kw_only=True, eq=False)
class OfflineLink:
    """A link of `deployment.site` without a network."""

    spoken: Spoken
    sent_bytes: int = 0
    received_bytes: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    @property
    def welcome(self) -> dict[str, Any]:
        return self.spoken.welcome


@dataclass(kw_only=True, eq=False)
class Kept(OfflineLink):
    """A link to a server in this process; all that is said is kept."""

    inner: InProcess
    leave: Callable[[], None]
    """Tells the server that nobody will ask again."""

    def __exit__(self, *_: object) -> None:
        self.leave()

    worker: SiteClient | None = None

    def exchange(self, head: Mapping[str, Any], tensors: Params = NO_TENSORS) -> Message:
        answer = self.inner.exchange(head, tensors)
        self.spoken.turns.append((_framed(head, tensors), answer))
        is_between_jobs = self.worker is not None and head["kind"] in ("register", "result")
        self.spoken.workers.append(_copy(self.worker) if is_between_jobs and answer[0]["kind"] != "cut" else None)
        return answer


class Copied(SiteClient):
    """A site whose link knows it."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        if isinstance(self.link, Kept):
            self.link.worker = self


def _copy(worker: Any) -> SiteClient:
    """The site as it is now; data and model are shared."""
    shared = [worker.load_site, worker.load_site.known, worker.link, worker.on_event, worker.on_final_model]
    shared += [worker.sums.identity] if worker.sums is not None else []
    shared += [worker.receiver._cache._lock]  # locks have no copies
    return copy.deepcopy(worker, {id(one): one for one in shared})


@dataclass(kw_only=True, eq=False)
class Recording(in_process.Federation):
    """The sites of one run, each a real `join`, and what they said."""

    folder: Path
    words: Mapping[str, Any]
    spoken: dict[str, Spoken] = field(default_factory=dict)
    joined: dict[str, SiteResult] = field(default_factory=dict)
    told: dict[str, list[str]] = field(default_factory=dict)
    """What each site said to the person there."""
    whole: dict[str, Params] = field(default_factory=dict)
    """The model of each site at the end, as it was written."""

    def _site(self, name: str, _: ClientManager, sessions: Sessions, threads: LoopThread) -> None:
        def link(_: SiteOptions, certs: Any, said: Mapping[str, Any], *__: Any) -> Kept:
            hello = {**said}
            inner = InProcess(sessions, threads.loop, name=certs.name, hello=hello)
            self.spoken[certs.name] = Spoken(welcome=dict(inner.welcome), hello=hello, model=self.config.model.model)

            def leave() -> None:
                with contextlib.suppress(RuntimeError):  # the loop may be closed by then
                    threads.loop.call_soon_threadsafe(sessions.leave, inner._session, inner._session.streams)

            return Kept(inner=inner, spoken=self.spoken[certs.name], leave=leave)

        with in_process.Ending(name, self.found), linked(link):
            self.told[name] = []
            joining = joining_of(self.folder, name, model=self.config.model.model, **self.words)
            self.joined[name] = join_federation(joining, on_event=lambda event: _note(event, self.told[name]))


_LINKS: dict[int, Any] = {}
"""By thread, the link that its `join` is given."""


@contextmanager
def linked(link: Any) -> Any:
    _LINKS[threading.get_ident()] = link
    try:
        yield
    finally:
        del _LINKS[threading.get_ident()]


@contextmanager
def our_links() -> Any:
    """`join` takes the link of its thread in the place of one over a network."""
    with (
        patch("atlas_fl.deployment.site._link", lambda *own: _LINKS[threading.get_ident()](*own)),
        patch("atlas_fl.deployment.site.SiteClient", Copied),
    ):
        yield


def _note(event: Event, told: list[str]) -> None:
    if isinstance(event, Note):
        told.append(event.text)


def _framed(head: Mapping[str, Any], tensors: Params) -> Message:
    """The message as it comes out of a frame."""
    return decode_frame(encode_frame(head, tensors))


def joining_of(folder: Path, name: str, **words: Any) -> SiteOptions:
    """How a site joins; its certificates lie under the folder, and its model is written there."""
    task, _, part = name.partition("-")
    own: dict[str, Any] = {"task": task, "part": int(part), "device": DEVICE, "to": str(folder / f"{name}-adapter")}
    return SiteOptions(**{"address": "in:1", "certs": folder / "certs" / name, **own, **words})


def record(
    config: Config, folder: Path, names: Sequence[str], *, how: Mapping[str, Any] | None = None, **words: Any
) -> Recording:
    """A run of these settings across these sites, which join with these words; `how` is for `federate`."""
    found = Outcome(folder=Path(config.run.runs_dir) / str(config.run.name))
    make_certs(folder / "certs", servers=["localhost"], clients=list(names))
    recording = Recording(
        config=config, changes={}, found=found, census=lambda _, told: told, folder=folder, words=words
    )

    def exported(home: Any, config: Config, client: ClientData, model: Params, to: Path, **words: Any) -> None:
        recording.whole[client.name] = model
        export(home, config, client, model, to, **words)

    export, places = site.export_own_model, patch.object(site, "export_own_model", exported)
    nowhere = patch.object(in_process, "home_of_site", lambda *_: None)  # each site loads its own
    with patch.object(in_process, "Federation", lambda **_: recording), our_links(), places, nowhere:
        ca = (folder / "certs" / names[0] / "ca.pem").read_bytes()
        given = {"ca": ca, "late": not config.needs_sums, **(how or {})}
        outcome = in_process.federate(config, names=names, **given)
    recording.found.error = recording.found.error or outcome.error
    recording.found.notes += outcome.notes
    return recording


@dataclass(kw_only=True, eq=False)
class Lying(OfflineLink):
    """A link to a server that says what an honest one said, until its lie."""

    lie: Lie
    start: int = -1
    """The turn after which the site speaks; -1 for one that begins anew."""
    place: int | None = None
    """The turn of the first lie, where it is known."""
    told: Message | None = None
    """The first lie, where it is known."""
    sent: list[Message] = field(default_factory=list)
    lied: int | None = None
    """How much the site had said when it was first lied to."""

    def exchange(self, head: Mapping[str, Any], tensors: Params = NO_TENSORS) -> Message:
        self.sent.append(_framed(head, tensors))
        return self.answer(str(head["kind"]))

    def answer(self, kind: str = "") -> Message:
        """What the server says now; after a lie the same one again, whatever the site says."""
        turn = self.start + len(self.sent)
        if self.lied is not None:
            turn = self.start + self.lied
        if turn >= len(self.spoken.turns):
            raise ServerGoneError
        said, answer = self.spoken.turns[turn]
        assert kind in ("", said[0]["kind"]) or self.lied is not None
        if self.lied is None and turn == self.place:
            told = self.told
        elif self.lied is None and self.place is not None:
            told = None
        else:
            told = self.lie(dict(answer[0]), dict(answer[1]))
        if told is not None and self.lied is None:
            self.lied = len(self.sent)
        return _framed(*(told or answer))


@dataclass(kw_only=True)
class Ended:
    """How a site ended that was lied to."""

    error: str
    """The line that its user sees; empty where it completed."""
    link: Lying
    told: list[str]
    joined: SiteResult | None = None

    @property
    def said_after(self) -> list[Message]:
        """What the site sent after the first lie."""
        assert self.link.lied is not None, "nobody lied"
        return self.link.sent[self.link.lied :]


def lie_to(spoken: Spoken, lie: Lie, folder: Path, name: str, **words: Any) -> Ended:
    """How a site of this name ends whose server says this; anything but an error of ours goes through.

    It has the secret of the site that was recorded, so that honest answers fit what it asks.
    """
    words = {"secret": words["certs"].parents[1] / f"{name}-secret", "model": spoken.model, **words}
    link, told = Lying(spoken=spoken, lie=lie), list[str]()
    joined, error = None, ""
    with our_links(), linked(lambda *_: link):
        try:
            joined = join_federation(joining_of(folder, name, **words), on_event=lambda event: _note(event, told))
        except AtlasError as found:
            error = str(found)
    return Ended(error=error, link=link, told=told, joined=joined)


def branch(spoken: Spoken, lie: Lie) -> Ended:
    """How the site of a recording ends where its server, in the middle of it, says this instead of the truth.

    The site goes on from the last job that it was given before that, as it was then.
    """
    tried = ((place, lie(dict(head), dict(tensors))) for place, (_, (head, tensors)) in enumerate(spoken.turns))
    place, told = next((place, told) for place, told in tried if told is not None)
    start = max(turn for turn in range(place + 1) if spoken.workers[turn] is not None)
    worker = _copy(spoken.workers[start])
    link = Lying(spoken=spoken, lie=lie, start=start, place=place, told=told)
    notes, given = list[str](), list[Params]()
    worker.link = link
    worker.on_event = lambda event: _note(event, notes)
    worker.on_final_model = lambda model, _: given.append(model)
    error = ""
    try:
        worker.work(*link.answer())
    except AtlasError as found:
        error = str(found)
    assert not given, "a model was written"
    return Ended(error=error, link=link, told=notes)


def welcomed(spoken: Spoken, change: Callable[[Config], str]) -> Spoken:
    """The same conversation, begun with these settings in the place of the honest ones and with their own hash."""
    config = parse_config(spoken.welcome["settings"], origin="a test")
    text = change(config)
    try:
        own = config_hash(parse_config(text, origin="a test"))
    except AtlasError:
        own = "0" * 16
    return replace(spoken, welcome={**spoken.welcome, "settings": text, "config": own})
