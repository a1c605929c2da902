"""Progress on the terminal while a run goes on: bars for phase and rounds, a line for each round; labels of runs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from atlas_fl.config import differences, load_config, value_of
from atlas_fl.config.values import to_words
from atlas_fl.errors import replace_unprintable
from atlas_fl.events import Event, Note, OnEvent, PhaseStarted, Progress, RoundFinished
from atlas_fl.report.format import human_bytes, number, seconds

UNTOLD = frozenset({"preset"})
"""Settings that say nothing beside the others that they set."""


def labels_of(named: Sequence[Path]) -> list[str]:
    """The settings that these runs differ in; their paths where one is no run, or two differ in nothing."""
    paths = [str(path) for path in named]
    if len(named) < 2 or not all((path / "config.toml").is_file() for path in named):
        return paths
    configs = [load_config(path / "config.toml", within=path) for path in named]
    differ = dict.fromkeys(name for config in configs for name in differences(configs[0], config) if name not in UNTOLD)
    labels = [
        ", ".join(f"{name} {' '.join(to_words(value_of(config, name)))}" for name in differ) for config in configs
    ]
    return labels if len(set(labels)) == len(labels) else paths


def console() -> Console:
    """Standard output, without guesses about what should have a colour."""
    return Console(highlight=False)


def show(items: Iterable[RenderableType]) -> None:
    """Print texts as they are, without wrapping them, and tables as wide as the terminal."""
    screen = console()
    for item in items:
        if isinstance(item, str):
            screen.print(item, markup=False, soft_wrap=True)
        else:
            screen.print(item, "")


@contextmanager
def going_on(how: str) -> Iterator[None]:
    """Message of Ctrl-C inside of it, and of a full disk: the run goes on where it was, and how."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"a run goes on where it was with {how}") from None
    except OSError as error:
        error.add_note(how)
        raise


@contextmanager
def show_progress(*, notes: bool = True) -> Iterator[OnEvent]:
    """A callback that shows events as they come: bars on a terminal, plain lines everywhere else."""
    screen = console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bars:
        phases: dict[str, TaskID] = {}
        rounds: list[TaskID] = []
        taken: list[float] = []
        told: set[str] = set()

        def show(event: Event) -> None:
            if isinstance(event, RoundFinished):
                if not rounds:
                    rounds.append(bars.add_task("rounds"))
                bars.update(rounds[0], total=event.rounds, completed=event.round)
                if event.round == event.rounds:
                    bars.remove_task(rounds.pop())
            if isinstance(event, Progress):
                _advance(bars, phases, event)
            elif (line := event_line(event)) is not None and (notes or not isinstance(event, Note)):
                if isinstance(event, Note):
                    if line in told:  # the runs of a comparison have the same data
                        return
                    told.add(line)
                if isinstance(event, RoundFinished) and (left := event.rounds - event.round):
                    taken.append(event.seconds)
                    line += f", about {seconds(fmean(taken) * left)} of rounds left"
                bars.console.print(line, markup=False, soft_wrap=True)

        yield show


def event_line(event: Event) -> str | None:
    """The line that an event leaves behind; None for one that only moves a bar."""
    if isinstance(event, PhaseStarted):
        # a round has a line of its own when it is over
        return None if event.name.startswith("round ") else f"{event.name} ..."
    if isinstance(event, Note):
        return f"note: {replace_unprintable(event.text)}"
    if isinstance(event, RoundFinished):
        width = len(str(event.rounds))
        cost = f"{seconds(event.seconds)}, {human_bytes(event.bytes)}"
        return f"round {event.round:>{width}}/{event.rounds}  {_scores(event.scores)}{event.learned}  {cost}"
    return None


def _scores(scores: Mapping[str, float]) -> str:
    if not scores:
        return ""
    worst = min(scores, key=lambda client: scores[client])
    return f"validation {number(fmean(scores.values()), 3)} (worst {worst} {number(scores[worst], 3)})  "


def _advance(bars: Bars, phases: dict[str, TaskID], event: Progress) -> None:
    if event.phase not in phases:
        for task in phases.values():
            bars.remove_task(task)
        phases.clear()
        phases[event.phase] = bars.add_task(event.phase, total=event.total)
    bars.update(phases[event.phase], completed=event.done)
