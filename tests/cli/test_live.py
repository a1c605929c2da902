from collections.abc import Sequence
from dataclasses import replace

import pytest

from atlas_fl.cli.display import event_line, show, show_progress
from atlas_fl.events import Event, Note, PhaseStarted, Progress, RoundFinished

ROUND = RoundFinished(
    round=3, rounds=12, scores={"movie-0": 0.75, "trec-1": 0.25}, loss=0.5, seconds=61.0, bytes=1_250_000
)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (PhaseStarted("fingerprints"), "fingerprints ..."),
        (PhaseStarted("round 3"), None),
        (Progress("train", 1, 9), None),
        (Note("[bold]kept"), "note: [bold]kept"),
        (ROUND, "round  3/12  validation 0.500 (worst trec-1 0.250)  loss 0.500  1.0 min, 1.2 MB"),
        (replace(ROUND, scores={}, seconds=0.5, bytes=0), "round  3/12  loss 0.500  500 ms, 0 B"),
        # what another machine said moves no cursor
        (Note("gone: \x1b[2J\nmine\u202e"), "note: gone: ?[2J?mine?"),
    ],
)
def test_every_event_has_its_line(event: Event, line: str | None) -> None:
    assert event_line(event) == line


def told(events: Sequence[Event], capsys, *, notes: bool = True) -> str:
    with show_progress(notes=notes) as on_event:
        for event in events:
            on_event(event)
    return capsys.readouterr().out


def test_a_file_gets_plain_lines(capsys) -> None:
    events = (PhaseStarted("loading"), Progress("train", 1, 2), Progress("train", 2, 2), Note("x" * 200), ROUND)
    assert told(events, capsys).splitlines() == [
        "loading ...",
        f"note: {'x' * 200}",
        f"{event_line(ROUND)}, about 9.2 min of rounds left",
    ]


def test_the_time_left_follows_what_rounds_took(capsys) -> None:
    events = [replace(ROUND, round=at, rounds=4, seconds=10.0 * at) for at in (2, 3, 4)]
    assert [line.partition(", about ")[2] for line in told(events, capsys).splitlines()] == [
        "40.0 s of rounds left",
        "25.0 s of rounds left",
        "",
    ]


def test_notes_can_be_left_to_the_end(capsys) -> None:
    assert told([Note("later")], capsys, notes=False) == ""


def test_a_terminal_gets_bars(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = told((Progress("train", 1, 2), Progress("evaluate", 4, 5), Progress("evaluate", 5, 5), ROUND), capsys)
    assert "5/5" in out
    assert "round  3/12" in out


def test_text_is_shown_as_it_is(capsys) -> None:
    show(["[red]a[/red] " + "b" * 200])
    assert capsys.readouterr().out == "[red]a[/red] " + "b" * 200 + "\n"
