import csv
from pathlib import Path

import datasets
import pandas as pd
import pytest

from atlas_fl.data.formats import Reading
from atlas_fl.data.tables import CHECKS, READERS, column, read_folder, read_rows, read_table, texts
from atlas_fl.errors import DataError

TABLE = {"text": ["one, two", 'a "word"', "line\nbreak", "NA"], "label": ["0", "1", "0", "1"]}


def write(path: Path, table: dict[str, list[str]] = TABLE) -> Path:
    frame = pd.DataFrame(table)
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".xlsx":
        frame.to_excel(path, index=False)
    elif ".json" in path.suffixes:
        frame.to_json(path, orient="records")
    elif ".jsonl" in path.suffixes:
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False, sep="\t" if ".tsv" in path.suffixes else ",")
    return path


@pytest.mark.parametrize("ending", sorted(READERS))
def test_every_kind_of_file_gives_back_what_was_written(ending: str, tmp_path: Path) -> None:
    table = read_table(write(tmp_path / f"t{ending}"))
    assert {name: list(values) for name, values in table.items()} == TABLE


def test_the_mark_that_spreadsheets_put_first_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbftext,label\nhello,1\n")
    assert list(read_table(tmp_path / "t.csv")) == ["text", "label"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.csv", None, r"there is no file .*none\.csv; check the path"),
        ("t.xls", b"x", r"is of no kind that can be read; give a file that ends in \.csv, \.tsv, \.json, \.jsonl, "),
        ("t.xlsx", b"x", "cannot read .*: it is no file of Excel; mend"),
        ("t.csv", b"", r"t\.csv is empty; give it a header and at least one row"),
        ("t.csv", b"text,label\n", r"t\.csv is empty"),
        (
            "t.csv",
            b"text,label\na,b,c\n",
            r"t\.csv has 1 problem: 3 against 2 cells in the header .* in row 2; mend the file",
        ),
        ("t.csv", b"text,text\na,b\n", r"t\.csv has two columns 'text' in its header; rename one"),
        ("t.csv", b'text,label\n"a,b\n', r"wrong quotes \(the last is not closed; .*\) in row 2; mend"),
        ("t.csv", b"text,label\n\x81\xfe,1\n", "it is not in .*; name its encoding, such as encoding=cp1251"),
        ("t.jsonl", b"", r"t\.jsonl is empty"),
        ("t.jsonl", b'{"text": "a"}\n{oops\n', "no JSON .* in row 2"),
        ("t.jsonl", b"[1]\n", "no JSON object in row 1"),
        ("t.jsonl", b"[" * 100_000, r"no JSON \(.*recursion.* in row 1"),
        ("t.jsonl", b'{"label": 1}\n{"label": ' + b"7" * 5000 + b"}\n", "no JSON .Exceeds the limit .* in row 2"),
        ("t.parquet", b"not parquet at all", r"cannot read .*t\.parquet"),
    ],
)
def test_bad_files_are_one_clear_line(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_table(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_missing_column_names_those_that_exist() -> None:
    with pytest.raises(DataError, match=r"f\.csv has no column 'txt'; did you mean 'text'\? it has 'text', 'label'"):
        column(TABLE, "txt", origin="f.csv")


@pytest.mark.parametrize("value", [None, "", "  ", float("nan")])
def test_a_missing_value_names_its_row(value: object) -> None:
    with pytest.raises(DataError, match=r"f has 1 problem: no value in 'text' .*in row 2; mend the file$"):
        texts({"text": ["a", value]}, "text", origin="f")


@pytest.mark.parametrize("word", ["nan", " NaN ", "NULL", "<NA>", "#N/A"])
def test_a_word_that_stands_for_no_label_is_text(word: str) -> None:
    assert [CHECKS[kind](word) for kind in ("text", "class", "number")] == ["", "no value", "no value"]


@pytest.mark.parametrize("dtype", ["Int64", "string", "datetime64[ns]", "float32"])
def test_what_parquet_has_for_a_missing_label_names_its_row(dtype: str, tmp_path: Path) -> None:
    values = pd.Series([1, 2, None] if dtype != "string" else ["a", "b", None]).astype(dtype)
    pd.DataFrame({"label": values}).iloc[::-1].to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet has .* problem.*: n.* in 'label'.* in row 1"):
        read_rows([tmp_path / "t.parquet"], Reading(columns=(("label", "class"),)))


@pytest.mark.parametrize("ending", sorted(READERS))
def test_a_folder_is_no_file_whatever_its_name(ending: str, tmp_path: Path) -> None:
    (tmp_path / f"train{ending}").mkdir()
    with pytest.raises(DataError, match=rf"train\{ending} is a folder and no file; give the file, or rename"):
        read_folder(tmp_path)


def test_a_list_is_no_text() -> None:
    with pytest.raises(DataError, match=r"f has 1 problem: neither a text nor a number in 'text' \(\['a'\]\) in row 1"):
        texts({"text": [["a"]]}, "text", origin="f")


def test_a_folder_gives_its_splits_with_shards_in_order(tmp_path: Path) -> None:
    write(tmp_path / "train-00001-of-00002.parquet", {"text": ["second"]})
    write(tmp_path / "train-00000-of-00002.parquet", {"text": ["first"]})
    write(tmp_path / "test.jsonl")
    (tmp_path / "README.md").write_text("not data")
    found, _ = read_folder(tmp_path)
    assert set(found) == {"train", "test"}
    assert found["train"]["text"] == ["first", "second"]


def test_a_split_in_two_formats_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.csv")
    write(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r"holds the train split more than once \(train\.csv, train\.jsonl\); keep one"):
        read_folder(tmp_path)


def test_saved_datasets_are_read(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict(TABLE)
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(tmp_path / "many")
    assert read_folder(tmp_path / "one")[0]["train"]["label"] == TABLE["label"]
    assert set(read_folder(tmp_path / "many")[0]) == {"train", "validation"}


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".csv.gz"])
def test_what_takes_more_than_half_of_the_free_memory_is_one_line_early(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        tmp_path / f"t{ending}", {"text": [f"text {i} " * 10 for i in range(20_000)], "label": ["a", "b"] * 10_000}
    )
    monkeypatch.setattr("atlas_fl.data.formats.free_bytes", lambda: 2_000_000)
    columns = (("text", "text"), ("label", "class"))
    with pytest.raises(
        DataError, match=r"the first \d,\d+ rows of .* take 0\.00 GB of memory, half .* rows=\d+ "
    ) as told:
        read_rows([path], Reading(columns=columns))
    most = int(str(told.value).partition("rows=")[2].split()[0])
    table, remarks = read_rows([path], Reading(columns=columns, rows=most))
    assert len(table["text"]) == most and remarks == (f"{most:,} of 20,000 rows are drawn",)
    places = [int(text.split()[1]) for text in table["text"]]
    assert places == sorted(places) and abs(sum(places) / most - 10_000) < 2_000


@pytest.mark.parametrize("noted", ['{"info": 3}', '{"info": {"features": {"label": {"_type": "ClassLabel"}}}}'])
def test_damaged_notes_of_datasets_in_a_parquet_file_are_one_line(noted: str, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": ["a", "b"], "label": [0, 1]}).replace_schema_metadata({b"huggingface": noted.encode()})
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DataError, match="what datasets has noted in it of its columns is damaged; mend the file"):
        read_table(tmp_path / "t.parquet", class_names=True)


def test_a_damaged_saved_dataset_is_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text("{")
    with pytest.raises(DataError, match=r"cannot read .*; save it again with datasets' save_to_disk"):
        read_folder(tmp_path)


def test_a_long_document_is_a_cell_like_others(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("text,label\n" + "word " * 60_000 + ",yes\nshort,no\n")
    before = csv.field_size_limit()
    assert [len(text) for text in read_table(path)["text"]] == [300_000, 5]
    assert csv.field_size_limit() == before


def test_a_mark_before_the_first_line_of_jsonl_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert read_table(path) == {"text": ["a"]}


def test_half_a_character_names_its_row() -> None:
    with pytest.raises(DataError, match=r"here has 1 problem: half a character in 'text' .* in row 2"):
        texts({"text": ["whole", "\ud800"]}, "text", origin="here")
