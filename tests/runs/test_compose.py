"""The commands of `deploy/`: those of the compose file make a federation, the others are read by the command line."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from atlas_fl.cli.arguments import parse, split
from atlas_fl.cli.main import COMMANDS
from tests.runs.processes import Programs

DEPLOY = Path(__file__).parents[2] / "deploy"


def services() -> dict[str, dict[str, Any]]:
    """The services of the compose file, by name."""
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text().replace("$$", "$"))
    services: dict[str, dict[str, Any]] = compose["services"]
    return services


def commands() -> dict[str, list[str]]:
    """The commands of server and sites, by name."""
    return {name: shlex.split(service["command"]) for name, service in services().items() if name != "certs"}


def make_certs(folder: Path) -> None:
    """Run the script of the service `certs` in this folder, where the volumes are folders and the server is here."""
    certs = services()["certs"]
    for volume in certs["volumes"]:
        _, _, target = volume.partition(":/home/atlas/")
        if target != "made":
            (folder / target).mkdir(parents=True, exist_ok=True)
    shell, flags = certs["entrypoint"]
    (script,) = certs["command"]
    here = f'atlas() {{ "{sys.executable}" -m atlas_fl "$@"; }}; chown() {{ :; }}; '
    here += script.replace("--server server", "--server localhost")
    environment = os.environ | {"PYTHONPATH": str(DEPLOY.parent / "src")}
    subprocess.run([shell, flags, here], cwd=folder, env=environment, check=True)


@pytest.mark.slow
def test_the_commands_of_the_compose_file_are_a_federation(programs: Programs, tmp_path: Path) -> None:
    parties = commands()
    (tmp_path / "fed.toml").write_text((DEPLOY / "fed.toml").read_text())
    (tmp_path / "site").mkdir()
    make_certs(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "certs").rglob("*.pem")}
    make_certs(tmp_path)  # `up` a second time
    assert before == {path: path.read_bytes() for path in (tmp_path / "certs").rglob("*.pem")}
    server = programs.start(*parties.pop("server"), "--port", "0", folder=tmp_path)
    port = server.wait_for(r":(\d+)")[1]
    assert len(parties) == 3
    sites = []
    for name, (join, address, *words) in parties.items():
        assert (join, address) == ("join", "server:8470")
        here = [word.replace("site/adapter", f"site/{name}") for word in words]
        sites.append(programs.start(join, f"localhost:{port}", *here, folder=tmp_path))
    assert [programs.wait(site.pid) for site in sites] == [0, 0, 0], server.text
    assert programs.wait(server.pid) == 0
    assert len(list((tmp_path / "site").glob("*/adapter_config.json"))) == 3


def test_each_service_of_the_compose_file_sees_its_own_certificates_alone() -> None:
    """A volume for each, which `certs` fills, and no option that an engine lacks, such as `subpath`."""
    certs, *parties = services().items()
    assert certs[0] == "certs"
    filled = [volume for volume in certs[1]["volumes"] if volume != "certs:/home/atlas/made"]
    assert filled == [f"certs-{name}:/home/atlas/certs/{name}" for name, _ in parties]
    for name, service in parties:
        mounts = [volume for volume in service["volumes"] if "certs" in volume]
        assert mounts == [f"certs-{name}:/home/atlas/certs/{name}:ro"]


@pytest.mark.parametrize("name", commands())
def test_a_service_begins_once_its_certificates_are_there(name: str, tmp_path: Path) -> None:
    service = services()[name]
    tools = tmp_path / "tools"
    tools.mkdir()
    own = tmp_path / "certs" / name
    own.mkdir(parents=True)
    for tool, line in {"atlas": 'echo "$@"', "sleep": f"echo waits; touch {own}/ready"}.items():
        (tools / tool).write_text(f"#!/bin/sh\n{line}\n")
        (tools / tool).chmod(0o755)
    words = [*service["entrypoint"], *commands()[name]]
    environment = {"PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["waits", " ".join(commands()[name])]


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


@pytest.mark.parametrize("words", [*pods(), unit(), *commands().values()], ids=lambda words: " ".join(words[:2]))
def test_the_command_line_reads_the_commands(words: list[str]) -> None:
    assert "$" not in " ".join(words)
    command, *rest = [str(DEPLOY / "fed.toml") if word.endswith("fed.toml") else word for word in words]
    parse(COMMANDS[command].options, split(rest), command=f"atlas {command}")
