"""A federation that Flower starts, over TLS and with node keys, ends with the bits of its simulation."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

import atlas_fl
from atlas_fl.config import Config, to_toml
from atlas_fl.experiment.run import run_config
from atlas_fl.params import digest
from atlas_fl.runtime.transport.certificates import make_certs
from atlas_fl.storage.run_folder import RunFolder
from atlas_fl.storage.tensors import read_tensors
from tests.runs.federation import SITES
from tests.runs.processes import SECONDS, Watched

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

EXAMPLE = Path(atlas_fl.__file__).parents[2] / "examples" / "flower" / "pyproject.toml"


class Started(Watched):
    """A command of Flower in a process group of its own."""

    def __init__(self, words: Sequence[str], *, folder: Path, env: dict[str, str]) -> None:
        folder.mkdir(exist_ok=True)
        command = Path(sys.executable).parent / words[0]
        super().__init__(words)
        self._process = subprocess.Popen(
            [str(command), *words[1:]],
            cwd=folder,
            env=env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._watch(self._process.stdout)

    def end(self) -> str:
        """What it said, once it has ended well."""
        assert self._process.wait(timeout=SECONDS) == 0, self.text
        self._reader.join(timeout=SECONDS)
        return self.text

    def kill(self) -> None:
        """Nothing of its group is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=SECONDS)
        self._reader.join(timeout=SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts commands of Flower; whatever still runs at the end is killed."""
    started: list[Started] = []
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(atlas_fl.__file__).parents[1]),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }

    def begin(*words: str, folder: Path) -> Started:
        started.append(Started(words, folder=folder, env=env))
        return started[-1]

    yield begin
    for program in reversed(started):
        program.kill()


def free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in taken]
    for server in taken:
        server.close()
    return ports


def make_key(path: Path) -> None:
    """What `ssh-keygen -t ecdsa -b 384` makes."""
    key = ec.generate_private_key(ec.SECP384R1())
    encoding, none = serialization.Encoding, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(encoding.PEM, serialization.PrivateFormat.OpenSSH, none))
    public = key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)


def adapter(folder: Path) -> str:
    return digest(read_tensors(folder / "adapter_model.safetensors"))


@dataclass(frozen=True, kw_only=True)
class Flower:
    """A folder with a network of Flower in it: certificates, keys, the app and its sites."""

    folder: Path
    start: Callable[..., Started]
    link: int
    stream: int
    model: Path

    def prepare(self, served: Config) -> None:
        make_certs(self.folder / "tls", servers=["localhost", "127.0.0.1"], clients=["operator"])
        for name in ("app", "flwr"):
            (self.folder / name).mkdir()
        shutil.copy(EXAMPLE, self.folder / "app")
        (self.folder / "app" / "fed.toml").write_text(to_toml(served))
        (self.folder / "flwr" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.link}"\n'
            f'root-certificates = "{self.folder}/tls/ca/ca.pem"\n'
        )

    def superlink(self) -> None:
        files = {"ca-certfile": "ca", "certfile": "cert", "keyfile": "key"}
        tls = [f"--ssl-{word}={self.folder}/tls/server/{file}.pem" for word, file in files.items()]
        words = ("--enable-supernode-auth", "--disable-runtime-dependency-installation", f"--port={self.link}")
        self.start("flower-superlink", *tls, *words, folder=self.folder / "link").wait_for("Uvicorn running")

    def register(self, names: Iterable[str]) -> None:
        for name in names:
            make_key(self.folder / name)
        app = self.folder / "app"
        for command in [self.start("flwr", "supernode", "register", f"../{name}.pub", folder=app) for name in names]:
            command.end()

    def supernode(self, name: str, *, device: str, port: int) -> Started:
        return self.start(
            "flower-supernode",
            f"--root-certificates={self.folder}/tls/ca/ca.pem",
            f"--superlink=127.0.0.1:{self.link}",
            f"--auth-supernode-private-key={self.folder / name}",
            f"--port={port}",
            f'--node-config=name="{name}" task="movie" part={name[-1]} device="{device}" model="{self.model}"',
            folder=self.folder / f"at-{name}",
        )

    def run(self) -> str:
        """What `flwr run` said."""
        told = f'nodes=2 address="127.0.0.1:{self.stream}" host="127.0.0.1"'
        return self.start("flwr", "run", ".", "--stream", "--run-config", told, folder=self.folder / "app").end()


@pytest.mark.slow
def test_the_federation_that_flower_runs_is_the_simulated_one(
    config, tiny_model: Path, tmp_path, start: Callable[..., Started]
) -> None:
    link, stream, *ports = free_ports(2 + len(SITES))
    flower = Flower(folder=tmp_path, start=start, link=link, stream=stream, model=tiny_model)
    flower.prepare(config(tasks=("movie",), pack_tokens=1, rounds=2, name="served"))
    flower.superlink()
    flower.register(SITES)
    nodes = [flower.supernode(name, device=device, port=port) for (name, device), port in zip(SITES.items(), ports)]
    said = flower.run()
    assert "(2 of 2 here)" in said, said
    served, secrets = RunFolder(tmp_path / "runs" / "served"), tmp_path / "secrets"
    secrets.mkdir()
    for name in SITES:
        shutil.copy(tmp_path / f"at-{name}" / f"{name}-adapter" / f"{name}-secret", secrets)
    simulated = run_config(config(tasks=("movie",), pack_tokens=1, rounds=2, secrets=secrets)).folder
    for name, node in zip(SITES, nodes):
        wanted = adapter(RunFolder(simulated).adapters / name)
        assert adapter(served.adapters / name) == wanted, said
        (own,) = (path for path in (tmp_path / f"at-{name}" / f"{name}-adapter").iterdir() if path.is_dir())
        assert adapter(own) == wanted, node.text
