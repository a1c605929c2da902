from collections.abc import Callable

import pytest

from atlas_fl.cli.display import event_line, show, show_progress
from atlas_fl.events import Event, Note, OnEvent, PhaseStarted, Progress, RoundFinished

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
    ],
)
def test_every_event_has_its_line(event: Event, line: str | None) -> None:
    assert event_line(event) == line


def test_a_round_without_evaluation_shows_no_scores() -> None:
    event = RoundFinished(round=1, rounds=2, scores={}, loss=1.0, seconds=0.5, bytes=0)
    assert event_line(event) == "round 1/2  loss 1.000  500 ms, 0 B"


def told(tell: Callable[[OnEvent], None], capsys: pytest.CaptureFixture[str], *, notes: bool = True) -> str:
    with show_progress(notes=notes) as on_event:
        tell(on_event)
    return capsys.readouterr().out


def test_a_file_gets_plain_lines(capsys) -> None:
    def tell(on_event: OnEvent) -> None:
        for event in (
            PhaseStarted("loading"),
            Progress("train", 1, 2),
            Progress("train", 2, 2),
            Note("x" * 200),
            ROUND,
        ):
            on_event(event)

    assert told(tell, capsys).splitlines() == ["loading ...", f"note: {'x' * 200}", event_line(ROUND)]


def test_notes_can_be_left_to_the_end(capsys) -> None:
    assert told(lambda on_event: on_event(Note("later")), capsys, notes=False) == ""


def test_a_terminal_gets_bars(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")

    def tell(on_event: OnEvent) -> None:
        for event in (Progress("train", 1, 2), Progress("evaluate", 4, 5), Progress("evaluate", 5, 5), ROUND):
            on_event(event)

    out = told(tell, capsys)
    assert "5/5" in out
    assert "round  3/12" in out


def test_text_is_shown_as_it_is(capsys) -> None:
    show(["[red]a[/red] " + "b" * 200])
    assert capsys.readouterr().out == "[red]a[/red] " + "b" * 200 + "\n"


def test_what_another_machine_said_moves_no_cursor() -> None:
    assert event_line(Note("gone: \x1b[2J\nmine\u202e")) == "note: gone: ?[2J?mine?"
