"""Commands that messages offer, against what pyproject.toml declares."""

import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from atlas_fl.storage import extras
from atlas_fl.storage.extras import install_command

ROOT = Path(__file__).parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", DECLARED)
def test_the_command_of_an_extra_installs_what_pyproject_declares(extra: str) -> None:
    command, *packages = re.sub("^pip install", "pip-install", install_command(extra)).split(" ", 1)
    assert command == "pip-install"
    found = {(one.name, one.specifier) for one in map(Requirement, shlex.split(packages[0]))}
    assert found == {(one.name, one.specifier) for one in map(Requirement, DECLARED[extra])}


def test_every_extra_that_a_message_names_is_declared() -> None:
    sources = [path.read_text() for place in ("src", "examples") for path in (ROOT / place).rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"install_command\(\"?'?([a-z]+)'?\"?\)", text)}
    named |= {name for text in sources for name in re.findall(r"import_extra\([^)]*extra=\"([a-z-]+)\"", text)}
    trackers = {name for text in sources for name in re.findall(r'importing\([^)]*package="([a-z]+)"', text)}
    assert {"quant", "flower", "ray"} <= named
    assert trackers == {"wandb", "tensorboard", "mlflow", "trackio"}
    assert (named - {"package", "extra"}) | trackers <= DECLARED.keys()


def test_no_message_offers_an_index_that_has_no_release() -> None:
    paths = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs/guides").glob("*.md"), ROOT / "README.md"]
    assert [str(path) for path in paths if re.search(r"pip install '?atlas-fl", path.read_text())] == []


def test_without_an_installation_the_sources_are_named(monkeypatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras.metadata, "requires", missing)
    assert install_command("ray") == "pip install '.[ray]'"
