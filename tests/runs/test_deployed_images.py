"""Whole models of image clients in processes of their own end with the bits of their simulation."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from atlas_fl.audit import audit
from atlas_fl.config import Config, to_toml, with_values
from atlas_fl.export import export
from atlas_fl.io.certs import make_certs
from atlas_fl.io.folder import RunFolder
from atlas_fl.io.results import read_json
from atlas_fl.presets import find_preset
from atlas_fl.run import RunResult, run
from atlas_fl.train import sample_of
from atlas_fl.tree import digest
from tests.models.tiny_vision import save_tiny
from tests.runs.processes import Program, Programs
from tests.runs.reading import rows, same_tensors, state

SITES = ("digits-0", "digits-1", "digits-2")
MASKED: dict[str, object] = {
    **{"mask": "least_sensitive", "calibration_rounds": 2, "calibration_examples": 4, "local_steps": 2}
}


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    found = Programs()
    yield found
    found.close()


def settings(folder: Path, **values: object) -> Config:
    """Three clients, of whom two train in a round; whoever has not trained yet gets head and mask to be scored."""
    return with_values(
        find_preset("vision-quick"),
        {
            **{"model": str(save_tiny(folder / "tiny-vit")), "image_size": 16, "tasks": "digits", "rounds": 2},
            **{"clients_per_task": 3, "samples": 24, "validation_samples": 8, "test_samples": 20, "eval_every": 1},
            **{"participation": 0.67, "lr": 0.02, "nc": "5", "devices": "cpu_2gb", "pack_tokens": 1, "audit": True},
            **{"runs_dir": str(folder / "runs"), "name": "simulated"},
            **values,
        },
    )


def lora_settings(folder: Path, **values: object) -> Config:
    """Three clients of the digits with adapters on a frozen ViT, in packs of one as sites are."""
    return with_values(
        find_preset("vision-lora"),
        {
            **{"model": str(save_tiny(folder / "tiny-vit")), "image_size": 16, "tasks": "digits", "rounds": 4},
            **{"clients_per_task": 3, "samples": 24, "validation_samples": 8, "test_samples": 20, "batch_size": 8},
            **{"lr": 5e-3, "clusters": "oracle", "fingerprint_steps": 2, "fingerprint_batches": 2, "sketch_dim": 64},
            **{"candidates": "2+4", "devices": "cpu_2gb", "pack_tokens": 1, "audit": True, "dropout": 0.1},
            **{"runs_dir": str(folder / "runs"), "name": "simulated"},
            **values,
        },
    )


class Federation:
    """One config served across processes, to be compared with its simulation."""

    def __init__(self, config: Config, folder: Path, programs: Programs, sites: Sequence[str]) -> None:
        self.folder, self.programs, self.served = folder, programs, Path(config.run.runs_dir) / "served"
        make_certs(folder / "certs", servers=["localhost", "127.0.0.1"], clients=list(sites))
        (folder / "fed.toml").write_text(to_toml(config))

    def serve(self, *more: str, port: int = 0) -> tuple[Program, int]:
        """The server and the port that it listens on."""
        words = ("--config", "fed.toml", "--name", "served", "--host", "127.0.0.1", "--port", str(port), *more)
        server = self.programs.start("serve", *words, "--certs", "certs/server", folder=self.folder)
        return server, int(server.wait_for(r"listening on 127\.0\.0\.1:(\d+)")[1])

    def join(self, name: str, port: int) -> Program:
        words = ("--certs", f"certs/{name}", "--task", "digits", "--part", name[-1], "--device", "cpu_2gb")
        return self.programs.start("join", f"localhost:{port}", *words, folder=self.folder)

    def is_as(self, simulated: RunResult, *, round: int) -> None:
        """Its models, metrics, ledger, plan and scores are those of the simulation, and the sites have their own."""
        assert same_tensors(state(simulated.folder, round=round), state(self.served, round=round))
        for kind in ("metrics", "ledger"):
            assert rows(simulated.folder, kind) == rows(self.served, kind)
        names = [[path.name for path in RunFolder(folder).plans()] for folder in (simulated.folder, self.served)]
        assert names[0] == names[1]
        for name in names[0]:
            plans = [read_json(folder / name) for folder in (simulated.folder, self.served)]
            assert all(plans[0][part] == plans[1][part] for part in ("clients", "data", "sparse"))
        assert read_json(self.served / "summary.json")["tasks"] == simulated.summary["tasks"]
        assert audit(self.served).ok
        for name in simulated.summary["clients"]:
            own = export(self.served, client=name, to=self.folder / f"exported-{name}")
            site = load_file(self.folder / f"{name}-adapter/model.safetensors")
            assert same_tensors(load_file(own / "model.safetensors"), site)


@pytest.fixture
def federation(programs: Programs, tmp_path: Path) -> Iterator[Callable[..., Federation]]:
    yield lambda config, sites=SITES: Federation(config, tmp_path, programs, sites)
    programs.kill_all()


@pytest.mark.parametrize(
    "values",
    [
        {"keep": "best", "local_steps": 2, "frozen_blocks": 1},
        MASKED,
    ],
    ids=["dense", "mask"],
)
def test_the_deployed_federation_is_the_simulated_one(
    federation: Callable[..., Federation], tmp_path: Path, values: dict[str, object]
) -> None:
    config = settings(tmp_path, **values)
    fed = federation(config)
    server, port = fed.serve()
    sites = [fed.join(name, port) for name in SITES]
    simulated = run(config)
    for site in sites:
        assert re.search("the run is complete for", site.end())
    server.end()
    fed.is_as(simulated, round=2)


def test_no_fault_changes_a_bit_of_whole_models(federation: Callable[..., Federation], tmp_path: Path) -> None:
    """A site is killed while it scores weights for the mask, another while it trains, and then the server."""
    config = settings(tmp_path, **MASKED, rounds=3)
    fed = federation(config)
    server, port = fed.serve()
    sites = {name: fed.join(name, port) for name in SITES}
    trains = sample_of(config, SITES, round=1)[0]
    scores = next(name for name in SITES if name != trains)
    for name, work in ((scores, "sensitivity, round 0"), (trains, "train, round 1")):
        sites[name].wait_for(work)
        sites[name].kill()
        server.wait_for(f"{name} is gone")
        sites[name] = fed.join(name, port)
        server.wait_for(f"{name} is back")
    server.wait_for("round 1/3")
    server.kill()
    again, _ = fed.serve(port=port)
    simulated = run(config)
    for site in sites.values():
        site.end()
    assert "resumed after round" in again.end()
    fed.is_as(simulated, round=3)


def test_a_site_that_comes_late_gets_model_and_mask_and_no_fault_changes_a_bit(
    federation: Callable[..., Federation], tmp_path: Path
) -> None:
    """Its certificate is made when the run has begun, and the server is killed once it has joined."""
    config = settings(tmp_path, **{**MASKED, "mask": "random", "calibration_rounds": 1}, participation=1, rounds=5)
    fed = federation(config, SITES[:2])
    server, port = fed.serve()
    first, other = (fed.join(name, port) for name in SITES[:2])
    server.wait_for("round 1/5")
    other.kill()  # nobody gets ahead while it is away
    make_certs(fed.folder / "certs", servers=[], clients=["digits-2"])
    late = fed.join("digits-2", port)
    server.wait_for("digits-2 came after the plan was made and joins before the next round")
    again = fed.join("digits-1", port)
    number = int(server.wait_for(r"digits-2 joins before round (\d)")[1])
    server.wait_for(f"round {number}/5")
    server.kill()
    last, _ = fed.serve(port=port)
    for site in (first, again, late):
        site.end()
    assert "resumed after round" in last.end()
    fed.is_as(run(with_values(config, {"arrive": f"digits-2={number}"})), round=5)


def adapters(folder: Path) -> dict[str, str]:
    return {
        path.name: digest(load_file(path / "adapter_model.safetensors"))
        for path in sorted(RunFolder(folder).adapters.iterdir())
    }


@pytest.mark.parametrize("share", ["A+B+head", "A+head"], ids=["all is shared", "B stays"])
def test_adapters_on_images_go_the_way_of_those_on_texts(
    federation: Callable[..., Federation], tmp_path: Path, share: str
) -> None:
    """One site is killed in mid-run, another comes late."""
    config = lora_settings(tmp_path, share=share, space="factors")
    fed = federation(config, SITES[:2])
    server, port = fed.serve()
    sites = {name: fed.join(name, port) for name in SITES[:2]}
    server.wait_for("round 1/4")
    sites["digits-1"].kill()
    make_certs(fed.folder / "certs", servers=[], clients=["digits-2"])
    sites["digits-2"] = fed.join("digits-2", port)
    server.wait_for("digits-2 came after the plan was made and joins before the next round")
    sites["digits-1"] = fed.join("digits-1", port)
    number = server.wait_for(r"digits-2 joins before round (\d)")[1]
    for program in (*sites.values(), server):
        program.end()
    simulated = run(with_values(config, {"arrive": f"digits-2={number}"}))
    for name, model in adapters(simulated.folder).items():
        assert digest(load_file(fed.folder / f"{name}-adapter/adapter_model.safetensors")) == model
    if share == "A+B+head":
        assert adapters(fed.served) == adapters(simulated.folder)
    metrics = [
        [row for row in rows(folder) if row.get("event") != "mixed"] for folder in (simulated.folder, fed.served)
    ]
    assert metrics[0] == metrics[1]
    assert rows(simulated.folder, "ledger") == rows(fed.served, "ledger")
    assert audit(fed.served).ok
