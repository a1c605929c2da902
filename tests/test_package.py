"""What is shipped: the wheel and the source archive, built here, and the facts that CITATION.cff repeats."""

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from tools import lock, package

CITATION = package.ROOT / "CITATION.cff"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return package.build(tmp_path_factory.mktemp("dist"))


@pytest.fixture
def altered(built: tuple[Path, Path], tmp_path: Path) -> Callable[..., list[str]]:
    """The problems of the wheel without one of its files, or with another one, or with other metadata."""

    def problems(*, without: str = "", with_file: str = "", replace: tuple[str, str] = ("", "")) -> list[str]:
        path = tmp_path / built[0].name
        with ZipFile(built[0]) as source, ZipFile(path, "w") as target:
            for name in source.namelist():
                content = source.read(name)
                if name.endswith("/METADATA"):
                    content = content.decode().replace(*replace).encode()
                if name != without:
                    target.writestr(name, content)
            if with_file:
                target.writestr(with_file, "")
        return list(package.wheel_problems(path))

    return problems


def test_wheel_and_source_archive_hold_what_they_should(built: tuple[Path, Path]) -> None:
    wheel, archive = built
    assert list(package.wheel_problems(wheel)) == []
    assert list(package.archive_problems(archive)) == []


@pytest.mark.parametrize("name", package.FIRST)
def test_a_wheel_without_a_file_of_the_package_is_found(name: str, altered: Callable[..., list[str]]) -> None:
    assert altered(without=f"atlas_fl/{name}") == [f"the wheel lacks atlas_fl/{name}"]


def test_a_wheel_with_tests_is_found(altered: Callable[..., list[str]]) -> None:
    name = "tests/test_docs.py"
    assert altered(with_file=name) == [f"the wheel has {name}, which is no file of the package"]


@pytest.mark.parametrize(
    ("replace", "problem"),
    [
        (("Version: 0.", "Version: 9."), "Version is '9."),
        (("Classifier: Typing :: Typed", "Classifier: Typing :: Guessed"), "'Typing :: Guessed' is no classifier"),
        (("Provides-Extra: ray", "Provides-Extra: rey"), "extras that are not both declared and provided: ray, rey"),
        (("License-Expression: Apache-2.0", "License-Expression: Free"), "the metadata is not valid: "),
        (("Requires-Python: >=3.11", "Requires-Python: none"), "the metadata is not valid: "),
    ],
)
def test_wrong_metadata_is_found(replace: tuple[str, str], problem: str, altered: Callable[..., list[str]]) -> None:
    assert altered(replace=replace)[0].startswith(problem)


def test_a_source_archive_with_runs_is_found(built: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(built[1]) as archive:
        if hasattr(tarfile, "data_filter"):  # not in Python 3.11.2, and asked for from 3.12 on
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "runs").mkdir()
    (folder / "LICENSE").unlink()
    path = shutil.make_archive(str(tmp_path / "archive"), "gztar", tmp_path, folder.name)
    problems = ["the source archive lacks LICENSE", "the source archive has runs"]
    assert list(package.archive_problems(Path(path))) == problems


def test_the_declared_pythons_are_those_that_are_locked() -> None:
    start = "Programming Language :: Python :: 3."
    declared = package.project()["classifiers"]
    versions = tuple(f"3.{text.removeprefix(start)}" for text in declared if text.startswith(start))
    assert versions == lock.PYTHONS


def test_the_citation_has_the_facts_of_the_project() -> None:
    citation, project = yaml.safe_load(CITATION.read_text(encoding="utf-8")), package.project()
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert {"message", "title", "authors", "version", "license"} <= citation.keys(), "required by the schema, or of use"
    assert citation["abstract"] == project["description"]
    for same in ("version", "license", "authors", "keywords"):
        assert citation[same] == project[same], same
