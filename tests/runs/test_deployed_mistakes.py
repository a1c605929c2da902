"""What cannot be served or joined ends with one line, and nothing is left running."""

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from atlas_fl.config import to_toml
from atlas_fl.data.task import Rows
from atlas_fl.errors import ConfigError
from atlas_fl.runtime.transport.certificates import make_certs
from atlas_fl.setup.assembly import own_client
from atlas_fl.storage.tensors import read_tensors, write_tensors
from tests.runs.federation import SITES, Federations
from tests.runs.finished import Make

TINY = "memory_gb=0.375,gflops=20,up_mbps=2,down_mbps=10,latency_ms=60,max_rank=8"
"""Less than the runtime alone takes."""
SMALL = ("--task", "movie", "--device", "cpu_2gb")


@pytest.mark.slow
def test_a_site_without_its_part_of_the_model_ends_with_one_line(federation, tiny_model: Path, tmp_path) -> None:
    fed = federation(split="1")
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    weights = read_tensors(other / "model.safetensors")
    del weights["encoder.layer.0.output.dense.weight"]
    write_tensors(other / "model.safetensors", weights)
    server, port = fed.serve()
    stays, ends = fed.join("movie-0", port), fed.join("movie-1", port, "--model", str(other))
    said = ends.end(2).splitlines()[-1]
    assert "lacks encoder.layer.0.output.dense.weight" in said
    assert "no fingerprint of movie-1 in round 0: it cannot do this; its own screen says why" in server.end(2)
    assert "the server was stopped before the run was complete" in stays.end(2)


@pytest.mark.slow
def test_a_site_that_was_not_told_of_a_cut_ends_with_the_flag_that_agrees_to_it(federation: Federations) -> None:
    fed = federation(split="movie-0=1")
    server, port = fed.serve()
    words = ("--certs", "certs/movie-0", "--part", "0", *SMALL, "--config", "fed.toml")
    said = fed.programs.start("join", f"localhost:{port}", *words, folder=fed.folder).end(2).splitlines()[-1]
    assert said.startswith("atlas: the server's settings (--split 'movie-0=1') ask more of this site")
    assert "agree with --allow cut labels" in said
    server.kill()
    assert "training examples" not in server.text  # nothing was told of its data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "reason"),
    [
        ("movie-0=3", "--split cuts at block 3, and .* has 3 blocks"),
        ("movi-0=1", "unknown name in --split 'movi-0'; did you mean 'movie-0'"),
    ],
)
def test_a_cut_that_cannot_be_ends_server_and_sites(federation: Federations, split: str, reason: str) -> None:
    fed = federation({"movie-0": "cpu_2gb", "movie-1": "tablet_4gb"}, split=split)
    server, port = fed.serve("--no-late")
    sites = [fed.join(name, port) for name in fed.sites]
    said = server.end(2).splitlines()
    assert re.search(reason, said[-1]) or re.search(reason, " ".join(said[-2:]))
    for site in sites:
        # what is wrong with the settings, and not who else is listed
        line = " ".join(site.end(2).splitlines()[-2:])
        assert re.search(reason.partition(";")[0] + ".*; ask who runs the server", line)
        assert "did you mean" not in line
    assert not fed.served.path.exists()


@pytest.mark.slow
def test_sites_that_cannot_take_part_end_with_a_line_and_the_server_goes_on_and_names_them(
    federation: Federations, tiny_model: Path, tmp_path: Path
) -> None:
    """A device that fits no cut, and a model with another activation; what is out of range is refused at the site."""
    fed = federation({"movie-0": f"none={TINY}", "movie-1": "tablet_4gb"}, split="auto")
    other = Path(shutil.copytree(tiny_model, tmp_path / "other"))
    (other / "config.json").write_text(
        json.dumps(json.loads((other / "config.json").read_text()) | {"hidden_act": "relu"})
    )
    server, port = fed.serve("--wait", "15", "--no-late")
    small = fed.join("movie-0", port)
    altered = fed.join("movie-1", port, "--model", str(other))
    assert "movie-0 cannot take part: none fits no cut of" in small.end(2).splitlines()[-1]
    assert "the digest of the architecture of" in altered.end(2).splitlines()[-1]
    slow = fed.join("movie-1", port, device=f"slow={TINY}".replace("gflops=20", "gflops=1e-300"))
    assert (
        "gflops='1e-300' is not allowed; give a number, at least 0.001, at most 1e+09" in slow.end(2).splitlines()[-1]
    )
    said = server.end(2).splitlines()[-1]
    assert "missing: movie-0 (refused: movie-0 cannot take part: none fits no cut of" in said
    assert "movie-1 (refused: client 'movie-1' has architecture" in said
    assert not fed.served.path.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve", "--certs", "nowhere"), "nowhere holds no certificates that can be read (nowhere/ca.pem: No such"),
        (("serve", "--strategy", "local"), "--strategy local sends nothing"),
        (
            ("serve", "--share", "B", "head", "--space", "factors", "--init-adapter", "x"),
            "--init-adapter x makes whole models at the server",
        ),
        (("serve", "--port", "70000"), "--port is 70000"),
        (("serve", "--wait", "0.01"), "0 of 2 clients are here after 0.01 seconds, missing: movie-0, movie-1"),
        (("join", "x:1", "--certs", "nowhere", *SMALL), "holds no certificates that can be read (nowhere/ca.pem: No"),
        (("join", "nowhere.invalid:1", "--certs", "certs/movie-0", *SMALL), "host 'nowhere.invalid' is unknown"),
        (("join", "x", "--certs", "certs/movie-0", *SMALL), "no address of a server"),
        (("join", "x:1", "--certs", "certs/movie-0", *SMALL, "--device", "gpu"), "unknown device 'gpu'"),
        *(
            (
                ("join", "x:1", "--certs", "certs/movie-0", *SMALL, "--to", f"movie-0-{what}"),
                f"--to movie-0-{what} is where",
            )
            for what in ("secret", "sums", "private", "privacy", "runs")
        ),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], message: str, atlas: Callable[..., tuple[int, str]]) -> None:
    more = ("--config", "fed.toml", "--host", "127.0.0.1") if words[0] == "serve" else ()
    chosen = () if words[0] == "join" or "--certs" in words else ("--certs", "certs/server")
    free = () if words[0] == "join" or "--port" in words else ("--port", "0")
    code, said = atlas(*words, *more, *chosen, *free)
    assert code == 2
    assert message in said
    assert "Traceback" not in said
    assert said.strip().splitlines()[-1].startswith("atlas: ")


@pytest.fixture
def atlas(
    capfd: pytest.CaptureFixture[str], config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    """The command, in a folder with certificates and settings."""
    from atlas_fl.cli.main import main

    make_certs(tmp_path / "certs", servers=["localhost"], clients=list(SITES))
    (tmp_path / "fed.toml").write_text(to_toml(config()))
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str]:
        code = main(words)
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    return call


def test_a_port_in_use_is_one_line_before_the_model_is_loaded(atlas, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("atlas_fl.deployment.service.client_manager_of", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = atlas("serve", "--config", "fed.toml", "--host", "127.0.0.1", "--port", str(port))
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert not (tmp_path / "runs" / "run").exists()


def test_a_site_with_the_whole_task_takes_what_is_there(config: Make, tmp_path: Path) -> None:
    rows = [f"{'good' if n % 2 else 'bad'} film number {n},{n % 2}" for n in range(43)]
    (tmp_path / "mine.csv").write_text("\n".join(["text,label", *rows]))
    mine, secret = f"mine={tmp_path / 'mine.csv'}", tmp_path / "site-1-secret"
    client = own_client(config(), "site-1", task=mine, part=None, secret=secret)
    assert (client.name, client.task.name) == ("site-1", "mine")
    assert (len(client.train), len(client.validation), len(client.test)) == (20, 10, 12)
    parts = [own_client(config(), name, task="movie", part=k, secret=secret) for k, name in enumerate(("a", "b"))]
    assert not set(parts[0].train.text) & set(parts[1].train.text)
    with pytest.raises(ConfigError, match=r"--part is 2; allowed: 0 to 1, as --clients-per-task of the server says"):
        own_client(config(), "site-1", task="movie", part=2, secret=secret)


def test_a_sites_secret_chooses_its_rows_and_no_seed_of_a_server(config: Make, tmp_path: Path) -> None:
    rows = [f"film number {n},{n % 2}" for n in range(200)]
    (tmp_path / "mine.csv").write_text("\n".join(["text,label", *rows]))

    def texts(name: str, seed: int) -> set[str]:
        given = config(samples=24, seed=seed)
        client = own_client(given, "s", task=f"mine={tmp_path / 'mine.csv'}", part=None, secret=tmp_path / name)
        assert isinstance(client.train, Rows)
        return set(client.train.text)

    assert texts("one", 1) == texts("one", 2)
    assert len(texts("one", 1)) == 24
    assert texts("one", 1) != texts("another", 1)
