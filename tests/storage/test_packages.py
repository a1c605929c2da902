"""Debian packages and converted parts, with an apt-get that hands out a small package of its own."""

import io
import tarfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from atlas_fl.errors import DataError
from atlas_fl.storage import downloads, onnx_vit
from atlas_fl.storage.assets import Asset, assets

CONTENT = {"train.gz": b"pixels of clothes", "labels.gz": b"odd"}


def part(*, altered: str = "", system: Path | None = None) -> Asset:
    return Asset(
        name="clothes",
        requirement="dataset-clothes",
        size_mb=1,
        prefix="usr/share/clothes/",
        files={name: sha256(content + altered.encode()).hexdigest() for name, content in CONTENT.items()},
        installer="apt",
        group="vision",
        note="who made it",
        system_dir=None if system is None else str(system),
    )


def deb(*, compression: str = "xz", drop: str = "") -> bytes:
    """A package as dpkg-deb writes it: an ar archive of three files, padded to even lengths."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=f"w:{compression}") as archive:
        for name, content in {**CONTENT, "other": b"unwanted"}.items():
            entry = tarfile.TarInfo(f"./usr/share/clothes/{name}{drop}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    found = b"!<arch>\n"
    for name, content in {
        "debian-binary": b"2.0\n",
        "control.tar.xz": b"odd",
        f"data.tar.{compression}": data.getvalue(),
    }.items():
        found += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content
        found += b"\n" * (len(content) % 2)
    return found


@pytest.fixture
def apt(tmp_path, monkeypatch) -> Callable[[bytes], None]:
    """Puts an apt-get in front of the path that downloads what it is given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def give(content: bytes) -> None:
        (tmp_path / "package").write_bytes(content)
        copied = f"cp {tmp_path / 'package'} ./clothes_1_all.deb"
        script = f'#!/bin/sh\n[ "$1 $2" = "download dataset-clothes" ] && {copied}\n'
        (folder / "apt-get").write_text(script)
        (folder / "apt-get").chmod(0o755)

    return give


def run(one: Asset, cache: Path) -> list[str]:
    said: list[str] = []
    downloads.fetch_assets([one], cache, report=said.append)
    return said


@pytest.mark.parametrize("compression", ["xz", "gz"])
def test_the_named_files_are_taken_out_of_the_package(compression: str, apt, tmp_path) -> None:
    apt(deb(compression=compression))
    cache = tmp_path / "cache"
    said = run(part(), cache)
    assert {path.name: path.read_bytes() for path in (cache / "clothes").iterdir()} == CONTENT
    assert [path.name for path in cache.iterdir()] == ["clothes"]
    fetched = "clothes: fetching dataset-clothes (1 MB)"
    assert said == ["clothes: who made it", fetched, f"clothes: done ({cache / 'clothes'})"]
    assert run(part(), cache)[-1] == f"clothes: here already ({cache / 'clothes'})"


def test_what_the_machine_has_is_not_fetched(tmp_path) -> None:
    folder = tmp_path / "system"
    folder.mkdir()
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    assert run(part(system=folder), tmp_path / "cache")[-1] == f"clothes: here already ({folder})"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no package", r"clothes_1_all\.deb is damaged \(.*\); run `apt-get clean` and fetch again"),
        (deb()[:-100], r"is damaged \("),
        (deb(drop=".old"), r"is damaged \('\./usr/share/clothes/train\.gz'\)"),
    ],
)
def test_a_damaged_package_is_one_line_and_leaves_nothing(content: bytes, message: str, apt, tmp_path) -> None:
    apt(content)
    with pytest.raises(DataError, match=message):
        run(part(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_apt_one_line_says_where_to_put_the_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cache = tmp_path / "cache"
    with pytest.raises(
        DataError, match=r"there is no apt-get here to fetch it; copy its files \(train\.gz, labels\.gz\)"
    ) as caught:
        run(part(), cache)
    assert str(cache / "clothes") in str(caught.value)
    (cache / "clothes").mkdir()
    for name, content in CONTENT.items():
        (cache / "clothes" / name).write_bytes(content)
    assert run(part(), cache)[-1].startswith("clothes: here already")


def test_what_apt_says_is_said(tmp_path, monkeypatch) -> None:
    script = tmp_path / "apt-get"
    script.write_text("#!/bin/sh\necho 'W: a warning' >&2\necho 'E: Unable to locate package' >&2\nexit 100\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(DataError, match=r"cannot fetch dataset-clothes: E: Unable to locate package \(apt-get's"):
        run(part(), tmp_path / "cache")


def test_what_is_converted_is_checked_before_it_appears(apt, tmp_path, monkeypatch) -> None:
    def join(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "joined").write_bytes((source / "train.gz").read_bytes() + (source / "labels.gz").read_bytes())

    def made(content: bytes) -> Asset:
        one = part()
        return Asset(
            **{name: getattr(one, name) for name in ("name", "requirement", "size_mb", "prefix", "installer", "group")},
            packed=one.files,
            conversion_package="onnx",
            files={"joined": sha256(content).hexdigest()},
        )

    monkeypatch.setattr(onnx_vit, "convert", join)
    monkeypatch.setattr(downloads.importlib.util, "find_spec", lambda _: downloads)
    apt(deb())
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match="clothes was converted into another joined than this version knows"):
        run(made(b"something else"), cache)
    assert list(cache.iterdir()) == []
    run(made(b"pixels of clothesodd"), cache)
    assert [path.name for path in (cache / "clothes").iterdir()] == ["joined"]


def test_a_reader_that_is_lacking_is_named_before_anything_is_downloaded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(downloads.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DataError, match=r"needs the package onnx; install it with `pip install 'onnx>=1\.17'`"):
        run(assets()["dinov2-vits14"], tmp_path / "cache")


def test_every_part_has_its_own_folder_and_names_its_hashes() -> None:
    for one in assets().values():
        assert all(len(digest) == 64 for digest in {**one.files, **one.packed}.values())
    assert [one.group for one in assets().values()] == ["embedded"] * 3 + ["vision", "llm", "vision"]
    assert "not where the weights come from" in assets()["dinov2-vits14"].note
    assert assets()["fashion-mnist"].installer == "apt"
