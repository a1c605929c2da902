"""A federation of real processes on loopback ends with the bits of its simulation, whatever happens to them."""

import ast
import os
import re
import shutil
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atlas_fl.audit import audit
from atlas_fl.config import Config, config_hash, to_toml
from atlas_fl.deployed.joining import own_client
from atlas_fl.errors import ConfigError
from atlas_fl.io.certs import make_certs
from atlas_fl.io.folder import RunFolder
from atlas_fl.io.results import read_json, read_rows
from atlas_fl.io.tensors import read_tensors, write_tensors
from atlas_fl.run import run
from atlas_fl.tree import digest
from tests.engines.conftest import Proxy
from tests.runs.processes import Program, Programs
from tests.runs.test_split import SMALL, most_needed

SITES = {"movie-0": "cpu_2gb", "movie-1": "tablet_4gb"}
"""The clients of the simulation, and the devices that it deals out to them."""


def adapters(folder: Path) -> dict[str, str]:
    return {
        path.name: digest(read_tensors(path / "adapter_model.safetensors"))
        for path in sorted(RunFolder(folder).adapters.iterdir())
    }


class Federation:
    """One config, simulated here and served across processes."""

    def __init__(
        self, config: Config, folder: Path, sites: dict[str, str], programs: Programs, simulated: dict[str, Path]
    ) -> None:
        self.folder, self.sites, self.programs, self.runs = folder, sites, programs, Path(config.run.runs_dir)
        self._config, self._simulated = config, simulated
        make_certs(folder / "certs", servers=["localhost", "127.0.0.1"], clients=list(sites))
        (folder / "fed.toml").write_text(to_toml(config))

    @property
    def simulated(self) -> Path:
        key = config_hash(self._config)
        if key not in self._simulated:
            self._simulated[key] = run(self._config).folder
        return self._simulated[key]

    def serve(self, *more: str, port: int = 0) -> tuple[Program, int]:
        """The server and the port that it listens on."""
        words = ("--config", "fed.toml", "--name", "served", "--host", "127.0.0.1", "--port", str(port), *more)
        server = self.programs.start("serve", *words, "--certs", "certs/server", folder=self.folder)
        return server, int(server.wait_for(r"listening on 127\.0\.0\.1:(\d+)")[1])

    def join(self, name: str, port: int, *more: str, device: str = "") -> Program:
        task, _, part = name.partition("-")
        words = ("--certs", f"certs/{name}", "--task", task, "--part", part, "--device", device or self.sites[name])
        return self.programs.start("join", f"localhost:{port}", *words, *more, folder=self.folder)

    @property
    def served(self) -> RunFolder:
        return RunFolder(self.runs / "served")

    def is_as_simulated(self) -> None:
        assert adapters(self.served.path) == adapters(self.simulated)
        for name in self.sites:
            own = read_tensors(self.folder / f"{name}-adapter" / "adapter_model.safetensors")
            assert digest(own) == adapters(self.simulated)[name]


@pytest.fixture(scope="module")
def simulated() -> dict[str, Path]:
    """The folder of every config that was simulated already."""
    return {}


@pytest.fixture
def federation(
    config: Callable[..., Config], tmp_path: Path, programs: Programs, simulated: dict[str, Path]
) -> Iterator[Callable[..., Federation]]:
    def make(sites: dict[str, str] = SITES, **values: object) -> Federation:
        tasks = tuple(dict.fromkeys(name.partition("-")[0] for name in sites))
        # packs of one, because a client that is alone has no other
        return Federation(config(tasks=tasks, pack_tokens=1, **values), tmp_path, sites, programs, simulated)

    yield make
    programs.kill_all()


def test_the_deployed_federation_is_the_simulated_one(federation: Callable[..., Federation]) -> None:
    fed = federation({**SITES, "trec-0": "laptop_8gb", "trec-1": "gpu_16gb"}, rounds=2)
    server, port = fed.serve()
    sites = [fed.join(name, port) for name in fed.sites]
    for site in sites:
        assert "the run is complete for" in site.end()
    said = server.end()
    assert "movie-0: movie, 24 training examples, cpu_2gb" in said
    assert "(4 of 4 here)" in said
    fed.is_as_simulated()
    simulated = RunFolder(fed.simulated)
    assert read_rows(fed.served.ledger) == read_rows(simulated.ledger)
    plans = [read_json(folder.plan) for folder in (simulated, fed.served)]
    for part in ("clients", "adjacency", "importance", "data"):
        assert plans[0][part] == plans[1][part], part
    assert audit(fed.served.path).ok


TINY = "memory_gb=0.375,gflops=20,up_mbps=2,down_mbps=10,latency_ms=60,max_rank=8"
"""Less than the runtime alone takes."""

MIXED = {"split": "movie-0=1,movie-1=2,trec-1=1", "dropout": 0.1, "rounds": 2}
"""Cuts at two blocks and a client without one."""


def test_a_deployed_federation_that_shares_above_its_cuts_is_the_simulated_one(
    federation: Callable[..., Federation],
) -> None:
    fed = federation(split="movie-0=1,movie-1=2", server_adapters="per_cluster", rounds=2, eta=0.3)
    server, port = fed.serve()
    sites = [fed.join(name, port) for name in fed.sites]
    for site in sites:
        site.end()
    server.end()
    fed.is_as_simulated()
    report = audit(fed.served.path)
    assert report.ok
    assert {row.client for row in report.rows if row.check == "common"} == set(fed.sites)


def lower_part(model: Path, folder: Path, *, blocks: int) -> str:
    """A copy of this model whose file has the embeddings and so many blocks, and nothing above."""
    part = folder / f"first-{blocks}"
    if not part.exists():
        shutil.copytree(model, part)
        tensors = read_tensors(part / "model.safetensors")
        kept = tuple(f"encoder.layer.{place}." for place in range(blocks))
        write_tensors(
            part / "model.safetensors",
            {name: tensor for name, tensor in tensors.items() if name.startswith(("embeddings.", *kept))},
        )
    return str(part)


@pytest.mark.parametrize(("head", "fingerprint"), [("server", "fisher"), ("client", "delta")])
def test_a_deployed_federation_of_cut_models_is_the_simulated_one(
    federation: Callable[..., Federation], tiny_model: Path, tmp_path: Path, head: str, fingerprint: str
) -> None:
    """A site with a cut has no file with more than its own blocks, from its first fingerprint on."""
    fed = federation(
        {**SITES, "trec-0": "laptop_8gb", "trec-1": "gpu_16gb"}, **MIXED, head=head, fingerprint=fingerprint
    )
    server, port = fed.serve()
    cuts = {"movie-0": 1, "movie-1": 2, "trec-1": 1}
    parts = {name: ("--model", lower_part(tiny_model, tmp_path, blocks=cut)) for name, cut in cuts.items()}
    sites = [fed.join(name, port, *parts.get(name, ())) for name in fed.sites]
    for site in sites:
        site.end()
    server.end()
    fed.is_as_simulated()
    simulated = RunFolder(fed.simulated)
    rows = [sorted(map(str, read_rows(folder.ledger))) for folder in (fed.served, simulated)]
    assert rows[0] == rows[1]
    assert {row["kind"] for row in read_rows(fed.served.ledger)} >= {"activation", "gradient", "control"}
    plans = [read_json(folder.plan) for folder in (simulated, fed.served)]
    for part in ("clients", "adjacency", "importance", "clustering"):
        assert plans[0][part] == plans[1][part], part
    assert [client["cut"] for client in plans[0]["clients"]] == [1, 2, None, 1]
    planned = [row for row in read_rows(fed.served.ledger) if row.get("phase")]
    assert {(row["client"], row["phase"]) for row in planned if row["kind"] == "activation"} == {
        (name, phase) for name in cuts for phase in ("fingerprint", "importance")
    }
    assert audit(fed.served.path).ok


def test_a_client_that_is_killed_and_comes_back_and_a_link_that_is_cut_change_no_bit(
    federation: Callable[..., Federation],
) -> None:
    fed = federation(rounds=3)
    server, port = fed.serve()
    proxy = Proxy(port)
    try:
        first = fed.join("movie-0", port)
        second = fed.join("movie-1", proxy.port)
        first.wait_for("train, round 1")
        first.kill()
        server.wait_for("movie-0 is gone")
        again = fed.join("movie-0", port)
        again.wait_for("train, round [23]")
        proxy.cut()
        assert "is lost; trying again" in second.end()
        again.end()
        server.end()
    finally:
        proxy.close()
    assert server.said("movie-0 is back")
    fed.is_as_simulated()


def test_a_server_that_is_killed_goes_on_from_its_checkpoint(federation: Callable[..., Federation]) -> None:
    fed = federation(rounds=3)
    server, port = fed.serve()
    sites = [fed.join(name, port) for name in fed.sites]
    server.wait_for("round 1/3")
    server.kill()
    again, _ = fed.serve(port=port)
    for site in sites:
        site.end()
    assert "resumed after round" in again.end()
    fed.is_as_simulated()


def test_no_fault_changes_a_bit_of_cut_models(federation: Callable[..., Federation]) -> None:
    """A site killed in the middle of its job, a link cut, and the server killed and started again."""
    fed = federation(rounds=3, split="movie-0=1,movie-1=2")
    server, port = fed.serve()
    proxy = Proxy(port)
    try:
        first = fed.join("movie-0", port)
        second = fed.join("movie-1", proxy.port)
        first.wait_for("train, round 1")
        first.kill()
        server.wait_for("movie-0 is gone")
        again = fed.join("movie-0", port)
        again.wait_for("train, round 1")
        proxy.cut()
        server.wait_for("round 1/3")
        server.kill()
        last, _ = fed.serve(port=port)
        again.end()
        assert "is lost; trying again" in second.end()
        assert "resumed after round" in last.end()
    finally:
        proxy.close()
    fed.is_as_simulated()


def test_a_site_without_its_part_of_the_model_ends_with_one_line(
    federation: Callable[..., Federation], tiny_model: Path, tmp_path: Path
) -> None:
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
    assert "no fingerprint of movie-1 in round 0: model" in server.end(2)
    stays.kill()


@pytest.mark.parametrize(
    ("split", "device", "reason"),
    [
        ("movie-0=3", "cpu_2gb", "--split cuts at block 3, and .* has 3 blocks"),
        (
            "auto",
            "none=memory_gb=0.375,gflops=20,up_mbps=2,down_mbps=10,latency_ms=60,max_rank=8",
            "none fits no cut of",
        ),
    ],
)
def test_a_cut_that_cannot_be_ends_server_and_sites(
    federation: Callable[..., Federation], split: str, device: str, reason: str
) -> None:
    fed = federation({"movie-0": device, "movie-1": "tablet_4gb"}, split=split)
    server, port = fed.serve()
    sites = [fed.join(name, port) for name in fed.sites]
    for program in (server, *sites):
        said = program.end(2).splitlines()
        assert re.search(reason, said[-1]) or re.search(reason, " ".join(said[-2:]))
    assert not fed.served.path.exists()


def test_a_round_goes_on_without_who_is_away(federation: Callable[..., Federation]) -> None:
    fed = federation(rounds=3)
    server, port = fed.serve("--min-clients", "1", "--deadline", "5")
    stays, leaves = fed.join("movie-0", port), fed.join("movie-1", port)
    server.wait_for("round 1/3")
    leaves.kill()
    stays.end()
    said = server.end()
    assert "of movie-1 in round" in said
    missing = [row for row in read_rows(fed.served.metrics) if row.get("event") == "missing"]
    assert {row["client"] for row in missing} == {"movie-1"}
    assert audit(fed.served.path).ok


def test_a_client_that_comes_late_is_placed_and_no_fault_changes_a_bit_of_it(
    federation: Callable[..., Federation], config: Callable[..., Config]
) -> None:
    """Its certificate is made when the run has begun, and the server is killed once it has joined."""
    settings = {"clients_per_task": 3, "rounds": 5, "split": "movie-2=1"}
    fed = federation(**settings)
    server, port = fed.serve()
    first, other = (fed.join(name, port) for name in fed.sites)
    server.wait_for("round 1/5")
    other.kill()  # nobody gets ahead while it is away
    make_certs(fed.folder / "certs", servers=[], clients=["movie-2"])
    late = fed.join("movie-2", port, device="laptop_8gb")
    server.wait_for("movie-2 came after the plan was made and joins before the next round")
    again = fed.join("movie-1", port)
    number = int(server.wait_for(r"movie-2 joins before round (\d): cluster 0, beside movie-0, movie-1")[1])
    server.wait_for(f"round {number}/5")
    server.kill()
    last, _ = fed.serve(port=port)
    for site in (first, again, late):
        site.end()
    assert "resumed after round" in last.end()
    simulated = run(config(tasks=("movie",), pack_tokens=1, arrive=(f"movie-2={number}",), **settings))
    assert adapters(fed.served.path) == adapters(simulated.folder)
    ledgers = [read_rows(folder.ledger) for folder in (fed.served, RunFolder(simulated.folder))]
    assert sorted(map(str, ledgers[0])) == sorted(map(str, ledgers[1]))
    assert audit(fed.served.path).ok


def test_what_is_not_shared_stays_at_its_site_and_no_fault_changes_a_bit(
    federation: Callable[..., Federation], config: Callable[..., Config]
) -> None:
    """B and heads are at the sites alone, warmed up there: one is killed, one comes late and cut, the server dies."""
    settings = {"clients_per_task": 3, "rounds": 5, "split": "movie-2=1", "fingerprint": "delta"}
    settings |= {"share": ("A",), "space": "factors", "head": "client"}
    fed = federation(**settings)
    server, port = fed.serve()
    first, other = (fed.join(name, port) for name in fed.sites)
    server.wait_for("round 1/5")
    other.kill()
    assert list((fed.folder / "movie-1-private").glob("*.safetensors"))
    make_certs(fed.folder / "certs", servers=[], clients=["movie-2"])
    late = fed.join("movie-2", port, device="laptop_8gb")
    server.wait_for("movie-2 came after the plan was made and joins before the next round")
    again = fed.join("movie-1", port)
    number = int(server.wait_for(r"movie-2 joins before round (\d)")[1])
    server.wait_for(f"round {number}/5")
    server.kill()
    last, _ = fed.serve(port=port)
    for program in (first, again, late, last):
        program.end()
    simulated = run(config(tasks=("movie",), pack_tokens=1, arrive=(f"movie-2={number}",), **settings))
    for name, model in adapters(simulated.folder).items():
        assert digest(read_tensors(fed.folder / f"{name}-adapter" / "adapter_model.safetensors")) == model
        assert not (fed.folder / f"{name}-private").exists()
    folders = fed.served, RunFolder(simulated.folder)
    ledgers = [sorted(map(str, read_rows(folder.ledger))) for folder in folders]
    assert ledgers[0] == ledgers[1]
    metrics = [[row for row in read_rows(folder.metrics) if row.get("event") != "mixed"] for folder in folders]
    assert [{**row, "seconds": 0} for row in metrics[0]] == [{**row, "seconds": 0} for row in metrics[1]]
    for path in sorted(fed.served.path.rglob("*.safetensors")):
        for key, tensor in read_tensors(path).items():
            above = "movie-2/" in key and ".layer.0." not in key
            assert above or not tensor.numel() or not (key.endswith("lora_B") or "/head." in key), (path, key)
    report = audit(fed.served.path)
    assert report.ok
    assert report.unseen == ("served: movie-0", "served: movie-1", "served: movie-2")
    assert not fed.served.adapters.exists()


@pytest.mark.parametrize("fingerprint", ["fisher", "delta"])
def test_auto_takes_the_same_cuts_deployed_as_simulated(
    federation: Callable[..., Federation], config: Callable[..., Config], fingerprint: str
) -> None:
    """By the devices that the sites report: one holds the model, the other the half of it."""
    gb = (most_needed(config, "1") + most_needed(config, "none")) / 2
    small = SMALL.format(gb=gb)
    settings = {"devices": ("small", "tablet_4gb"), "device": (small,), "ranks": "2", "rounds": 1}
    settings["fingerprint"] = fingerprint
    fed = federation({"movie-0": small, "movie-1": "tablet_4gb"}, split="auto", **settings)
    server, port = fed.serve()
    for program in [*(fed.join(name, port) for name in fed.sites), server]:
        program.end()
    fed.is_as_simulated()
    plans = [read_json(folder.plan)["clients"] for folder in (RunFolder(fed.simulated), fed.served)]
    assert plans[0] == plans[1]
    assert [client["cut"] is None for client in plans[1]] == [False, True]
    ledgers = [sorted(map(str, read_rows(folder.ledger))) for folder in (RunFolder(fed.simulated), fed.served)]
    assert ledgers[0] == ledgers[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve", "--certs", "nowhere"), "no file nowhere/ca.pem"),
        (("serve", "--strategy", "local"), "--strategy local sends nothing"),
        (
            ("serve", "--share", "B", "head", "--space", "factors", "--init-adapter", "x"),
            "--rerank and --init-adapter make whole models at the server",
        ),
        (("serve", "--port", "70000"), "--port is 70000"),
        (("serve", "--wait", "0.01"), "0 of 2 clients have come within 0.01 seconds, missing: movie-0, movie-1"),
        (("join", "x:1", "--certs", "nowhere", "--task", "movie", "--device", "cpu_2gb"), "no file nowhere/ca.pem"),
        (
            ("join", "nowhere.invalid:1", "--certs", "certs/movie-0", "--task", "movie", "--device", "cpu_2gb"),
            "host 'nowhere.invalid' is unknown",
        ),
        (("join", "x", "--certs", "certs/movie-0", "--task", "movie", "--device", "cpu_2gb"), "no address of a server"),
        (("join", "x:1", "--certs", "certs/movie-0", "--task", "movie", "--device", "gpu"), "unknown device 'gpu'"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...],
    message: str,
    atlas: Callable[..., tuple[int, str]],
) -> None:
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
    capfd: pytest.CaptureFixture[str],
    config: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[int, str]]:
    """The command, in a folder with certificates and settings."""
    from atlas_fl.cli import main

    make_certs(tmp_path / "certs", servers=["localhost"], clients=list(SITES))
    (tmp_path / "fed.toml").write_text(to_toml(config()))
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str]:
        code = main(words)
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    return call


def test_a_port_in_use_is_one_line(atlas: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = atlas("serve", "--config", "fed.toml", "--host", "127.0.0.1", "--port", str(port))
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert not (tmp_path / "runs" / "run").exists()


def test_ctrl_c_ends_a_server_and_a_site_with_one_line(federation: Callable[..., Federation]) -> None:
    fed = federation()
    server, port = fed.serve()
    site = fed.join("movie-0", port)
    server.wait_for(r"movie-0: movie, .*\(1 of 2 here\)")
    for program in (site, server):
        os.kill(program.pid, signal.SIGINT)
        assert "stopped; a run goes on where it was with the same command" in program.end(130).splitlines()[-1]


def test_a_site_with_the_whole_task_takes_what_is_there(config: Callable[..., Config], tmp_path: Path) -> None:
    rows = [f"{'good' if n % 2 else 'bad'} film number {n},{n % 2}" for n in range(43)]
    (tmp_path / "mine.csv").write_text("\n".join(["text,label", *rows]))
    client = own_client(config(), "site-1", task=f"mine={tmp_path / 'mine.csv'}", part=None)
    assert (client.name, client.task.name) == ("site-1", "mine")
    assert (len(client.train), len(client.validation), len(client.test)) == (20, 10, 12)
    parts = [own_client(config(), name, task="movie", part=k) for k, name in enumerate(("a", "b"))]
    assert not set(parts[0].train.text) & set(parts[1].train.text)
    with pytest.raises(ConfigError, match=r"--part is 2; allowed: 0 to 1, as --clients-per-task of the server says"):
        own_client(config(), "site-1", task="movie", part=2)


PAIRED = {"split": "cpu_2gb=1", "topology": "paired", "dropout": 0.1}
"""movie-0 and trec-0 are small, movie-1 and trec-1 are not."""
DEVICES = {"movie-0": "cpu_2gb", "movie-1": "laptop_8gb", "trec-0": "cpu_2gb", "trec-1": "laptop_8gb"}


def hosted(folder: RunFolder, *, work: str = "training") -> dict[tuple[int, str], str]:
    events = [row for row in read_rows(folder.metrics) if row.get("event") == "hosted" and row["work"] == work]
    return {(row["round"], row["client"]): row["host"] for row in events}


@pytest.mark.parametrize("head", ["server", "client"])
def test_deployed_pairs_are_the_simulated_ones_and_those_of_a_server_that_hosts(
    federation: Callable[..., Federation], config: Callable[..., Config], head: str
) -> None:
    paired = {**PAIRED, "rounds": 2, "devices": ("cpu_2gb", "laptop_8gb"), "head": head}
    fed = federation(DEVICES, **paired)
    server, port = fed.serve()
    sites = [fed.join(name, port) for name in fed.sites]
    for site in sites:
        site.end()
    server.end()
    fed.is_as_simulated()
    at_server = run(config(**{**paired, "topology": "server"}, pack_tokens=1, name="at-server"))
    assert adapters(fed.served.path) == adapters(at_server.folder)
    simulated = RunFolder(fed.simulated)
    pairs = {"movie-0": "movie-1", "trec-0": "trec-1"}
    everywhere = {(round, guest): host for round in (1, 2) for guest, host in pairs.items()}
    for work in ("training", "evaluation"):
        assert hosted(fed.served, work=work) == hosted(simulated, work=work) == everywhere
    rows = [
        sorted(str({key: value for key, value in row.items() if key != "relayed"}) for row in read_rows(folder.ledger))
        for folder in (fed.served, simulated)
    ]
    assert rows[0] == rows[1]
    assert all(row.get("relayed", False) is ("peer" in row) for row in read_rows(fed.served.ledger))
    sent = read_json(fed.served.summary)["bytes"]
    assert sent["relayed"] == read_json(simulated.summary)["bytes"]["between_clients"]
    assert "between_clients" not in sent
    assert audit(fed.served.path).ok


def test_deployed_pairs_share_in_part_what_simulated_ones_do(federation: Callable[..., Federation]) -> None:
    """B stays at its site, but for the guest's above its cut, which its host moves and the server keeps."""
    devices = {name: DEVICES[name] for name in ("movie-0", "movie-1")}
    settings = {"share": ("A", "head"), "space": "factors", "rounds": 2, "devices": tuple(devices.values())}
    fed = federation(devices, **PAIRED, **settings)
    server, port = fed.serve()
    for program in [*(fed.join(name, port) for name in fed.sites), server]:
        program.end()
    for name, model in adapters(fed.simulated).items():
        assert digest(read_tensors(fed.folder / f"{name}-adapter" / "adapter_model.safetensors")) == model
    assert hosted(fed.served) == {(1, "movie-0"): "movie-1", (2, "movie-0"): "movie-1"}
    for path in sorted(fed.served.path.rglob("*.safetensors")):
        for key, tensor in read_tensors(path).items():
            above = "movie-0/" in key and ".layer.0." not in key
            assert above or not tensor.numel() or not key.endswith("lora_B"), (path, key)
    assert audit(fed.served.path).ok


def test_a_host_that_is_killed_in_mid_round_changes_no_bit(federation: Callable[..., Federation]) -> None:
    devices = {name: DEVICES[name] for name in ("movie-0", "movie-1")}
    long = {"local_epochs": 5, "batch_size": 2, "rounds": 2, "devices": tuple(devices.values())}
    fed = federation(devices, **PAIRED, **long)
    server, port = fed.serve()
    guest, host = (fed.join(name, port) for name in fed.sites)
    guest.wait_for("train, round 1")
    host.kill()
    server.wait_for("movie-1 is gone, and movie-0 begins its job again with the server")
    again = fed.join("movie-1", port)
    for program in (guest, again, server):
        program.end()
    fed.is_as_simulated()
    assert hosted(fed.served) == {(1, "movie-0"): "server", (2, "movie-0"): "movie-1"}
    reasons = [row["reason"] for row in read_rows(fed.served.metrics) if row.get("event") == "hosted"]
    assert reasons[0].startswith("movie-1 dropped; ")
    assert not [row for row in read_rows(fed.served.metrics) if row.get("event") == "missing"]
    assert audit(fed.served.path).ok


def test_models_that_are_mixed_every_second_round_are_those_of_a_simulation(
    federation: Callable[..., Federation],
) -> None:
    """In the rounds between they go up to be kept, and nothing comes down; the ledger says so."""
    fed = federation(rounds=3, aggregate_every=2, split="movie-0=1")
    server, port = fed.serve()
    for program in [*(fed.join(name, port) for name in fed.sites), server]:
        program.end()
    fed.is_as_simulated()
    rows = [Counter(map(str, read_rows(folder.ledger))) for folder in (RunFolder(fed.simulated), fed.served)]
    assert not rows[0] - rows[1]
    more = rows[1] - rows[0]
    ways = [(row["round"], row["direction"], row["kind"]) for row in map(ast.literal_eval, more.elements())]
    assert sorted(ways) == [(1, "up", "adapter"), (1, "up", "adapter"), (1, "up", "head")]
    assert audit(fed.served.path).ok
