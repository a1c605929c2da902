"""Runs whose final states are recorded in `same_bits.json`, by machine; read by test_same_bits.py.

python -m tests.runs.same_bits [NAME ...]         record these cases for this machine, or those that are not yet
"""

import json
import platform
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from atlas_fl.config import with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.experiment.export import load_models
from atlas_fl.experiment.run import run_config
from atlas_fl.methods.registry import METHODS, RULES
from atlas_fl.params import digest
from atlas_fl.storage.assets import embedded_dir
from atlas_fl.storage.run_folder import RunFolder
from atlas_fl.storage.tensors import read_tensors
from tests.runs.conftest import configs, image_configs, save_bert, save_vit, saved_once
from tests.runs.reading import rows

FILE = Path(__file__).with_name("same_bits.json")
SMALL: Mapping[str, Any] = {
    **{"samples": 16, "validation_samples": 6, "test_samples": 6, "rounds": 3, "lr": 0.02, "eval_every": 3},
    **{"participation": 0.75, "audit": False, "clients_per_task": 2, "tasks": "movie+trec"},
}
MEASURED = {"seconds", "utilisation"}
"""What a clock says of a round."""


@dataclass(frozen=True)
class Case:
    """The settings of one run."""

    preset: str = ""
    """A preset of the package; else a tiny model of the tests."""
    images: bool = False
    """Take the tiny model of images."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[pytest.MarkDecorator, ...] = ()


def _of_method(name: str) -> Case:
    row = METHODS.get(name)
    ranks = row.settings.get("ranks", "4") if row else "4"
    personal = {"personal_rounds": 1} if row and "personal_rounds" in row.suggested else {}
    space = {"space": "factors"} if RULES.get(name) and RULES[name].in_factors else {}
    dynamic = {"proximal_mu": 0.1} if name == "fedavg_dynamic" else {}
    whole = {"participation": 1.0} if (row.rule if row else name) == "fedavg_by_arrival" else {}
    return Case(settings={**SMALL, "strategy": name, "ranks": ranks, **personal, **space, **dynamic, **whole})


def _cases() -> dict[str, Case]:
    product = (pytest.mark.product,)
    cut = {**SMALL, "ranks": "4", "participation": 1.0}
    paired = {"split": "cpu_2gb=1", "devices": "cpu_2gb+laptop_8gb", "topology": "paired"}
    fetched = (embedded_dir() / "fashion-mnist").is_dir()
    vision = (*product, pytest.mark.skipif(not fetched, reason="`atlas fetch vision` has not been run"))
    quick, whole = {"rounds": 2, "eval_every": 2}, {"rounds": 3, "eval_every": 3}
    momentum = {"carry_momentum": True, "optimizer": "sgd", "momentum": 0.9}
    by_name = {f"method {name}": _of_method(name) for name in {**RULES, **METHODS}}
    return {
        **by_name,
        "cut": Case(settings={**cut, "strategy": "fedavg_cluster", "split": "2", "wire": "int8", "dropout": 0.1}),
        "cut fedavg shared": Case(settings={**cut, "strategy": "fedavg", "split": "1", "head": "server"}),
        "paired": Case(settings={**cut, **paired, "strategy": "atlas_laplacian", "eta": 0.3}),
        "smoke": Case(preset="smoke", marks=product),
        "quick": Case(preset="quick", settings=quick, marks=product),
        "images": Case(images=True, settings={**momentum, **whole, "participation": 1}),
        "images with a mask": Case(images=True, settings={**whole, "mask": "least_sensitive"}),
        "vision-quick": Case(preset="vision-quick", settings=quick, marks=vision),
        "vision-momentum": Case(
            preset="vision-quick",
            settings={**quick, **momentum, "participation": 1, "clients_per_task": 8},
            marks=product,
        ),
        "vision-sparse": Case(preset="vision-sparse", settings=quick, marks=vision),
    }


CASES = _cases()


def machine() -> str:
    """What decides the bits of a product of matrices: processor, instruction set, torch."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


@cache
def recorded() -> dict[str, dict[str, Any]]:
    """Outcomes by machine and case."""
    return json.loads(FILE.read_text()) if FILE.is_file() else {}


def run_case(name: str, models: Path) -> dict[str, Any]:
    """Run the case in a folder of its own; digests of its exported models, its scores and its ledger.

    The tiny models are in the folder `models`, or are written there.
    """
    case = CASES[name]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        values = {key: str(value) for key, value in case.settings.items()}
        if case.preset:
            config = with_values(
                find_preset(case.preset), {**values, "runs_dir": place, "name": "run", "alone": "none"}
            )
        else:
            name, save, make = (
                ("tiny-vit", save_vit, image_configs) if case.images else ("tiny-bert", save_bert, configs)
            )
            config = with_values(make(saved_once(models / name, save), folder)(), values)
        return outcome(run_config(config).folder)


def outcome(folder: Path) -> dict[str, Any]:
    """SHA-256 of the models by client, of the scores, and the bytes of the ledger."""
    run = RunFolder(folder)
    files = [path for place in (run.adapters, run.models) for path in sorted(place.glob("*/*.safetensors"))]
    models = {path.parent.name: digest(read_tensors(path)) for path in files}
    # models with a gate are not exported
    models = models or {client: digest(params) for client, params in load_models(run).items()}
    told = [row for row in rows(folder) if row.get("event") != "mixed"]  # what mixing did is described, not decided
    scores = [{key: value for key, value in row.items() if key not in {*MEASURED, "reason"}} for row in told]
    ledger = [json.loads(line) for line in run.ledger.read_text().splitlines()]
    return {
        "models": sha256(json.dumps(models, sort_keys=True).encode()).hexdigest()[:16],
        "scores": sha256(json.dumps(scores, sort_keys=True).encode()).hexdigest()[:16],
        "bytes": sum(row["bytes"] for row in ledger),
    }


if __name__ == "__main__":
    names = sys.argv[1:] or [name for name in CASES if name not in recorded().get(machine(), {})]
    known = dict(recorded())
    with tempfile.TemporaryDirectory() as models:
        for name in names:
            known[machine()] = {**known.get(machine(), {}), name: run_case(name, Path(models))}
            print(name, known[machine()][name], flush=True)
            FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
