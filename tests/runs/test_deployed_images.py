"""Whole models of image clients in processes of their own end with the bits of their simulation."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from atlas_fl.audit import audit
from atlas_fl.config import Config, to_toml, with_values
from atlas_fl.export import export
from atlas_fl.io.certs import make_certs
from atlas_fl.io.results import read_json
from atlas_fl.presets import find_preset
from atlas_fl.run import run
from tests.models.tiny_vision import save_tiny
from tests.runs.processes import Programs
from tests.runs.reading import rows, same_tensors, state

SITES = ("digits-0", "digits-1", "digits-2")


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


@pytest.mark.parametrize(
    "values",
    [
        {"keep": "best", "local_steps": 2, "frozen_blocks": 1},
        {"mask": "least_sensitive", "calibration_rounds": 2, "calibration_examples": 4, "local_steps": 2},
    ],
    ids=["dense", "mask"],
)
def test_the_deployed_federation_is_the_simulated_one(
    programs: Programs, tmp_path: Path, values: dict[str, object]
) -> None:
    config = settings(tmp_path, **values)
    make_certs(tmp_path / "certs", servers=["localhost", "127.0.0.1"], clients=list(SITES))
    (tmp_path / "fed.toml").write_text(to_toml(config))
    words = ("--config", "fed.toml", "--name", "served", "--host", "127.0.0.1", "--port", "0")
    server = programs.start("serve", *words, "--certs", "certs/server", folder=tmp_path)
    port = server.wait_for(r"listening on 127\.0\.0\.1:(\d+)")[1]
    sites = [
        programs.start(
            *("join", f"localhost:{port}", "--certs", f"certs/{name}", "--task", "digits", "--part", name[-1]),
            *("--device", "cpu_2gb"),
            folder=tmp_path,
        )
        for name in SITES
    ]
    simulated = run(config)
    for site in sites:
        assert re.search("the run is complete for", site.end())
    server.end()
    served = tmp_path / "runs/served"
    assert same_tensors(state(simulated.folder, round=2), state(served, round=2))
    for kind in ("metrics", "ledger"):
        assert rows(simulated.folder, kind) == rows(served, kind)
    plans = [read_json(folder / "plan.json") for folder in (simulated.folder, served)]
    assert all(plans[0][part] == plans[1][part] for part in ("clients", "data", "sparse"))
    assert [read_json(folder / "summary.json")["tasks"] for folder in (simulated.folder, served)] == [
        simulated.summary["tasks"]
    ] * 2
    assert audit(served).ok
    for name in SITES:
        own = export(served, client=name, to=tmp_path / f"exported-{name}")
        site = load_file(tmp_path / f"{name}-adapter/model.safetensors")
        assert same_tensors(load_file(own / "model.safetensors"), site)
