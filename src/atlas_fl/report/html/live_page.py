"""The page of a run while it goes on: how far it is, what it does, how long it will take, and who is in trouble.

It reads what the run has written and nothing else: the log for the time, the rows of the metrics for scores. `live.js`
looks for news.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias
from urllib.parse import quote

from atlas_fl.errors import CheckpointError
from atlas_fl.report.format import isolate
from atlas_fl.report.html.elements import Block, Fact, Facts, Page, Section, Text
from atlas_fl.report.html.run_page import run_page
from atlas_fl.report.table import Table, count, duration, plain
from atlas_fl.storage.digests import read_checked_rows
from atlas_fl.storage.folder_access import MOST_LOG_BYTES, read_ends
from atlas_fl.storage.run_folder import PLANNED_RUNS, RunFolder, is_readable_file

RECENT = 3
"""Rounds whose mean time the rounds to come are expected to take."""
FALL = 0.05
"""Fall of a client's validation score below its best from which the page warns."""
SILENT = 600
"""Seconds without a line in the log after which the page doubts that the run goes on."""
_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ) [A-Z]+ (.*)")
_DONE = re.compile(r"round ([0-9]{1,7}) of ([1-9][0-9]{0,6}): ")
_BEGUN = re.compile(r"round ([0-9]{1,7})")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run, by its log."""

    doing: str
    """The last phase in the log."""
    done: int
    """Rounds that are complete."""
    rounds: int | None
    """Rounds of the whole run; None before the first is complete."""
    seconds_left: float | None
    """Expected time of the rounds to come: each the mean of the last ones; None before there is one."""
    silent: float
    """Seconds since it said anything."""
    seconds: float
    """From its first word to its last."""
    is_over: bool
    """True if a summary is written."""


def read_progress(folder: RunFolder, *, now: datetime) -> Progress:
    """Progress of the run in this folder; nothing is done if there is no log. Raises OSError if it cannot be read.

    Of a long log its first line and its last `MOST_LOG_BYTES` are read.
    """
    first, lines = _log_lines(folder.log) if folder.log.exists() else (None, [])
    done = [(when, int(m[1]), int(m[2])) for when, words in lines if (m := _DONE.match(words))]
    begun = [when for when, words in lines if (m := _BEGUN.fullmatch(words)) and (not done or int(m[1]) <= done[-1][1])]
    ends = [*begun[-1:], done[-1][0]] if len(done) == 1 else [when for when, _, _ in done]
    taken = [max(0.0, (after - before).total_seconds()) for before, after in pairwise(ends)][-RECENT:]
    last, rounds = (done[-1][1], done[-1][2]) if done else (0, None)
    says = [words for _, words in lines if len(words.split()) < 4]
    return Progress(
        doing=says[-1] if says else "begins",
        done=last,
        rounds=rounds,
        seconds_left=None if rounds is None or not taken else fmean(taken) * (rounds - last),
        silent=max(0.0, (now - lines[-1][0]).total_seconds()) if lines else 0.0,
        seconds=max(0.0, (lines[-1][0] - (first or lines[0][0])).total_seconds()) if lines else 0.0,
        is_over=folder.summary.exists(),
    )


def _log_lines(log: Path) -> tuple[datetime | None, list[tuple[datetime, str]]]:
    """(time of the first line, time and words of every line near the end); what is no such line is left out."""
    head, tail = read_ends(log, max_bytes=MOST_LOG_BYTES)
    return next((when for when, _ in _timed_lines(head)), None), list(_timed_lines(tail))


def _timed_lines(text: bytes) -> Iterator[tuple[datetime, str]]:
    for line in text.decode(errors="replace").splitlines():
        if match := _LINE.fullmatch(line):
            with suppress(ValueError):  # the form of a date, and none
                yield datetime.fromisoformat(match[1]), match[2]


def live_page(folder: RunFolder, *, now: datetime) -> Page:
    """The page of a run that goes on: what happens now, and below it all that `run_page` shows of what is saved.

    Raises:
        CheckpointError: a file of the run is damaged.
        OSError: one cannot be read.
    """
    progress = read_progress(folder, now=now)
    if not folder.is_run():  # it has no plan yet
        section = _now(progress, [])
        return Page(title=folder.path.resolve().name, subtitle="a run that begins", sections=[section])
    page = run_page(folder.path)
    if progress.is_over:
        return page
    metrics = read_checked_rows(folder, folder.metrics)
    section = _now(progress, metrics)
    return replace(page, sections=[section, *page.sections], warnings=[*page.warnings, *warnings_of(progress, metrics)])


def _newest_scores(metrics: Sequence[Mapping[str, Any]]) -> tuple[int, list[float]] | None:
    """The last round that was evaluated, and the validation scores of its clients; None where there is none."""
    rows = [row for row in metrics if row.get("split") == "validation"]
    newest = max((row["round"] for row in rows), default=None)
    return None if newest is None else (newest, [row["primary"] for row in rows if row["round"] == newest])


def _now(progress: Progress, metrics: Sequence[Mapping[str, Any]]) -> Section:
    facts = [Fact(name="now", value=progress.doing)]
    if progress.rounds is not None:
        facts.append(Fact(name="rounds", value=f"{progress.done} of {progress.rounds}"))
    if progress.seconds_left is not None:
        facts.append(
            Fact(name="left, about", value=duration(progress.seconds_left), note=f"as the last {RECENT} rounds took")
        )
    blocks: list[Block] = [Facts(facts=facts)]
    if newest := _newest_scores(metrics):
        round, scores = newest
        facts.append(Fact(name="mean validation score", value=plain(fmean(scores)), note=f"after round {round}"))
        facts.append(Fact(name="clients evaluated", value=count(len(scores))))
    else:
        blocks.append(Text(lines=["No client has been evaluated so far."]))
    return Section(name="now", title="What happens now", blocks=blocks)


def warnings_of(progress: Progress, metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warnings: clients below the commonest class or below their own best, and a run that says nothing."""
    by_client: dict[str, list[Mapping[str, Any]]] = {}
    for row in metrics:
        if row.get("split") == "validation":
            by_client.setdefault(row["client"], []).append(row)
    found = []
    for client, rows in by_client.items():
        last, best = rows[-1], max(row["primary"] for row in rows)
        if last.get("majority") is not None and last["primary"] < last["majority"]:
            found.append(
                f"{isolate(client)} scores {last['primary']:.3f}, less than by guessing its commonest class"
                f" ({last['majority']:.3f})"
            )
        elif last["primary"] < best - FALL:
            found.append(f"{isolate(client)} gets worse: {last['primary']:.3f} now, {best:.3f} at best")
    if progress.silent > SILENT:
        found.append(
            f"The run has said nothing for {duration(progress.silent).text}; if it was stopped, `atlas resume` goes on"
        )
    return found


def page_or_reason(folder: RunFolder, *, now: datetime) -> Page:
    """`live_page`, or why the run cannot be read: one that writes is read again with the next line of its log."""
    try:
        return live_page(folder, now=now)
    except (CheckpointError, OSError) as error:
        return Page(title=folder.path.resolve().name, subtitle="cannot be read now", sections=[], warnings=[str(error)])


def find_comparisons(runs_dir: Path) -> dict[str, Path]:
    """The comparisons and sweeps that have begun in this folder: the files that name their runs, by name."""
    files = (path for path in sorted(runs_dir.glob(f"*{PLANNED_RUNS}")) if is_readable_file(path))
    return {os.fsencode(path.name).decode(errors="replace").removesuffix(PLANNED_RUNS): path for path in files}


Row: TypeAlias = tuple[str, str, str]
"""(state, rounds, newest mean validation score) of a run."""


def list_page(
    folders: Mapping[str, Path],
    comparisons: Sequence[str] = (),
    *,
    now: datetime,
    known: dict[Path, tuple[str, Row]] | None = None,
) -> Page:
    """The page that lists runs by name, each with a link to its own, after those of comparisons and sweeps.

    `known` holds the row of each run and the state that it was made from: what has not changed is not read again.
    """
    known = {} if known is None else known
    for path in folders.values():
        state = state_of(path, now=now)
        if path not in known or known[path][0] != state:
            known[path] = (state, summary_row(RunFolder(path), now=now))
    rows = [[name, *known[path][1]] for name, path in folders.items()]
    columns = ("run", "state", "rounds", "mean validation score")
    block = Table(title="Runs", columns=columns, rows=rows) if rows else Text(lines=["No run has begun here so far."])
    complete = sum(row[1] == "complete" for row in rows)
    return Page(
        title="Runs",
        subtitle=f"{len(rows)} runs, {complete} complete",
        sections=[Section(name="runs", title="How far each is", blocks=[block])],
        links=tuple((name, f"/{quote(name)}") for name in (*comparisons, *folders)),
    )


def summary_row(folder: RunFolder, *, now: datetime) -> Row:
    """(state, rounds, newest mean validation score) of a run, for a list of runs."""
    try:
        progress = read_progress(folder, now=now)
        metrics = read_checked_rows(folder, folder.metrics) if folder.is_run() else []
    except (CheckpointError, OSError):
        return "cannot be read now", "", ""
    rounds = "" if progress.rounds is None else f"{progress.done} of {progress.rounds}"
    state = "complete" if progress.is_over else "silent" if progress.silent > SILENT else progress.doing
    newest = _newest_scores(metrics)
    return state, rounds, f"{fmean(newest[1]):.3f}" if newest else ""


def state_of(folder: Path, *, now: datetime) -> str:
    """Changes whenever what the page shows may have changed: sizes and times of its files, and whether it is silent."""
    run = RunFolder(folder)
    files = (run.log, run.metrics, run.ledger, run.summary, run.digests, run.config, *run.plans())
    parts, newest = [], 0.0
    for file in files:
        try:
            known = file.stat()
        except OSError:
            continue
        newest = max(newest, known.st_mtime)
        parts.append(f"{file.name}:{known.st_size}:{known.st_mtime_ns}")
    return " ".join([*parts, "silent"] if now.timestamp() - newest > SILENT else parts)
