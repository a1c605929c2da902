"""A run folder of invented numbers with everything in it that a figure or a table can show."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atlas_fl.config import to_toml, validate, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.experiment.summary import summarise
from atlas_fl.report.federation_results import federation_results
from atlas_fl.report.finished_runs import FinishedRun
from atlas_fl.report.html.comparison_page import federations_page
from atlas_fl.report.html.elements import markdown
from atlas_fl.rng import generator
from atlas_fl.storage.jsonl import append_rows, write_json
from atlas_fl.storage.run_folder import RunFolder
from atlas_fl.storage.tensors import write_tensors

DEVICES = ("cpu_2gb", "tablet_4gb", "laptop_8gb", "gpu_16gb")
TASKS = {"movie": (0.50, 0.82), "trec": (0.24, 0.86), "pairs": (0.52, 0.80), "sms": (0.86, 0.97)}
TASKS |= {"scramble": (0.51, 0.7), "cola": (0.69, 0.8), "a-task-with-a-long-name": (0.5, 0.9)}
LAYERS, DIM = 6, 64
MEMORY = {"total": 2_000_000_000, "frozen weights": 91_000_000, "activations": 60_000_000, "runtime": 400_000_000}
MEMORY |= {"adapters and head": 1_900_000, "gradients": 1_900_000, "Adam moments": 3_800_000}


def results_page(runs: Sequence[FinishedRun], *, control: str) -> str:
    """The page of these runs, as `atlas results` writes it."""
    return markdown(federations_page(federation_results(runs, control=control)), folded=True)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What the invented run is like."""

    tasks: int = 3
    clients_per_task: int = 3
    rounds: int = 6
    seed: int = 42
    strategy: str = "atlas"
    gain: float = 0.0
    undecided: bool = False
    refused: bool = False
    sends: bool = True
    sketches: bool = True
    f1: bool = False
    calibration_error: float | None = None
    eval_every: int = 1
    interleaved: bool = False
    """The tasks' clients in turn, so that clusters do not lie side by side."""


def plan_of(scene: Scenario) -> dict[str, Any]:
    draw = generator(scene.seed, "plan")
    tasks = list(TASKS)[: scene.tasks]
    names = [(f"{task}-{index}", task) for task in tasks for index in range(scene.clients_per_task)]
    if scene.interleaved:
        names.sort(key=lambda entry: entry[0].rsplit("-", 1)[1])
    labels = [tasks.index(task) for _, task in names]
    if scene.undecided:
        labels[-1] = -1
    same = np.equal.outer(labels, labels) & (np.array(labels) >= 0)
    similarity = similarity_of(same, draw)
    importance = np.sort(draw.dirichlet(np.full(LAYERS, 4.0), len(names)), axis=1)
    return {
        "clients": [client_of(names[index], index, labels[index], draw) for index in range(len(names))],
        "adjacency": (np.where(same, similarity, 0.0) - np.diag(same.diagonal())).tolist(),
        "importance": importance.tolist(),
        "layer_of": {},
        "lora": {"alpha": None, "rslora": False},
        "clustering": {
            "labels": labels,
            "method": "corrected",
            "k_table": [k_row(k, tasks=scene.tasks) for k in range(1, 6)],
            "similarity": similarity.tolist(),
            "reliability": draw.uniform(0.3, 0.8, len(names)).tolist(),
            "structure": {"found": True, "reason": "silhouette 0.71 is above 0.21", "p_value": 0.02},
            "explained_variance": 0.97,
            "warnings": [],
            "agreement": {"purity": 1.0, "ari": 1.0, "nmi": 1.0},
        },
        "data": [data_of(name, task, draw) for name, task in names],
        "notes": [],
    }


def similarity_of(same: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """High inside a cluster and low between two, with noise; a client is wholly like itself."""
    noise = draw.uniform(0, 0.08, same.shape)
    similarity = np.clip(np.where(same, 0.93, 0.15) + (noise + noise.T) / 2, 0, 1)
    np.fill_diagonal(similarity, 1.0)
    return similarity


def client_of(named: tuple[str, str], index: int, cluster: int, draw: np.random.Generator) -> dict[str, Any]:
    """A client of the device that is its turn; the larger the device, the larger its ranks."""
    name, task = named
    step = index % 4
    return {
        "name": name,
        "task": task,
        "device": DEVICES[step],
        "examples": 200,
        "cluster": cluster,
        "ranks": sorted(draw.choice([4, 8, 16, 32, 64][: 2 + step], LAYERS).tolist()),
        "budget_bytes": 2_000_000 * (1 + step),
        "largest_rank": 16 * (1 + step),
        "memory": MEMORY,
        "predicted": {"up_bytes": 300_000, "down_bytes": 300_000, "memory_bytes": 552_900_000, "seconds": 21.5},
        "cut": None,
    }


def k_row(k: int, *, tasks: int) -> dict[str, Any]:
    """A line of the k table; one cluster has few scores, and as many as there are tasks have the best."""
    if k == 1:
        return {"k": 1, "silhouette": None, "davies_bouldin": None, "atlas": None}
    return {
        "k": k,
        "silhouette": 0.4 - 0.05 * abs(k - tasks),
        "davies_bouldin": 1.2 + 0.1 * k,
        "calinski_harabasz": 3.5 + k,
        "atlas": 0.45 - 0.15 * max(0, k - tasks),
        "singletons": max(0, k - 3),
        "chosen": k == tasks,
    }


def data_of(name: str, task: str, draw: np.random.Generator) -> dict[str, Any]:
    """What the plan tells of a client's labels; the last task is a regression, and tells less."""
    row: dict[str, Any] = {"client": name, "task": task, "examples": {"train": 200, "validation": 50, "test": 60}}
    if task == list(TASKS)[-1]:
        return row | {"labels": {"mean": 2.5, "std": 1.0}}
    labels = {"trec": ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")}.get(task, ("a class with a name", "b"))
    counts = draw.multinomial(200, draw.dirichlet(np.full(len(labels), 0.4)))
    return row | {"labels": dict(zip(labels, counts.tolist())), "distance": 0.25}


def metrics_of(plan: dict[str, Any], scene: Scenario) -> list[dict[str, Any]]:
    draw = generator(scene.seed, "metrics", scene.strategy)
    rows = []
    for at in range(scene.rounds + 1):
        for client in plan["clients"]:
            majority, top = TASKS[client["task"]]
            for split in ("train", "validation", "test"):
                evaluated = at % scene.eval_every == 0 or at == scene.rounds
                if (split == "train" and at == 0) or (split != "train" and not evaluated):
                    continue
                reached = majority + (top + scene.gain - majority) * (1 - np.exp(-at / 2))
                score = float(np.clip(reached + draw.normal(0, 0.015), 0, 1))
                row = {"round": at, "client": client["name"], "task": client["task"], "split": split, "seconds": 1.5}
                row |= {"loss": 1.2 * (1 - score) + 0.1 * (split != "train"), "examples": 130, "majority": majority}
                row |= {"accuracy": score, "f1": score - 0.03, "primary": score - 0.03 * scene.f1}
                row |= {} if scene.calibration_error is None else {"ece": scene.calibration_error}
                rows.append(row)
    if scene.refused:
        rows.append({"round": 2, "client": plan["clients"][1]["name"], "event": "refused", "reason": "head.bias: NaN"})
    return rows


def ledger_of(plan: dict[str, Any], scene: Scenario) -> list[dict[str, Any]]:
    rows = []
    for client in plan["clients"] if scene.sends else ():
        name = client["name"]
        rows.append({"round": 0, "client": name, "direction": "up", "kind": "fingerprint", "bytes": 8_300})
        for at in range(1, scene.rounds + 1):
            for way in ("up", "down"):
                size = sum(client["ranks"]) * 2 * 768 * 4
                rows.append({"round": at, "client": name, "direction": way, "kind": "adapter", "bytes": size})
                rows.append({"round": at, "client": name, "direction": way, "kind": "head", "bytes": 6_200})
    return rows


def sketches_of(plan: dict[str, Any], scene: Scenario) -> dict[str, torch.Tensor]:
    draw = generator(scene.seed, "sketches")
    centres = {label: draw.normal(size=DIM) for label in sorted(set(plan["clustering"]["labels"]))}
    own = np.stack([centres[label] + 0.35 * draw.normal(size=DIM) for label in plan["clustering"]["labels"]])
    halves = {half: own + 0.25 * draw.normal(size=own.shape) for half in ("first", "second")}
    return {f"sketch/{half}": torch.tensor(v / np.linalg.norm(v, axis=1, keepdims=True)) for half, v in halves.items()}


def write_run(path: Path, scene: Scenario) -> Path:
    """Write the folder of a complete run."""
    path.mkdir(parents=True)
    folder, plan = RunFolder(path), plan_of(scene)
    metrics, ledger = metrics_of(plan, scene), ledger_of(plan, scene)
    folder.config.write_text(f'[mixing]\nstrategy = "{scene.strategy}"\n[run]\nseed = {scene.seed}\n')
    write_json(folder.plan, plan)
    append_rows(folder.metrics, metrics)
    append_rows(folder.ledger, ledger)
    if scene.sketches:
        write_tensors(folder.sketches, sketches_of(plan, scene))
    run = {"name": path.name, "preset": "quick", "strategy": scene.strategy, "model": "minilm", "seed": scene.seed}
    summary = summarise(
        run=run | {"config_hash": "0123456789abcdef"},
        metrics=metrics,
        ledger=ledger,
        plan=plan,
        phase_seconds={"plan": 61.2, "train": 183.4, "mix": 0.8, "evaluate": 31.0},
        round_seconds={},
        memory={"rss_bytes": 1_234_000_000},
        full_model_bytes=90_900_000,
    )
    write_json(folder.summary, summary)
    return path


@pytest.fixture
def make_run(tmp_path) -> Callable[..., Path]:
    """Writes the folder of an invented run: `make_run("name", rounds=3, refused=True)`."""
    return lambda name="run", **changes: write_run(tmp_path / name, Scenario(**changes))


SMALL = {"tasks": 2, "clients_per_task": 2, "rounds": 2}
"""Size of the runs of a federation."""
GAINS = {"local": 0.0, "fedavg": 0.05, "fedper": 0.08}
"""What the methods of an invented federation are better by."""


@pytest.fixture
def make_federation(make_run) -> Callable[..., None]:
    """Writes runs of a federation: a run of every method for every seed."""

    def make(
        dial: int, *, gains: Mapping[str, float] = GAINS, seeds: tuple[int, ...] = (1, 2, 3), **values: Any
    ) -> None:
        for name, gain in gains.items():
            for seed in seeds:
                folder = make_run(
                    f"{dial}-{name}-{seed}{''.join(map(str, values.values()))}", gain=gain, seed=seed, **SMALL
                )
                config = with_values(
                    find_preset("contradiction", dial=dial), {"strategy": name, "seed": seed, **values}
                )
                (folder / "config.toml").write_text(to_toml(validate(config)))

    return make
