"""A run that is logged to experiment trackers too, from threads that no round waits for; what a tracker must have.

Every tracker is given the same numbers under the same names. Whatever fails there ends the logging to that tracker,
with a note, and never the run; all that is logged is in the run's folder anyway.
"""

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from atlas_fl.config import Config, config_hash, settings, value_of
from atlas_fl.errors import ConfigError, one_line
from atlas_fl.events import Event, Note, OnEvent, PhaseStarted, RoundFinished
from atlas_fl.frozen import Frozen
from atlas_fl.storage.extras import install_command

ROUND = "round "
"""Prefix of the phase of a round."""
PATIENCE = 60.0
"""Seconds that the end of a run waits for all trackers together."""
LONGEST = 300
"""Characters of an error that is told."""


class TrackedRun(Frozen):
    """Run that a tracker begins, or goes on with."""

    config: Config
    folder: Path
    first_round: int
    """The round that comes next; above 1 for a run that goes on."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting, and the hash of them all."""
        return {**{name: value_of(self.config, name) for name in settings()}, "hash": config_hash(self.config)}


class Tracker(ABC):
    """An experiment tracker: what it is given of a run, in this order, from one thread."""

    title: str
    """Name in a note."""

    @abstractmethod
    def check(self) -> None:
        """Check that a run can be logged.

        Raises:
            ConfigError: its package is not installed, or the place to log to has a name that it does not take.
        """

    @abstractmethod
    def begin(self, run: TrackedRun) -> None:
        """Begin the run there, or go on with the one that was begun."""

    @abstractmethod
    def log(self, numbers: Mapping[str, float], *, round: int) -> None:
        """Log the numbers of a round."""

    @abstractmethod
    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Log what a run that is complete came to."""

    @abstractmethod
    def finish(self, *, is_failed: bool) -> None:
        """End the session of the run there, and wait until everything is handed over."""


TRACKERS: dict[str, Callable[[str], Tracker]] = {}
"""By name of `--tracker name=place`, what makes a tracker of a place to log to; plug-ins register them."""


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


def summary_numbers(summary: Mapping[str, Any], *, name: str = "summary") -> dict[str, float]:
    """The numbers of a summary over all clients, named by their path: `summary/overall/final/test/accuracy`."""
    numbers: dict[str, float] = {}
    for key, value in summary.items() if name != "summary" else [("overall", summary.get("overall", {}))]:
        if isinstance(value, Mapping):
            numbers |= summary_numbers(value, name=f"{name}/{key}")
        elif isinstance(value, int | float):
            numbers[f"{name}/{key}"] = value
    return numbers


@contextmanager
def importing(title: str, *, package: str) -> Iterator[None]:
    """Tell in one line that a tracker's package is missing, or broken, while this imports it and looks it through.

    Raises:
        ConfigError: it is; what it raised stands in the line, whatever a broken installation comes up with.
    """
    flag = f"--tracker {package}"
    try:
        yield
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, OSError) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package
        if is_missing or isinstance(error, AttributeError):  # of a folder that is left of it, an empty module is made
            problem, remedy = f"{flag} needs {title}'s package", install_command(package)
        else:
            problem, remedy = f"{flag}: {package} cannot be loaded ({in_words(error)})", "install it again"
        raise ConfigError(f"{problem}; {remedy}, or leave {flag} out") from None


def in_words(error: BaseException) -> str:
    """An error on one line of bounded length, also one that has no text or fails to give it."""
    return one_line(" ".join(traceback.format_exception_only(error)[-1].split()), limit=LONGEST)


class RunLogging:
    """The logging of a run to its trackers, to each from a thread of its own; used by `track_run`."""

    def __init__(self, trackers: Sequence[Tracker], config: Config, folder: Path, on_event: OnEvent) -> None:
        self.config, self.folder, self.on_event = config, folder, on_event
        self._is_begun = False
        self._open: list[tuple[Tracker, ThreadPoolExecutor, list[Future[None]]]] = [
            (one, ThreadPoolExecutor(1, thread_name_prefix=one.title), []) for one in trackers
        ]
        """Trackers that have not failed, and what each is to do yet or has just done."""

    def tell(self, event: Event) -> None:
        """Pass the event on, and log what it brings."""
        self.on_event(event)
        if isinstance(event, PhaseStarted) and event.name.startswith(ROUND) and not self._is_begun:
            self._is_begun = True
            run = TrackedRun(config=self.config, folder=self.folder, first_round=int(event.name.removeprefix(ROUND)))
            self._ask(lambda tracker: tracker.begin(run))
        if isinstance(event, RoundFinished):
            self._ask(lambda tracker: tracker.log(numbers_of(event), round=event.round))
        self._look()

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Log what the run came to; nothing of a run that was complete already."""
        if self._is_begun:
            self._ask(lambda tracker: tracker.log_summary(summary))

    def finish(self, *, is_failed: bool) -> None:
        """End the run at all trackers, after what they were asked for before, and wait for them a while."""
        if self._is_begun:
            self._ask(lambda tracker: tracker.finish(is_failed=is_failed))
        self._look(until=time.monotonic() + PATIENCE)
        for _, thread, _ in self._open:
            thread.shutdown(wait=False)

    def _ask(self, work: Callable[[Tracker], None]) -> None:
        for tracker, thread, pending in self._open:
            pending.append(thread.submit(_work_after, pending[-1] if pending else None, work, tracker))

    def _look(self, *, until: float | None = None) -> None:
        """Say once what went wrong, and ask for nothing more; wait for what was asked until that time of the clock."""
        for entry in list(self._open):
            tracker, thread, asked = entry
            while asked and (until is not None or asked[0].done()):
                try:
                    error = asked[0].exception(timeout=max(0.0, (until or 0.0) - time.monotonic()))
                    reason = "" if error is None else in_words(error)  # a future holds any error, and raises none
                except TimeoutError:
                    reason = f"it has not taken all within {PATIENCE:.0f} s"
                if reason:
                    self._open.remove(entry)
                    thread.shutdown(wait=False, cancel_futures=True)
                    told = f"nothing more is logged to {tracker.title} ({reason}); the run goes on and keeps it all"
                    self.on_event(Note(told))
                    break
                del asked[0]


def _work_after(previous: Future[None] | None, work: Callable[[Tracker], None], tracker: Tracker) -> None:
    if previous is not None:
        previous.result()  # what waits behind a failure would fail too, and may take its time for it
    work(tracker)


@contextmanager
def track_run(trackers: Sequence[Tracker], config: Config, folder: Path, on_event: OnEvent) -> Iterator[RunLogging]:
    """Log the run in this folder to these trackers, as long as this lasts.

    Raises:
        ConfigError: a tracker is not installed, or does not take the name of the place; nothing has been done then.
    """
    for tracker in trackers:
        tracker.check()
    logging = RunLogging(trackers, config, folder, on_event)
    is_failed = True
    try:
        yield logging
        is_failed = False
    finally:
        logging.finish(is_failed=is_failed)
