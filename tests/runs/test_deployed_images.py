"""Whole models of image clients in processes of their own end with the bits of their simulation."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from atlas_fl.config import Config, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.experiment.export import export_client
from atlas_fl.experiment.rounds import round_participants
from atlas_fl.storage.jsonl import read_json, read_sealed, write_sealed
from atlas_fl.storage.run_folder import RunFolder
from tests.models.tiny_vision import save_tiny
from tests.runs.federation import Federation, Federations, adapters
from tests.runs.finished import FinishedRuns
from tests.runs.processes import Programs
from tests.runs.reading import passing_audit, rows, same_tensors, state
from tests.runtime.conftest import Proxy

SITES = ("digits-0", "digits-1", "digits-2")
DEVICE = "cpu_2gb"
MASKED: dict[str, object] = {
    **{"mask": "least_sensitive", "calibration_rounds": 2, "calibration_examples": 4, "local_steps": 2}
}


WHOLE: dict[str, object] = {"participation": 0.67, "rounds": 2, "lr": 0.02, "nc": "5", "eval_every": 1}
"""Two of three clients train in a round; whoever has not trained yet gets head and mask to be scored."""
ADAPTERS: dict[str, object] = {
    **{"rounds": 5, "batch_size": 8, "lr": 5e-3, "clusters": "oracle", "candidates": "2+4", "dropout": 0.1},
    **{"fingerprint_steps": 2, "fingerprint_batches": 2, "sketch_dim": 64},
}


def settings(folder: Path, preset: str = "vision-quick", **values: object) -> Config:
    """Three clients of the digits, in packs of one as sites are."""
    usual = {
        **{"model": str(save_tiny(folder / "tiny-vit")), "image_size": 16, "tasks": "digits", "clients_per_task": 3},
        **{"samples": 24, "validation_samples": 8, "test_samples": 20, "devices": DEVICE, "pack_tokens": 1},
        **{"audit": True, "runs_dir": str(folder / "runs"), "name": "simulated"},
    }
    return with_values(find_preset(preset), {**usual, **(WHOLE if preset == "vision-quick" else ADAPTERS), **values})


@pytest.fixture
def federation(programs: Programs, tmp_path: Path, finished: FinishedRuns) -> Iterator[Federations]:
    def make(config: Config, sites: Sequence[str] = SITES) -> Federation:
        return Federation(config, tmp_path, dict.fromkeys(sites, DEVICE), programs, finished)

    yield make
    programs.kill_all()


def is_as(fed: Federation, simulated: Path) -> None:
    """Its models, metrics, ledger, plan and scores are those of the simulation, and the sites have their own."""
    served = fed.served.path
    assert same_tensors(state(simulated), state(served))
    for kind in ("metrics", "ledger"):
        assert rows(simulated, kind) == rows(served, kind)
    names = [[path.name for path in RunFolder(folder).plans()] for folder in (simulated, served)]
    assert names[0] == names[1]
    for name in names[0]:
        plans = [read_json(folder / name) for folder in (simulated, served)]
        assert all(plans[0][part] == plans[1][part] for part in ("clients", "data", "sparse"))
    summary = read_json(RunFolder(simulated).summary)
    assert read_json(fed.served.summary)["tasks"] == summary["tasks"]
    passing_audit(served)
    for name in summary["clients"]:
        own = export_client(served, client=name, to=fed.folder / f"exported-{name}")
        site = load_file(fed.folder / f"{name}-adapter/model.safetensors")
        assert same_tensors(load_file(own / "model.safetensors"), site)


@pytest.mark.slow
def test_the_deployed_federation_is_the_simulated_one(federation: Federations, tmp_path: Path) -> None:
    """Of dense models; those under a mask are below."""
    config = settings(tmp_path, local_steps=2, frozen_blocks=1)
    fed = federation(config)
    _, sites = fed.complete()
    assert all("the run is complete for" in said and "evaluate on test, round 2" in said for said in sites)
    is_as(fed, fed.simulated)


@pytest.mark.slow
def test_no_fault_changes_a_bit_of_whole_models(federation: Federations, tmp_path: Path) -> None:
    """A site is killed while it scores weights for the mask, another while it trains, and then the server."""
    config = settings(tmp_path, **MASKED, rounds=3)
    fed = federation(config)
    server, port = fed.serve()
    sites = {name: fed.join(name, port) for name in SITES}
    trains = round_participants(config, SITES, round=1)[0]
    scores = next(name for name in SITES if name != trains)
    for name, work in ((scores, "sensitivity, for the plan"), (trains, "train, round 1")):
        sites[name].wait_for(work)
        sites[name].kill()
        server.wait_for(f"{name} is gone")
        sites[name] = fed.join(name, port)
        server.wait_for(f"{name} is back")
    server.wait_for("round 1/3")
    server.kill()
    again, _ = fed.serve(port=port)
    for site in sites.values():
        site.end()
    assert "resumed after round" in again.end()
    is_as(fed, fed.simulated)


@pytest.mark.slow
def test_a_server_that_starts_again_hands_out_models_as_values_under_their_mask(federation, tmp_path) -> None:
    """Whole ones may be longer than a frame, and then nobody could get its own."""
    config = settings(tmp_path, **{**MASKED, "mask": "random", "calibration_rounds": 1, "sparsity": 0.95}, rounds=1)
    fed = federation(config)
    fed.complete()
    got = fed.folder / "digits-1-adapter/model.safetensors"
    model = load_file(got)
    shutil.rmtree(got.parent)
    write_sealed(fed.served.deliveries, {"heard": [name for name in SITES if name != "digits-1"]})
    server, port = fed.serve()
    proxy = Proxy(port)
    try:
        fed.join("digits-1", proxy.port).end()
    finally:
        proxy.close()
    server.end()
    assert same_tensors(load_file(got), model)
    assert proxy.down < sum(tensor.nbytes for tensor in model.values()) / 2
    # a site whose whole model is there says so, and gets nothing
    server, port = fed.serve("--again", "digits-1")
    assert "the model of digits-1 is in digits-1-adapter already; telling" in fed.join("digits-1", port).end()
    server.end()
    assert read_sealed(fed.served.deliveries)["heard"] == sorted(SITES)


@pytest.mark.product
def test_a_site_that_comes_late_gets_model_and_mask_and_no_fault_changes_a_bit(federation, tmp_path) -> None:
    config = settings(tmp_path, **{**MASKED, "mask": "random", "calibration_rounds": 1}, participation=1, rounds=5)
    fed = federation(config, SITES[:2])
    number = fed.joins_late("digits-2", device=DEVICE)
    is_as(fed, fed.simulate(arrive=f"digits-2={number}"))


@pytest.mark.product
def test_adapters_on_images_go_the_way_of_those_on_texts(federation: Federations, tmp_path: Path) -> None:
    """B stays at the sites."""
    config = settings(tmp_path, "vision-lora", share="A+head", space="factors", strategy="atlas_laplacian")
    fed = federation(config, SITES[:2])
    number = fed.joins_late("digits-2", device=DEVICE)
    simulated = fed.simulate(arrive=f"digits-2={number}")
    assert fed.own_adapters == adapters(simulated)
    metrics = [[row for row in rows(folder) if row.get("event") != "mixed"] for folder in (simulated, fed.served.path)]
    assert metrics[0] == metrics[1]
    assert rows(simulated, "ledger") == rows(fed.served.path, "ledger")
    passing_audit(fed.served.path)
