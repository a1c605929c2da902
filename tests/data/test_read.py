import csv
from pathlib import Path

import datasets
import pandas as pd
import pytest

from atlas_fl.data.tables import READERS, column, read_folder, read_table, texts
from atlas_fl.errors import DataError

TABLE = {"text": ["one, two", 'a "word"', "line\nbreak", "NA"], "label": ["0", "1", "0", "1"]}


def write(path: Path, table: dict[str, list[str]] = TABLE) -> Path:
    frame = pd.DataFrame(table)
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
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
        ("t.xlsx", b"x", r"is of no kind that can be read; give a file that ends in \.csv, \.tsv, \.jsonl, \.parquet"),
        ("t.csv", b"", r"t\.csv is empty; give it a header and at least one row"),
        ("t.csv", b"text,label\n", r"t\.csv is empty"),
        ("t.csv", b"text,label\na,b,c\n", r"cannot read .*t\.csv: .*Expected 2 fields in line 2, saw 3.*; mend"),
        ("t.csv", b"text,text\na,b\n", "two columns of the header have one name"),
        ("t.csv", b'text,label\n"a,b\n', "EOF inside string"),
        ("t.csv", b"text,label\n\xff\xfe,1\n", r"cannot read .*: byte \d+ is no UTF-8; save the file as UTF-8"),
        ("t.jsonl", b"", r"t\.jsonl is empty"),
        ("t.jsonl", b'{"text": "a"}\n{oops\n', "line 2 is no JSON"),
        ("t.jsonl", b"[1]\n", "line 1 is no JSON object"),
        ("t.jsonl", b"[" * 100_000, r"cannot read .*t\.jsonl: .*recursion"),
        ("t.jsonl", b'{"label": 1}\n{"label": ' + b"7" * 5000 + b"}\n", "line 2 is no JSON .Exceeds the limit"),
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
    with pytest.raises(DataError, match=r"f\.csv has no column 'txt'; it has 'text', 'label'"):
        column(TABLE, "txt", origin="f.csv")


@pytest.mark.parametrize("value", [None, "", "  ", float("nan")])
def test_a_missing_value_names_its_row(value: object) -> None:
    with pytest.raises(DataError, match=r"row 2 of f has .* in column 'text'; allowed: a text or a number; mend"):
        texts({"text": ["a", value]}, "text", origin="f")


@pytest.mark.parametrize("word", ["nan", " NaN ", "NULL", "<NA>", "#N/A"])
def test_a_word_that_stands_for_no_label_names_its_row(word: str) -> None:
    table = {"label": ["a", "b", word], "text": ["a", "b", word]}
    with pytest.raises(DataError, match=rf"row 3 of f has '{word}' in column 'label'; allowed: the name or number"):
        column(table, "label", origin="f", of_classes=True)
    assert texts(table, "text", origin="f") == ("a", "b", word)


@pytest.mark.parametrize("dtype", ["Int64", "string", "datetime64[ns]", "float32"])
def test_what_parquet_has_for_a_missing_label_names_its_row(dtype: str, tmp_path: Path) -> None:
    values = pd.Series([1, 2, None] if dtype != "string" else ["a", "b", None]).astype(dtype)
    pd.DataFrame({"label": values}).iloc[::-1].to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"row 1 of f has .* in column 'label'"):
        column(read_table(tmp_path / "t.parquet"), "label", origin="f", of_classes=True)


@pytest.mark.parametrize("ending", sorted(READERS))
def test_a_folder_is_no_file_whatever_its_name(ending: str, tmp_path: Path) -> None:
    (tmp_path / f"train{ending}").mkdir()
    with pytest.raises(DataError, match=rf"train\{ending} is a folder and no file; give the file, or rename"):
        read_folder(tmp_path)


def test_a_list_is_no_text() -> None:
    with pytest.raises(DataError, match=r"row 1 of f has \['a'.* in column 'text'; allowed: a text or a number"):
        texts({"text": [["a"]]}, "text", origin="f")


def test_a_folder_gives_its_splits_with_shards_in_order(tmp_path: Path) -> None:
    write(tmp_path / "train-00001-of-00002.parquet", {"text": ["second"]})
    write(tmp_path / "train-00000-of-00002.parquet", {"text": ["first"]})
    write(tmp_path / "test.jsonl")
    (tmp_path / "README.md").write_text("not data")
    found = read_folder(tmp_path)
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
    assert read_folder(tmp_path / "one")["train"]["label"] == TABLE["label"]
    assert set(read_folder(tmp_path / "many")) == {"train", "validation"}


def test_a_parquet_file_that_unpacks_to_gigabytes_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pd.DataFrame({"text": ["same text"] * 100_000, "label": [0, 1] * 50_000}).to_parquet(tmp_path / "t.parquet")
    monkeypatch.setattr("atlas_fl.data.tables.MOST_UNPACKED_BYTES", 1_000_000)
    with pytest.raises(DataError, match="its values take more than the 1,000,000 bytes that are read"):
        read_table(tmp_path / "t.parquet")


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
    with pytest.raises(DataError, match=r"row 2 of here has .* in column 'text'"):
        texts({"text": ["whole", "\ud800"]}, "text", origin="here")


def test_another_encoding_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("text,label\ncaf\xe9,1\n".encode("latin-1"))
    with pytest.raises(DataError, match="is no UTF-8; save the file as UTF-8"):
        read_table(path)
