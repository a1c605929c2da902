"""Files as people have them: what the table and the page say of each is what happens."""

import csv
import gzip
import re
import sys
from pathlib import Path

import pytest

from atlas_fl.data.formats import FORMATS, MOST_PACKED
from atlas_fl.data.task import Rows, Source
from atlas_fl.data.user_files import parse_tasks
from atlas_fl.errors import ConfigError, DataError
from tests.data import messy

WORDS = {"utf-16.csv": "текст", "quoted.csv": 'text, number\n"', "latin.csv": "café", "cyrillic.csv": "текст"}
TABLE = (Path(__file__).parent / "messy.md").read_text(encoding="utf-8").splitlines()
PAGE = (Path(__file__).parents[2] / "docs/guides/files.md").read_text(encoding="utf-8").splitlines()


def file_of(line: str) -> str | None:
    """The file that a row of the table, or of the page, is about."""
    match = re.match(r"\| `([\w.-]+)`.* \| ", line)
    return match[1] if match else None


@pytest.mark.parametrize("name", messy.MESSY)
def test_the_table_says_what_happens(name: str, tmp_path: Path) -> None:
    row = messy.row_of_table(name, tmp_path)
    assert row in TABLE, f"python -m tests.data.messy > tests/data/messy.md writes this row:\n{row}"
    assert "\n" not in row and str(tmp_path) not in row


def test_the_table_has_a_row_for_every_file_and_no_other() -> None:
    assert [file_of(line) for line in TABLE] == list(messy.MESSY)
    endings = {"." + name.partition(".")[2] for name in messy.MESSY}
    assert {*FORMATS} - {".tsv.gz", ".json.gz"} <= endings


def test_the_page_shows_rows_of_the_table() -> None:
    shown = [line for line in PAGE if file_of(line)]
    assert len(shown) > 9
    assert [line for line in shown if line not in TABLE] == []


def read(path: Path, options: str = "") -> Rows:
    data = parse_tasks(f"x={path}{options}")[0].load(Source(cache_dir=path.parent))
    assert isinstance(data.train, Rows)
    return data.train


@pytest.mark.parametrize("name", [*WORDS, "leaf-tweets.json", "notes.xlsx", "shards"])
def test_what_is_read_is_what_was_written(name: str, tmp_path: Path) -> None:
    found = read(messy.write(name, tmp_path), messy.MESSY[name].options).text
    assert found and all(text.startswith(WORDS.get(name, "text number ")) for text in found)


def test_rows_that_are_drawn_are_the_same_each_time_and_keep_their_order(tmp_path: Path) -> None:
    path = messy.write("plain.csv", tmp_path)
    drawn = read(path, ",rows=15")
    (tmp_path / "copy.csv").write_bytes(path.read_bytes())
    assert read(tmp_path / "copy.csv", ",rows=15").text == drawn.text
    assert len(read(path, ",rows=20").text) == len(read(path).text) > len(drawn.text)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_note_on_an_encoding_names_the_line_and_no_word_of_the_file(end: str, tmp_path: Path) -> None:
    rows = [*(f"note {i},{'ab'[i % 2]}" for i in range(20)), "Müller,a", "Größe,b"]
    (tmp_path / "f.csv").write_bytes(end.join(["text,label", *rows]).encode("cp1252"))
    (note,) = parse_tasks(f"x={tmp_path / 'f.csv'}")[0].load(Source(cache_dir=tmp_path)).notes
    assert note == "read as cp1252, since line 22 is no UTF-8; encoding= names another"


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) - 1, 3 << 20])
def test_an_encoding_is_found_wherever_the_first_foreign_letter_stands(size: int, tmp_path: Path) -> None:
    """Pieces of a file are decoded one after another, and a letter of UTF-8 may lie in two of them."""
    head = "text,label\n" + "".join(f"word {i},{'ab'[i % 2]}\n" for i in range(20))
    for encoding, expected in (("utf-8", "naïve"), ("cp1252", "naïve")):
        body = head + "x" * (size - len(head)) + "naïve,a\n" * 2 + "y,b\n" * 2
        (tmp_path / f"{encoding}.csv").write_bytes(body.encode(encoding))
        table = parse_tasks(f"x={tmp_path / encoding}.csv")[0].load(Source(cache_dir=tmp_path))
        texts = [text for rows in table.splits.values() if isinstance(rows, Rows) for text in rows.text]
        assert any(text.endswith(expected) for text in texts)


@pytest.mark.parametrize("ending", [".csv.gz", ".jsonl.gz", ".json.gz"])
def test_a_bomb_is_one_line_before_it_is_unpacked(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atlas_fl.data.formats._LEAST_PACKED_BYTES", 1 << 16)
    monkeypatch.setattr("atlas_fl.data.formats.MOST_CELL", 1 << 18)
    monkeypatch.setattr("atlas_fl.data.formats.free_bytes", lambda: 1 << 20)
    for content in (b"\n" * (1 << 20), b"x" * (1 << 20)):
        path = tmp_path / f"bomb{ending}"
        path.write_bytes(gzip.compress(content))
        assert len(content) > MOST_PACKED * path.stat().st_size
        with pytest.raises(DataError, match=r"a line of more than .* characters, or more than .* bytes"):
            parse_tasks(f"x={path}")


def test_a_cell_that_never_ends_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atlas_fl.data.formats.MOST_CELL", 1000)
    (tmp_path / "t.csv").write_text('text,label\n"one,a\n' + "two,b\n" * 1000)
    before = csv.field_size_limit()
    with pytest.raises(DataError, match=r"wrong quotes \(field larger than field limit \(1000\)"):
        parse_tasks(f"x={tmp_path / 't.csv'}")
    assert csv.field_size_limit() == before


def test_a_sheet_that_unpacks_to_more_than_half_of_the_memory_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atlas_fl.data.formats.free_bytes", lambda: 1 << 12)
    with pytest.raises(DataError, match="it unpacks to more than half of the free memory; save it as csv"):
        parse_tasks(f"x={messy.write('notes.xlsx', tmp_path)}")


def test_without_openpyxl_the_message_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(
        ConfigError,
        match=r"a sheet of Excel and needs openpyxl, which is not installed; pip install .*, or save it as csv",
    ):
        parse_tasks(f"x={messy.write('notes.xlsx', tmp_path)}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (",missing=drop", "unknown missing 'drop'; .*known: error, skip"),
        (",truncate=left", "unknown truncate 'left'; .*known: head, middle, tail"),
        (",rows=0", "rows='0' of task 'x' is no number of rows from 1 on"),
        (",rows=many", "rows='many' of task 'x' is no number of rows from 1 on"),
        (",encoding=rot13", "unknown encoding 'rot13' of task 'x'; give one such as utf-8"),
    ],
)
def test_a_wrong_option_says_what_is_allowed(options: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_tasks(f"x={messy.write('plain.csv', tmp_path)}{options}")
