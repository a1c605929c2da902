"""The help pages: as wide as the terminal, each line as full as words allow, nothing of the sources' own lines."""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import pytest

from atlas_fl.cli.arguments import WIDEST, help_page
from atlas_fl.cli.main import COMMANDS
from atlas_fl.config import settings
from atlas_fl.config.settings import Positional
from atlas_fl.config.values import Mark

WIDTHS = ["64", "80", "100", "140"]


@dataclass(frozen=True, kw_only=True)
class Toy:
    """What a command
    does."""

    place: Annotated[str, Positional("PLACE")]
    """Where."""
    kind: Literal["warm", "cold", "wet"] = "wet"
    """Which one, told in a sentence that is
    longer than a line of the source."""
    size: int | None = None
    """How much; all of it by default."""
    a_name_longer_than_its_column: float = 0.5
    """A share."""
    loud: bool = True
    """Whether one hears `a b c` of it."""
    quiet: bool = False
    """Whether not."""


def test_a_page_by_hand(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert help_page(Toy, command="atlas toy").splitlines() == [
        "usage: atlas toy [OPTIONS] PLACE",
        "",
        "What a command does.",
        "",
        "  PLACE                       Where. (required)",
        "",
        "options:",
        "  --kind CHOICE               Which one, told in a sentence",
        "                              that is longer than a line of",
        "                              the source. (one of warm,",
        "                              cold, wet; default: wet)",
        "  --size INT                  How much; all of it by",
        "                              default.",
        "  --a-name-longer-than-its-column NUMBER",
        "                              A share. (default: 0.5)",
        "  --[no-]loud                 Whether one hears `a b c` of",
        "                              it. (default: on)",
        "  --[no-]quiet                Whether not.",
        "  -h, --help                  Show this page.",
    ]


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("words", [(), ("run", "--help", "all"), *((name, "--help") for name in COMMANDS)])
def test_no_line_is_longer_than_the_terminal_or_ends_early(
    words: tuple[str, ...], columns: str, atlas, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    width = min(int(columns), WIDEST)
    lines = atlas(*words).out.splitlines()
    assert max(map(len, lines)) <= width
    for line, below in pairwise(lines):
        goes_on = re.match(r" *", below)[0] == " " * column(line)  # type: ignore[index]
        if line and below and goes_on:
            # a hint and what stands in backquotes are not broken
            first = re.match(r"\s*(\(?default:( [^ )]+){1,2}\)|\(?`[^`]*`\S*|\S+)", below)
            assert len(line) + 1 + len(first[1]) > width, line


def column(line: str) -> int:
    """Where the text of a line begins: behind its name, if it has one."""
    name = re.match(r"  \S.*?\s{2,}(?=\S)", line)
    return len(name[0]) if name else len(line) - len(line.lstrip())


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_whole_page_of_run_holds_every_setting_and_its_help(columns: str, atlas, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    page = atlas("run", "--help", "all").out
    text = " ".join(page.split())
    for setting in settings().values():
        name = f"--[no-]{setting.flag[2:]}" if setting.kind is bool else f"{setting.flag} "
        assert re.search(rf"^  {re.escape(name)}", page, re.MULTILINE), setting.name
        assert setting.help in text


def test_the_page_of_run_holds_the_common_settings_and_says_where_the_others_are(atlas) -> None:
    page = atlas("run", "--help").out
    shown = {
        name
        for name, setting in settings().items()
        if re.search(rf"^  --(\[no-\])?{setting.flag[2:]}\b(?!-)", page, re.M)
    }
    assert shown == {one.name for one in settings().values() if Mark.COMMON in one.marks}
    assert 35 <= len(shown) <= 45
    assert page.splitlines()[-1].startswith(f"`atlas run --help all` shows all {len(settings())} settings")


def test_choices_and_what_is_missing_are_told(atlas) -> None:
    text = " ".join(atlas("run", "--help").out.split())
    assert "Parts of a client's model that leave it. (a list, each one of A, B, head; default: A B head)" in text
    assert "--max-rounds INT Stop after this many rounds of this session; `atlas resume` goes on. --" in text
    assert atlas("export", "--help").out.startswith("usage: atlas export --to TEXT [OPTIONS] RUN\n")
    assert atlas("fetch", "--help").out.startswith("usage: atlas fetch [OPTIONS] [WHAT]\n")
    assert atlas("audit", "--help").out.startswith("usage: atlas audit [OPTIONS] RUN\n")
