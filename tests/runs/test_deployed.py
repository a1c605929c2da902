"""A federation of real processes on loopback ends with the bits of its simulation."""

import ast
import shutil
from collections import Counter
from pathlib import Path

import pytest

from atlas_fl.storage.jsonl import read_json, read_rows
from atlas_fl.storage.run_folder import RunFolder
from atlas_fl.storage.tensors import read_tensors, write_tensors
from tests.runs.federation import SITES, Federations, sorted_ledger
from tests.runs.finished import Make
from tests.runs.reading import passing_audit
from tests.runs.test_split import SMALL, most_needed


@pytest.mark.slow
def test_the_deployed_federation_is_the_simulated_one(federation: Federations) -> None:
    fed = federation({**SITES, "trec-0": "laptop_8gb", "trec-1": "gpu_16gb"}, rounds=2)
    said, sites = fed.complete()
    assert all("the run is complete for" in site for site in sites)
    assert "movie-0: movie, 24 training examples, cpu_2gb" in said
    assert "(4 of 4 here)" in said
    fed.is_as_simulated()
    simulated = RunFolder(fed.simulated)
    assert read_rows(fed.served.ledger) == read_rows(simulated.ledger)
    plans = [read_json(folder.plan) for folder in (simulated, fed.served)]
    for part in ("clients", "adjacency", "importance", "data"):
        assert plans[0][part] == plans[1][part], part
    passing_audit(fed.served.path)


MIXED = {"split": "movie-0=1,movie-1=2,trec-1=1", "dropout": 0.1, "rounds": 2}
"""Cuts at two blocks and a client without one."""


@pytest.mark.slow
def test_sites_are_cut_by_their_own_names_and_tasks(federation: Federations) -> None:
    """None of these is among the tasks, clients and devices of the settings."""
    own = "mine=memory_gb=8,gflops=200,up_mbps=20,down_mbps=50,latency_ms=20,max_rank=64"
    fed = federation({"movie-7": "cpu_2gb", "movie-8": own, "movie-9": "cpu_2gb"}, split="notes=2,movie-7=1,mine=1")
    server, port = fed.serve("--clusters", "2")
    tasks = {"movie-7": "notes", "movie-8": "letters", "movie-9": "notes"}
    programs = [server]
    for name, task in tasks.items():
        rows = [f"{'good' if n % 2 else 'bad'} {task} number {n} of {name},{n % 2}" for n in range(60)]
        (fed.folder / f"{name}.csv").write_text("\n".join(["text,label", *rows]))
        words = ("--certs", f"certs/{name}", "--task", f"{task}={name}.csv", "--device", fed.sites[name])
        programs.append(
            fed.programs.start("join", f"localhost:{port}", *words, *fed.consent, *fed.own_model, folder=fed.folder)
        )
    for program in programs:
        program.end()
    cuts = [client["cut"] for client in read_json(fed.served.plan)["clients"]]
    assert cuts == [1, 1, 2]
    passing_audit(fed.served.path)


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


@pytest.mark.slow
def test_a_deployed_federation_of_cut_models_is_the_simulated_one(federation, tiny_model: Path, tmp_path) -> None:
    """A site with a cut has no file with more than its own blocks, from its first fingerprint on."""
    devices = {**SITES, "trec-0": "laptop_8gb", "trec-1": "gpu_16gb"}
    fed = federation(devices, **MIXED, head="client", fingerprint="gradient")
    cuts = {"movie-0": 1, "movie-1": 2, "trec-1": 1}
    fed.complete(own={name: ("--model", lower_part(tiny_model, tmp_path, blocks=cut)) for name, cut in cuts.items()})
    fed.is_as_simulated()
    simulated = RunFolder(fed.simulated)
    assert sorted_ledger(fed.served.path) == sorted_ledger(fed.simulated)
    assert {row["kind"] for row in read_rows(fed.served.ledger)} >= {"activation", "gradient", "control"}
    plans = [read_json(folder.plan) for folder in (simulated, fed.served)]
    for part in ("clients", "adjacency", "importance", "clustering"):
        assert plans[0][part] == plans[1][part], part
    assert [client["cut"] for client in plans[0]["clients"]] == [1, 2, None, 1]
    planned = [row for row in read_rows(fed.served.ledger) if row.get("phase")]
    assert {(row["client"], row["phase"]) for row in planned if row["kind"] == "activation"} == {
        (name, phase) for name in cuts for phase in ("fingerprint", "importance")
    }
    passing_audit(fed.served.path)


@pytest.mark.slow
def test_auto_takes_the_same_cuts_deployed_as_simulated(federation: Federations, config: Make) -> None:
    """By the devices that the sites report: one holds the model, the other the half of it."""
    gb = (most_needed(config, "1") + most_needed(config, "none")) / 2
    small = SMALL.format(gb=gb)
    settings = {"devices": ("small", "tablet_4gb"), "device": (small,), "ranks": "2", "rounds": 1}
    fed = federation({"movie-0": small, "movie-1": "tablet_4gb"}, split="auto", **settings)
    fed.complete()
    fed.is_as_simulated()
    plans = [read_json(folder.plan)["clients"] for folder in (RunFolder(fed.simulated), fed.served)]
    assert plans[0] == plans[1]
    assert [client["cut"] is None for client in plans[1]] == [False, True]
    assert sorted_ledger(fed.served.path) == sorted_ledger(fed.simulated)


@pytest.mark.slow
def test_models_that_are_mixed_every_second_round_are_those_of_a_simulation(federation: Federations) -> None:
    """In the rounds between they go up to be kept, and nothing comes down; the ledger says so."""
    fed = federation(rounds=3, aggregate_every=2, split="movie-0=1")
    fed.complete()
    fed.is_as_simulated()
    rows = [Counter(sorted_ledger(folder)) for folder in (fed.simulated, fed.served.path)]
    assert not rows[0] - rows[1]
    more = rows[1] - rows[0]
    ways = [(row["round"], row["direction"], row["kind"]) for row in map(ast.literal_eval, more.elements())]
    assert sorted(ways) == [(1, "up", "adapter"), (1, "up", "adapter"), (1, "up", "head")]
    passing_audit(fed.served.path)


@pytest.mark.product
def test_forty_sites_end_in_the_bits_of_their_simulation(federation: Federations) -> None:
    small = {"samples": 16, "validation_samples": 6, "test_samples": 6, "max_length": 16}
    sites = {f"movie-{number}": "cpu_2gb" for number in range(40)}
    fed = federation(sites, **small, clients_per_task=40, rounds=1, strategy="fedavg", ranks="4")
    fed.complete()
    fed.is_as_simulated()
