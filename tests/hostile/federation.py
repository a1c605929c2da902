"""A whole federation in one process: the real `run`, frames, rounds and records, and real workers in threads.

What single sites answer is altered on its way, so a test says in one function what a hostile site sends:

    def lies(head, tensors, action):
        return {**head, "examples": 10**9}, tensors

    found = federate(config, {"movie-2": lies}, least=2)

`action` is that of the job which the site was given last; None in its place never answers, a list sends several.
"""

import concurrent.futures
import contextlib
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest.mock import patch

from atlas_fl.config import Config, parse_config, to_toml
from atlas_fl.data.clients import ClientData
from atlas_fl.data.registry import find_tasks
from atlas_fl.deployment import server
from atlas_fl.deployment.service import ServerOptions, client_manager_of
from atlas_fl.deployment.site import SiteRuntime
from atlas_fl.errors import AtlasError
from atlas_fl.events import Event, Note, OnEvent, ignore
from atlas_fl.experiment.run import RunResult, run_config
from atlas_fl.models.loading import load_backbone
from atlas_fl.models.vision_loading import load_vision
from atlas_fl.params import Params, digest
from atlas_fl.partial_sharing import is_fully_shared
from atlas_fl.runtime.coordinator.coordinator import ClientManager
from atlas_fl.runtime.coordinator.site_worker import SiteClient
from atlas_fl.runtime.protocol.client_metadata import metadata_of
from atlas_fl.runtime.transport.event_loop import LoopThread
from atlas_fl.runtime.transport.frames import Message
from atlas_fl.runtime.transport.sessions import NO_TENSORS, Sessions
from atlas_fl.setup.assembly import own_client
from atlas_fl.setup.options import keeps_models
from tests.runtime.in_process import AcceptAll, InProcess

Change: TypeAlias = Callable[[dict[str, Any], dict[str, Any], str], Message | list[Message] | None]
"""(head, tensors, action) -> what is sent instead of this answer: None for nothing ever, a list for several."""

SITES = ("movie-0", "movie-1", "movie-2")
DEVICE = "cpu_2gb"
SECONDS = 60
"""Longest wait for a thread; only a fault waits for so long."""


@dataclass(kw_only=True, eq=False)
class Outcome:
    """What a federation came to."""

    folder: Path
    result: RunResult | None = None
    error: AtlasError | None = None
    """What ended the run, where something did: the one line that a user sees."""
    models: dict[str, Params] = field(default_factory=dict)
    """What each site was given at the end, by the sites that got so far."""
    refused: dict[str, str] = field(default_factory=dict)
    """By site, the line that ended it."""
    notes: list[str] = field(default_factory=list)
    """All that the server said."""
    faults: list[str] = field(default_factory=list)
    """Tracebacks of anything that is no error of ours, at the server or at a site."""

    def noted(self, text: str) -> list[str]:
        """The notes that hold this."""
        return [note for note in self.notes if text in note]


class ServerGoneError(Exception):
    """The server has ended while a site waited for it."""


@dataclass(kw_only=True, eq=False)
class Altering:
    """A site's end of the path: what it answers is altered before it is a frame."""

    inner: InProcess
    change: Change | None
    over: threading.Event
    action: str = ""

    def exchange(self, head: Mapping[str, Any], tensors: Params = NO_TENSORS) -> Message:
        sent = (dict(head), dict(tensors)) if self.change is None else self._altered(head, tensors)
        if sent is None:
            self.over.wait(SECONDS)
            raise ServerGoneError
        for message in sent if isinstance(sent, list) else [sent]:
            if self.over.is_set():
                raise ServerGoneError
            try:
                found = self.inner.exchange(*message)
            except concurrent.futures.CancelledError:
                raise ServerGoneError from None
            self.action = str(found[0].get("action", self.action))
        return found

    def _altered(self, head: Mapping[str, Any], tensors: Params) -> Message | list[Message] | None:
        assert self.change is not None
        return self.change(dict(head), dict(tensors), self.action)


@dataclass(eq=False)
class Ending:
    """How a site ends, whatever it ends with."""

    name: str
    found: Outcome

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, AtlasError):
            self.found.refused[self.name] = str(error)
        elif error is not None and not isinstance(error, ServerGoneError):
            lines = traceback.format_exception(kind, error, trace)
            self.found.faults.append(f"{self.name}: {''.join(lines)}")
        return True


@dataclass(kw_only=True, eq=False)
class Federation:
    """The sites of one run, in threads, and the place where its server waits for them."""

    config: Config
    changes: Mapping[str, Change]
    found: Outcome
    census: Callable[[str, dict[str, Any]], dict[str, Any]]
    lives: int = 1
    over: threading.Event = field(default_factory=threading.Event)
    running: list[threading.Thread] = field(default_factory=list)

    @contextmanager
    def listening(self, config: Config, _service: ServerOptions, _certs: Any, **how: Any) -> Iterator[Any]:
        """In the place of `deployment.service.listening`: the same client manager, and frames that cross no network."""
        with LoopThread(on_event=how["on_event"]) as threads:
            threads.loop.set_exception_handler(lambda _, context: self.found.faults.append(str(context)))
            manager = client_manager_of(config, how["listed"], threads, late=how["late"])
            sessions = Sessions(
                answer=manager.answer,
                admit=manager.handshake,
                listed=lambda: dict.fromkeys(how["listed"]),
                on_presence=manager.on_presence,
                on_refused=manager.on_refused,
            )
            for name in how["listed"]:
                thread = threading.Thread(target=self._site, args=(name, manager, sessions, threads), daemon=True)
                self.running.append(thread)
                thread.start()
            try:
                yield manager, threads, "this process"
            finally:
                self.over.set()
        for thread in self.running:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a site does not end"

    def _site(self, name: str, manager: ClientManager, sessions: Sessions, threads: LoopThread) -> None:
        with contextlib.suppress(ServerGoneError, RuntimeError):  # the loop may be closed by then
            for life in range(self.lives if name in self.changes else 1):
                self.found.refused.pop(name, None)
                self._live(name, manager, sessions, threads, session=f"{name} {life}")
                if self.over.is_set() or name not in self.found.refused:
                    return

    def _live(
        self, name: str, manager: ClientManager, sessions: Sessions, threads: LoopThread, *, session: str
    ) -> None:
        client, home = home_of_site(self.config, name)
        identity = vars(manager.identity)
        link = InProcess(sessions, threads.loop, name=name, hello={**identity, "session": session})
        told = self.census(name, metadata_of(client, home.tokens))
        worker = SiteClient(
            name=name,
            load_site=home,
            link=Altering(inner=link, change=self.changes.get(name), over=self.over),
            registration={**identity, **told, "device": DEVICE},
            on_event=ignore,
            receiver=home.receiver,
            on_final_model=lambda *_: None,
            policy=AcceptAll(),
        )
        with Ending(name, self.found):
            self.found.models[name] = worker.run()
        threads.loop.call_soon_threadsafe(sessions.leave, link._session, link._session.streams)


def _model_of(config: Config) -> str:
    if any(task.images for task in find_tasks(config.data.tasks, config.data.task)):
        return digest(
            dict(load_vision(config.model.model, image_size=config.images.image_size).backbone.named_parameters())
        )
    return _model_at(config.model.model)


@cache
def _model_at(path: str) -> str:
    return digest(dict(load_backbone(path).model.named_parameters()))


ANY = "any"
"""The run of a site that keeps nothing of one."""


@cache
def _secrets() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="atlas-secrets-")


def secrets_folder() -> Path:
    """Where the sites that keep nothing of a run have their secrets, as long as this process lives."""
    return Path(_secrets().name)


def keeps_files(config: Config) -> bool:
    """Whether sites keep files of one run: what is not shared, and the secret where there is noise."""
    return not is_fully_shared(config.mixing.share) or keeps_models(config) or config.split.wire_noise > 0


def home_of_site(config: Config, name: str) -> tuple[ClientData, SiteRuntime]:
    """Data and model of a site, loaded once, since whatever it remembers is forgotten when it registers."""
    own = config.run if keeps_files(config) else replace(config.run, name=ANY, runs_dir=ANY)
    return _home_at(to_toml(replace(config, run=own)), name)


@cache
def _home_at(settings: str, name: str) -> tuple[ClientData, SiteRuntime]:
    config = parse_config(settings, origin="a test")
    task, _, part = name.partition("-")
    runs = Path(config.run.runs_dir)
    secrets = secrets_folder() if config.run.name == ANY else runs
    private, secret = runs / f"{name}-private", secrets / f"{name}-secret"
    client = own_client(config, name, task=task, part=int(part), secret=secret)
    return client, SiteRuntime(config, client, model=_model_of(config), private=private, secret=secret)


def federate(
    config: Config,
    changes: Mapping[str, Change] | None = None,
    *,
    names: Sequence[str] = SITES,
    least: int = 0,
    deadline: float = SECONDS,
    on_event: OnEvent = ignore,
    census: Callable[[str, dict[str, Any]], dict[str, Any]] = lambda _, told: told,
    resume: bool = False,
    lives: int = 1,
    ca: bytes = b"",
    late: bool = True,
) -> Outcome:
    """What this config comes to across these sites, where these changes are made to what some of them answer.

    `metadata` alters what a site reports of its data. A site of the `changes` that was refused comes back until it has
    had so many `lives`. Nothing but an `AtlasError` may end the run; whatever else went wrong
    anywhere is among the `faults`.
    """
    found = Outcome(folder=Path(config.run.runs_dir) / str(config.run.name))
    for name in names:
        home_of_site(config, name)  # loaded here, one after another
    federation = Federation(config=config, changes=changes or {}, found=found, census=census, lives=lives)

    def listen(event: Event) -> None:
        if isinstance(event, Note):
            found.notes.append(event.text)
        on_event(event)

    service = ServerOptions(certs=Path("nowhere"), min_clients=least, wait=SECONDS, deadline=deadline, late=late)
    places = {
        "listening": federation.listening,
        "open_certs": lambda _: SimpleNamespace(ca=ca),
        "listed_clients": lambda _: tuple(names),
        "FAREWELL_SECONDS": min(30.0, deadline),
    }
    with patch.multiple(server, **places):
        try:
            backend = server.remote_backend(service)
            found.result = run_config(config, on_event=listen, backend=backend, resume=resume)
        except AtlasError as error:
            found.error = error
    return found
