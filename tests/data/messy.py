"""Files as people have them, each with its fault or its habit: what the table of `tests/data/messy.md` is made of.

python -m tests.data.messy > tests/data/messy.md        the table anew; `docs/guides/files.md` shows some of its rows
"""

import gzip
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from atlas_fl.data.task import Source
from atlas_fl.data.user_files import parse_tasks
from atlas_fl.errors import AtlasError

ROWS = [(f"text number {i}", "ab"[i % 2]) for i in range(20)]
FRAME = pd.DataFrame(ROWS, columns=["text", "label"])
SEVERAL = [(text, ("a;b", "b", "")[i % 3]) for i, (text, _) in enumerate(ROWS)]
CYRILLIC = [(f"текст номер {i}", "ab"[i % 2]) for i in range(20)]
JAPANESE = [(f"文、番号{i}", "ab"[i % 2]) for i in range(20)]
CAFES = [(f"café {i}", "ab"[i % 2]) for i in range(20)]


class Messy(NamedTuple):
    about: str
    content: bytes | dict[str, bytes]
    """Of a file, or of the files of a folder."""
    options: str = ""


def lines(rows: Any = ROWS, *, sep: str = ",", header: str = "text,label", end: str = "\n") -> str:
    head = [header.replace(",", sep)] if header else []
    return "".join(line + end for line in [*head, *(sep.join(map(str, row)) for row in rows)])


def frame(write: Callable[[pd.DataFrame, Any], object], table: pd.DataFrame = FRAME) -> bytes:
    buffer = io.BytesIO()
    write(table, buffer)
    return buffer.getvalue()


def sheets(**tables: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    with pd.ExcelWriter(buffer) as book:
        for name, table in tables.items():
            table.to_excel(book, sheet_name=name, index=False)
    return buffer.getvalue()


def objects(rows: Any = ROWS) -> list[dict[str, Any]]:
    return [{"text": text, "label": label} for text, label in rows]


def jsonl(rows: Any = ROWS) -> str:
    return "".join(json.dumps(row) + "\n" for row in objects(rows))


def leaf(*, lost: int = 0) -> bytes:
    users = {
        user: {"x": [text for text, _ in ROWS[start:end]], "y": [label for _, label in ROWS[start : end - lost]]}
        for user, start, end in (("ann", 0, 12), ("bob", 12, 20))
    }
    return json.dumps({"users": list(users), "num_samples": [12, 8], "user_data": users}).encode()


def tweets() -> bytes:
    x = [[str(i), "Mon", "NO_QUERY", "ann", text] for i, (text, _) in enumerate(ROWS)]
    user = {"x": x, "y": [4 * (label == "b") for _, label in ROWS]}
    return json.dumps({"users": ["ann"], "num_samples": [20], "user_data": {"ann": user}}).encode()


def parquet(rows: Any = ROWS) -> bytes:
    return frame(pd.DataFrame.to_parquet, pd.DataFrame(rows, columns=["text", "label"]))


PLAIN = lines()
SHEET = sheets(notes=FRAME)
ABSENT = [(text, "" if number % 5 == 4 else label) for number, (text, label) in enumerate(ROWS)]
MESSY: dict[str, Messy] = {
    "plain.csv": Messy("comma, UTF-8", PLAIN.encode()),
    "semicolon.csv": Messy("semicolons, as Excel writes in half of Europe", lines(sep=";").encode()),
    "tabs.csv": Messy("tabs under the name of csv", lines(sep="\t").encode()),
    "pipes.csv": Messy("pipes", lines(sep="|").encode()),
    "commas.tsv": Messy("commas under the name of tsv", PLAIN.encode()),
    "sep-line.csv": Messy("Excel's line `sep=;` on top", ("sep=;\n" + lines(sep=";")).encode()),
    "caret.csv": Messy("another separator", lines(sep="^").encode()),
    "caret-said.csv": Messy("the same, named", lines(sep="^").encode(), ",sep=^"),
    "word.csv": Messy("a separator of several characters", PLAIN.encode(), ",sep=::"),
    "mark.csv": Messy("the mark of UTF-8 on top", PLAIN.encode("utf-8-sig")),
    "utf-16.csv": Messy("UTF-16 with its mark, Excel's Unicode text", lines(CYRILLIC, sep="\t").encode("utf-16")),
    "utf-16-unmarked.csv": Messy("UTF-16 without a mark", PLAIN.encode("utf-16-le")),
    "latin.csv": Messy("Latin-1 or cp1252", lines(CAFES).encode("cp1252")),
    "latin-said.csv": Messy("the same, named", lines(CAFES).encode("cp1252"), ",encoding=latin-1"),
    "cyrillic.csv": Messy("cp1251, named", lines(CYRILLIC).encode("cp1251"), ",encoding=cp1251"),
    "japanese.csv": Messy("Shift-JIS, not named", lines(JAPANESE).encode("shift-jis")),
    "two-encodings.csv": Messy("UTF-8 and then cp1252", lines(CAFES).encode() + "naïve,a\n".encode("cp1252")),
    "encoding.csv": Messy("an encoding that nobody knows", PLAIN.encode(), ",encoding=utf-9"),
    "wrong-encoding.csv": Messy("a wrong encoding", lines(CAFES).encode("cp1252"), ",encoding=utf-8"),
    "crlf.csv": Messy("line ends of Windows", lines(end="\r\n").encode()),
    "cr.csv": Messy("line ends of an old Mac", lines(end="\r").encode()),
    "quoted.csv": Messy(
        "commas, line breaks and quotes in quotes",
        lines([(f'"text, number\n""{i}"""', label) for i, (_, label) in enumerate(ROWS)]).encode(),
    ),
    "unclosed.csv": Messy("a quote that is never closed", PLAIN.replace("text number 4", '"text number 4').encode()),
    "quote-inside.csv": Messy("text behind a quote", PLAIN.replace("text number 4", '"text" number 4').encode()),
    "empty-rows.csv": Messy("empty rows", PLAIN.replace("text number 7", "\n,\n  ,\ntext number 7").encode()),
    "trailing.csv": Messy("empty cells behind the last column", PLAIN.replace(",a\n", ",a,,\n").encode()),
    "unquoted.csv": Messy("a comma without quotes", PLAIN.replace("number 4", "number, 4").encode()),
    "broken-line.csv": Messy("a line break without quotes", PLAIN.replace("number 4", "number\n4").encode()),
    "missing.csv": Messy("labels are missing", lines(ABSENT).encode()),
    "missing-skip.csv": Messy("the same, to be skipped", lines(ABSENT).encode(), ",missing=skip"),
    "all-missing.csv": Messy("no label at all", lines([(text, "") for text, _ in ROWS]).encode(), ",missing=skip"),
    "many.csv": Messy("twenty problems", lines([(text, "nan") for text, _ in ROWS]).encode()),
    "zero-byte.csv": Messy("a zero byte", PLAIN.replace("number 4", "number\0 4").encode()),
    "header-only.csv": Messy("a header and no row", b"text,label\n"),
    "empty.csv": Messy("no byte", b""),
    "no-header.csv": Messy("no header", lines(header="").encode()),
    "other-names.csv": Messy("other names of columns", lines(header="Text,class").encode()),
    "named.csv": Messy("the same, named", lines(header="Text,class").encode(), ",text=Text,label=class"),
    "twice.csv": Messy("a column twice", lines([(*row, "c") for row in ROWS], header="text,label,label").encode()),
    "blanks.csv": Messy("blanks around names and classes", PLAIN.replace(",", " , ").encode()),
    "scores.csv": Messy(
        "numbers", lines([(text, f" {i}.5") for i, (text, _) in enumerate(ROWS)]).encode(), ",metric=pearson"
    ),
    "decimal-comma.csv": Messy(
        "numbers with a decimal comma", lines([("text", "0,5")] * 12, sep=";").encode(), ",metric=pearson"
    ),
    "one-class.csv": Messy("one class", lines([(text, "a") for text, _ in ROWS]).encode()),
    "several.csv": Messy("several labels in a cell, or none", lines(SEVERAL).encode(), ",multi=;"),
    "several-other.csv": Messy("the same, another character named", lines(SEVERAL).encode(), ",multi=pipe"),
    "several-printed.csv": Messy(
        "lists as Python prints them", lines([(text, "\"['a', 'b']\"") for text, _ in ROWS]).encode(), ",multi=comma"
    ),
    "several.jsonl": Messy(
        "lists of labels",
        jsonl([(text, label.split(";") if label else []) for text, label in SEVERAL]).encode(),
        ",multi=comma",
    ),
    "identifiers.csv": Messy("a label that is different in every row", lines([(t, t[5:]) for t, _ in ROWS]).encode()),
    "drawn.csv": Messy("some of its rows", PLAIN.encode(), ",rows=15"),
    "rows.csv.gz": Messy("packed", gzip.compress(PLAIN.encode(), mtime=0)),
    "cut.csv.gz": Messy("packed and cut off", gzip.compress(PLAIN.encode(), mtime=0)[:-20]),
    "packed.csv": Messy("packed, and named as if it were not", gzip.compress(PLAIN.encode(), mtime=0)),
    "rows.jsonl": Messy("JSON lines", jsonl().encode()),
    "rows.jsonl.gz": Messy("packed JSON lines", gzip.compress(jsonl().encode(), mtime=0)),
    "broken.jsonl": Messy("lines that are no JSON", jsonl().replace("}\n", "\n", 2).encode()),
    "list.json": Messy("a list of objects", json.dumps(objects(), indent=1).encode()),
    "lines.json": Messy("JSON lines under the name of JSON", jsonl().encode()),
    "columns.json": Messy("columns, as pandas writes", FRAME.to_json().encode()),
    "data.json": Messy("a list inside an object", json.dumps({"version": 1, "data": objects()}).encode()),
    "uneven.json": Messy("columns of different lengths", json.dumps({"text": ["a", "b"], "label": ["a"]}).encode()),
    "leaf.json": Messy("LEAF: columns user, x and y", leaf(), ",text=x,label=y"),
    "leaf-tweets.json": Messy("LEAF's Sent140, where x is a record", tweets(), ",text=x.4,label=y"),
    "leaf-broken.json": Messy("LEAF, fewer y than x", leaf(lost=1), ",text=x,label=y"),
    "notes.xlsx": Messy("a sheet of Excel", SHEET),
    "sheets.xlsx": Messy("several sheets", sheets(about=pd.DataFrame({"who": ["me"]}), notes=FRAME)),
    "gap.xlsx": Messy("missing cells in a sheet", sheets(notes=FRAME.replace("text number 7", None))),
    "old.xls": Messy("a sheet of old Excel", b"\xd0\xcf\x11\xe0" + bytes(99)),
    "locked.xlsx": Messy("a sheet with a password", b"\xd0\xcf\x11\xe0" + bytes(99)),
    "sheet.csv": Messy("a sheet of Excel under the name of csv", SHEET),
    "text.parquet": Messy("no parquet at all", PLAIN.encode()),
    "shards": Messy("a folder of shards", {f"part-{i}.parquet": parquet(ROWS[5 * i : 5 * i + 5]) for i in range(4)}),
    "splits": Messy(
        "folders of shards by split",
        {
            "train/0.parquet": parquet(ROWS[:8]),
            "train/1.parquet": parquet(ROWS[8:14]),
            "test/0.csv": lines(ROWS[14:]).encode(),
        },
    ),
    "shards-flawed": Messy(
        "one bad shard of several", {"a.csv": lines(ROWS[:9]).encode(), "b.csv": lines(ABSENT[9:16]).encode()}
    ),
}


def write(name: str, folder: Path) -> Path:
    path, content = folder / name, MESSY[name].content
    for place, data in ({"": content} if isinstance(content, bytes) else content).items():
        file = path / place if place else path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return path


def outcome(name: str, folder: Path) -> str:
    """What the user is told: rows and notes, or the message, without the folder."""
    try:
        data = parse_tasks(f"x={write(name, folder)}{MESSY[name].options}")[0].load(Source(cache_dir=folder))
    except AtlasError as error:
        return str(error).replace(f"{folder}/", "")
    rows = sum(map(len, data.splits.values())) + data.left_out
    return "; ".join([f"**{rows} rows**", *data.notes]).replace(f"{folder}/", "")


def row_of_table(name: str, folder: Path) -> str:
    options = f" `{MESSY[name].options[1:]}`" * bool(MESSY[name].options)
    told = outcome(name, folder).replace("|", "\\|")
    return f"| `{name}`{options} | {MESSY[name].about} | {told} |"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name in MESSY:
            print(row_of_table(name, Path(folder)))
