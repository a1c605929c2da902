"""How do seconds and memory of the server's phases grow with the number of clients?

Fingerprints are of clients with eight examples each (a random BERT of two narrow blocks). Clusters, the graph of
clients and the plan as JSON are those of planted sketches (ten groups, 1,024 numbers a half). Rows are the mixing
matrix of a method, ready to mix, of planted adapters of rank 4 in one module of 32 to 32: averages inside clusters,
the Laplacian step on the graph, `atlas` before halves are measured, and `kriging` with all halves. A step mixes with
the rows of `fedavg_cluster`; spread is that of updates of rank 16 in one module of 384 to 1,536. Each row is a process
of its own. The exponent is that of the CPU seconds of the last two rows of a part; GB are those of the process.

    OMP_NUM_THREADS=1 python benchmarks/scale.py
    OMP_NUM_THREADS=1 python benchmarks/scale.py --clients 1000 3000 10000 --parts clusters graph rows_atlas

With `--figure FILE.png` the rows are drawn, too, beside lines that grow as n and as n^1.2; FILE.csv has their numbers.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from many_clients import make_model

from atlas_fl.aggregation.distances import squared_norms
from atlas_fl.aggregation.matrices import Federation
from atlas_fl.aggregation.mixing import groups_of
from atlas_fl.aggregation.rules import RoundModels, StrategyOptions
from atlas_fl.clustering.cluster import cluster_clients
from atlas_fl.clustering.labels import ClusteringSettings
from atlas_fl.config import with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.methods.method import StepInputs
from atlas_fl.methods.registry import RULES
from atlas_fl.params import Params, ServerState
from atlas_fl.planning.plan import Plan
from atlas_fl.planning.task_discovery import TaskDiscovery, collect_fingerprints, make_client_graph
from atlas_fl.report.csv_text import format_csv
from atlas_fl.report.drawing import draw, save_png
from atlas_fl.report.html.charts import Chart
from atlas_fl.runtime.local import LocalEngine
from atlas_fl.setup.assembly import assemble
from atlas_fl.setup.options import fingerprint_options


def fingerprints(clients: int) -> Callable[[], object]:
    """The fingerprints of so many clients of three tasks."""
    folder = tempfile.mkdtemp()
    make_model(Path(folder))
    values = {
        "model": folder,
        "samples": 8,
        "validation_samples": 2,
        "test_samples": 2,
        "clients_per_task": clients // 3,
    }
    config = with_values(find_preset("null", dial=0), {"strategy": "fedavg_cluster", **values})
    assembly = assemble(config)
    engine = LocalEngine(site=assembly.site)
    return lambda: collect_fingerprints(assembly, engine, fingerprint_options(config))


def planted(clients: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Both halves of the sketches of so many clients of ten groups, and their groups."""
    draw = np.random.default_rng(0)
    centres, groups = draw.standard_normal((10, 1024)), draw.integers(10, size=clients)
    return [3 + centres[groups] + draw.standard_normal((clients, 1024)) for _ in range(2)], groups


def clusters(clients: int) -> Callable[[], object]:
    """The clusters of so many clients, from sketches of ten groups."""
    halves = planted(clients)[0]
    return lambda: cluster_clients(*halves, settings=ClusteringSettings(seed=1, centre=True))


def graph_of(clients: int) -> Callable[[], Any]:
    """The graph of so many clients, by its sketches and clusters."""
    halves = planted(clients)[0]
    names = tuple(f"client-{k:05d}" for k in range(clients))
    task = SimpleNamespace(task=SimpleNamespace(name="one"))
    config = with_values(find_preset("null", dial=0), {"strategy": "atlas_laplacian"})
    assembly: Any = SimpleNamespace(config=config, names=names, clients=(task,) * clients)
    engine: Any = None
    clustering = cluster_clients(*halves, settings=ClusteringSettings(seed=1, centre=True))
    discovery = TaskDiscovery(
        labels=clustering.labels,
        clustering=clustering,
        report=clustering.to_json(),
        warmed_models={},
        sketches=np.stack(halves).astype(np.float32),
        notes=(),
    )
    return lambda: (make_client_graph(assembly, engine, discovery).adjacency, discovery)


def graph(clients: int) -> Callable[[], object]:
    """The graph of these clusters."""
    return graph_of(clients)


def plan(clients: int) -> Callable[[], object]:
    """The graph and the clusters as the JSON of a plan."""
    adjacency, discovery = graph_of(clients)()

    def write() -> str:
        numbers = np.zeros((clients, 1))
        made = Plan(
            clients=(), adjacency=adjacency, importance=numbers, layer_of={}, lora={}, clustering=discovery.report
        )
        return json.dumps(made.to_json())

    return write


def federation_of(clients: int, *, adjacency: Any = None) -> tuple[Federation, dict[str, Params], ServerState]:
    """Clients of ten clusters, their models, and the state of a method that knows their first models and halves."""
    draw = torch.Generator().manual_seed(0)
    groups = np.random.default_rng(0).integers(10, size=clients)
    names = tuple(f"client-{k:05d}" for k in range(clients))
    centres = [torch.randn(32, 4, generator=draw) for _ in range(10)]
    first = {"q.lora_A": torch.randn(4, 32, generator=draw), "q.lora_B": torch.zeros(32, 4)}

    def model(group: int) -> Params:
        return {**first, "q.lora_B": centres[group] + torch.randn(32, 4, generator=draw)}

    halves = {name: {"first": model(group), "second": model(group)} for name, group in zip(names, groups)}
    federation = Federation(
        clients=names,
        weights=np.full(clients, 8.0),
        clusters=groups,
        adjacency=np.zeros((clients, clients)) if adjacency is None else adjacency,
        head_groups=("one",) * clients,
    )
    state: ServerState = {"initial": dict.fromkeys(names, first), "halves": halves}
    return federation, {name: halves[name]["first"] for name in names}, state


def rows_of(name: str, clients: int, *, halves: bool = False, adjacency: Any = None) -> Callable[[], object]:
    """The rows of this method for everyone, as they are mixed with."""
    federation, models, state = federation_of(clients, adjacency=adjacency)
    rule = RULES[name](options=StrategyOptions())
    state = state if halves else {"initial": state["initial"]}
    step = RoundModels(before=models, after=models, server_state=state)
    return lambda: groups_of(rule.matrices(federation, [True] * clients, round=9, models=step)("q.lora_A"))


def rows_clusters(clients: int) -> Callable[[], object]:
    """Averages inside clusters."""
    return rows_of("fedavg_cluster", clients)


def rows_laplacian(clients: int) -> Callable[[], object]:
    """The Laplacian step on the graph of planted sketches."""
    return rows_of("atlas_laplacian", clients, adjacency=graph_of(clients)()[0])


def rows_atlas(clients: int) -> Callable[[], object]:
    """Predictions of clusters, before halves are measured."""
    return rows_of("atlas", clients)


def rows_halves(clients: int) -> Callable[[], object]:
    """Predictions of `kriging` from halves."""
    return rows_of("kriging", clients, halves=True)


def step(clients: int) -> Callable[[], object]:
    """A server step of averages inside clusters."""
    federation, models, _ = federation_of(clients)
    rule = RULES["fedavg_cluster"](options=StrategyOptions())
    inputs = StepInputs(server_state={}, client_models=models, updates=models, federation=federation, round=1)
    return lambda: rule.aggregate(inputs)


def spread(clients: int) -> Callable[[], object]:
    """The spread of the updates of so many clients in one module."""
    names = [str(client) for client in range(clients)]
    models = {name: {"q.lora_A": torch.randn(16, 384), "q.lora_B": torch.randn(1536, 16)} for name in names}
    return lambda: squared_norms(models, names, lambda _: 2.0)


PARTS = {
    "fingerprints": fingerprints,
    "clusters": clusters,
    "graph": graph,
    "plan": plan,
    "rows_clusters": rows_clusters,
    "rows_laplacian": rows_laplacian,
    "rows_atlas": rows_atlas,
    "rows_halves": rows_halves,
    "step": step,
    "spread": spread,
}


def save_figure(rows: list[dict[str, Any]], path: Path) -> None:
    """CPU seconds by clients on logarithmic axes, one line a part, as PNG, and the same rows as CSV beside it."""
    fewest, most = (pick(row["clients"] for row in rows) for pick in (min, max))
    least = min(row["CPU seconds"] for row in rows)
    guides = [
        {"clients": clients, "CPU seconds": least * (clients / fewest) ** power, "part": f"grows as n^{power:g}"}
        for power in (1, 1.2)
        for clients in (fewest, most)
    ]
    parts = list(dict.fromkeys(row["part"] for row in rows + guides))
    log: dict[str, Any] = {"type": "quantitative", "scale": {"type": "log"}}
    axis = {"values": sorted({row["clients"] for row in rows})}
    series = {"field": "part", "type": "nominal", "title": None, "scale": {"domain": parts}}
    chart = Chart(
        name="growth",
        title="CPU seconds of the server's phases by the number of clients",
        note="dashed: growth as n and as n^1.2, from the least number",
        rows=rows + guides,
        spec={
            "height": 320,
            "mark": {"type": "line", "point": True},
            "encoding": {
                "x": {"field": "clients", **log, "axis": axis},
                "y": {"field": "CPU seconds", **log},
                "color": series,
                "strokeDash": {
                    "condition": {"test": "indexof(datum.part, 'grows') == 0", "value": [5, 4]},
                    "value": [1, 0],
                },
            },
        },
    )
    save_png(draw([chart]), path)
    path.with_suffix(".csv").write_text(format_csv(rows))


def main() -> None:
    """Print the seconds and the memory of each part and number of clients."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 300, 1000, 3000])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--figure", type=Path, help="a PNG to draw the rows into")
    parser.add_argument("--alone", action="store_true", help="one row, in this process")
    given = parser.parse_args()
    if given.alone:
        work = PARTS[given.parts[0]](given.clients[0])
        began, used = time.perf_counter(), time.process_time()
        work()
        took = time.perf_counter() - began, time.process_time() - used
        print(*took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
        return
    print("part            clients   seconds   CPU seconds   GB    exponent")
    rows = []
    for part in given.parts:
        before = None
        for clients in given.clients:
            words = [sys.executable, __file__, "--alone", "--parts", part, "--clients", str(clients)]
            done = subprocess.run(words, check=True, capture_output=True, text=True)
            seconds, used, gigabytes = map(float, done.stdout.split())
            grows = "" if before is None else f"{math.log(used / before[1]) / math.log(clients / before[0]):.2f}"
            print(f"{part:<15} {clients:<9} {seconds:<9.1f} {used:<13.2f} {gigabytes:<5.1f} {grows}", flush=True)
            before = clients, used
            row = {"part": part.replace("_", " of "), "clients": clients}
            rows.append({**row, "CPU seconds": round(used, 3), "GB": round(gigabytes, 3)})
    if given.figure:
        save_figure(rows, given.figure)


if __name__ == "__main__":
    main()
