"""The commands of `deploy/`: those of the compose file make a federation, the others are read by the command line."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from atlas_fl.cli.arguments import parse, split
from atlas_fl.cli.main import COMMANDS
from tests.runs.processes import Programs

DEPLOY = Path(__file__).parents[2] / "deploy"


def services() -> dict[str, list[str]]:
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return {name: shlex.split(service["command"]) for name, service in compose["services"].items()}


@pytest.mark.slow
def test_the_commands_of_the_compose_file_are_a_federation(programs: Programs, tmp_path: Path) -> None:
    commands = services()
    (tmp_path / "fed.toml").write_text((DEPLOY / "fed.toml").read_text())
    (tmp_path / "site").mkdir()
    certs = programs.start(*commands.pop("certs"), "--server", "localhost", folder=tmp_path)
    assert programs.wait(certs.pid) == 0
    server = programs.start(*commands.pop("server"), "--port", "0", folder=tmp_path)
    port = server.wait_for(r":(\d+)")[1]
    assert len(commands) == 3
    sites = []
    for name, (join, address, *words) in commands.items():
        assert (join, address) == ("join", "server:8470")
        here = [word.replace("site/adapter", f"site/{name}") for word in words]
        sites.append(programs.start(join, f"localhost:{port}", *here, folder=tmp_path))
    assert [programs.wait(site.pid) for site in sites] == [0, 0, 0], server.text
    assert programs.wait(server.pid) == 0
    assert len(list((tmp_path / "site").glob("*/adapter_config.json"))) == 3


def test_each_service_of_the_compose_file_sees_its_own_certificates_alone() -> None:
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        mounts = [volume for volume in service["volumes"] if "certs" in str(volume)]
        if name == "certs":
            assert mounts == ["certs:/home/atlas/certs"]
        else:
            (mount,) = mounts
            assert (mount["volume"], mount["read_only"]) == ({"subpath": name}, True)
            assert mount["target"] == f"/home/atlas/certs/{name}"


def test_the_image_copies_named_things_alone() -> None:
    """A clone in use may hold keys and data."""
    copies = [
        line.split()[1:-1] for line in (DEPLOY / "Dockerfile").read_text().splitlines() if line.startswith("COPY")
    ]
    names = {name for sources in copies for name in sources}
    assert names >= {"pyproject.toml", "requirements", "src", "tools"}
    assert all((DEPLOY.parent / name).exists() and name != "." for name in names)


def pods() -> list[list[str]]:
    documents = [
        document
        for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]
    templates = [document["spec"]["template"] for document in documents if "template" in document["spec"]]
    return [container["args"] for template in templates for container in template["spec"]["containers"]]


def unit() -> list[str]:
    text = (DEPLOY / "atlas-site.service").read_text()
    (command,) = [line.partition("=")[2] for line in text.splitlines() if line.startswith("ExecStart=")]
    (example,) = [line for line in text.splitlines() if line.startswith("# SERVER=")]
    values = dict(part.split("=", 1) for part in example.removeprefix("# ").split(", "))
    for name, value in values.items():
        command = command.replace(f"${{{name}}}", value)
    return shlex.split(command)[1:]


@pytest.mark.parametrize("words", [*pods(), unit(), *services().values()], ids=lambda words: " ".join(words[:2]))
def test_the_command_line_reads_the_commands(words: list[str]) -> None:
    assert "$" not in " ".join(words)
    command, *rest = [str(DEPLOY / "fed.toml") if word.endswith("fed.toml") else word for word in words]
    parse(COMMANDS[command].options, split(rest), command=f"atlas {command}")
