"""Weights & Biases logging beside a run, from a thread that no round waits for.

Whatever fails there ends the logging, with a note, and never the run; all that is logged is in the run's folder anyway.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from atlas_fl.config import Config, config_hash, settings, value_of
from atlas_fl.config.values import invalid_value
from atlas_fl.errors import ConfigError
from atlas_fl.events import Event, Note, OnEvent, PhaseStarted, RoundFinished

ROUND = "round "
"""How the phase of a round is called."""
NOT_IN_NAMES = frozenset("/\\#?%:")
"""What W&B takes in no name of a project."""


def check_installed() -> None:
    """Nothing where wandb is there; else raises `ConfigError`."""
    _wandb()


def _wandb() -> Any:
    try:
        import wandb
    except ImportError:
        raise ConfigError("--wandb needs the package wandb; pip install 'atlas-fl[wandb]', or leave it out") from None
    return wandb


def numbers_of(event: RoundFinished) -> dict[str, float]:
    """The round's numbers by name: its own, every number of its rows, and the mean of each over the clients.

    A row's are `split/metric/client`, and its mean is `split/metric`; of other rows `events/event` counts.
    """
    numbers: dict[str, float] = {"loss": event.loss, "seconds": event.seconds, "bytes": event.bytes}
    each: dict[str, list[float]] = {}
    for row in event.rows:
        if "split" not in row:
            name = f"events/{row['event']}"
            numbers[name] = numbers.get(name, 0) + 1
            continue
        for key, value in row.items():
            if key != "round" and isinstance(value, int | float):
                numbers[f"{row['split']}/{key}/{row['client']}"] = value
                each.setdefault(f"{row['split']}/{key}", []).append(value)
    return numbers | {name: fmean(values) for name, values in each.items()}


@dataclass(kw_only=True)
class Tracker:
    """Logs a run to one project; used by `track_run`."""

    project: str
    config: Config
    folder: Path
    thread: ThreadPoolExecutor
    on_event: OnEvent
    begun: bool = False
    ended: bool = False
    _run: Any = None
    _asked: list[Future[None]] = field(default_factory=list)

    def tell(self, event: Event) -> None:
        """Pass the event on, and log what it brings."""
        self.on_event(event)
        if isinstance(event, PhaseStarted) and event.name.startswith(ROUND) and not self.begun:
            self.begun = True
            self._ask(self._begin)
        if isinstance(event, RoundFinished):
            self._ask(lambda: self._run.log(numbers_of(event), step=event.round))
        self._look(wait=False)

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Log what the run came to."""
        if self.begun:
            self._ask(lambda: self._run.summary.update({"summary": summary}))

    def close(self, *, exit_code: int) -> None:
        """Wait until everything is handed over."""
        if self.begun:
            self._ask(lambda: self._run.finish(exit_code=exit_code))
            self._look(wait=True)

    def _begin(self) -> None:
        wandb, before = _wandb(), sorted((self.folder / "wandb").glob("*run-*-*"))
        self._run = wandb.init(
            project=self.project,
            name=self.folder.name,
            # a run that goes on is the same run there too: its folders end with its id
            id=before[-1].name.rpartition("-")[2] if before else None,
            resume="allow" if before else None,
            config={**{name: value_of(self.config, name) for name in settings()}, "hash": config_hash(self.config)},
            dir=self.folder,
            settings=wandb.Settings(console="off", quiet=True, disable_git=True, disable_code=True),
        )

    def _ask(self, work: Callable[[], None]) -> None:
        if not self.ended:
            self._asked.append(self.thread.submit(work))

    def _look(self, *, wait: bool) -> None:
        """Say once what went wrong, and ask for nothing more; a future holds any error, and raises none."""
        while self._asked and not self.ended and (wait or self._asked[0].done()):
            if (error := self._asked.pop(0).exception()) is not None:
                self.ended = True
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                self.on_event(Note(f"nothing more is logged to W&B ({reason}); the run goes on and keeps it all"))


@contextmanager
def track_run(project: str, config: Config, folder: Path, on_event: OnEvent) -> Iterator[Tracker]:
    """A tracker of the run in this folder, as long as this lasts.

    Raises:
        ConfigError: wandb is not installed, or that is no name of a project; nothing has been done then.
    """
    if not project or NOT_IN_NAMES & set(project):
        raise invalid_value("--wandb", project, f"the name of a project, without {' '.join(sorted(NOT_IN_NAMES))}")
    check_installed()
    with ThreadPoolExecutor(1, thread_name_prefix="wandb") as thread:
        tracker = Tracker(project=project, config=config, folder=folder, thread=thread, on_event=on_event)
        code = 1
        try:
            yield tracker
            code = 0
        finally:
            tracker.close(exit_code=code)
