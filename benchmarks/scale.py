"""How do seconds and memory of the server's phases grow with the number of clients?

Phase 1 is measured in three parts: fingerprints of clients with eight examples each (a random BERT of two narrow
blocks), clusters of planted sketches (ten groups, 1,024 numbers a half), and the spread of updates of rank 16 in one
module of 384 to 1,536. Each row is a process of its own. The exponent is that of the last two rows of a part.

    OMP_NUM_THREADS=1 python benchmarks/scale.py
    OMP_NUM_THREADS=1 python benchmarks/scale.py --clients 1000 3000 10000 --parts clusters
"""

import argparse
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from many_clients import make_model

from atlas_fl.aggregation.distances import squared_norms
from atlas_fl.clustering.cluster import cluster_clients
from atlas_fl.clustering.labels import ClusteringSettings
from atlas_fl.config import with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.planning.task_discovery import collect_fingerprints
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


def clusters(clients: int) -> Callable[[], object]:
    """The clusters of so many clients, from sketches of ten groups."""
    draw = np.random.default_rng(0)
    centres, groups = draw.standard_normal((10, 1024)), draw.integers(10, size=clients)
    halves = [3 + centres[groups] + draw.standard_normal((clients, 1024)) for _ in range(2)]
    return lambda: cluster_clients(*halves, settings=ClusteringSettings(seed=1, centre=True))


def spread(clients: int) -> Callable[[], object]:
    """The spread of the updates of so many clients in one module."""
    names = [str(client) for client in range(clients)]
    models = {name: {"q.lora_A": torch.randn(16, 384), "q.lora_B": torch.randn(1536, 16)} for name in names}
    return lambda: squared_norms(models, names, lambda _: 2.0)


PARTS = {"fingerprints": fingerprints, "clusters": clusters, "spread": spread}


def main() -> None:
    """Print the seconds and the memory of each part and number of clients."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 300, 1000, 3000])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--alone", action="store_true", help="one row, in this process")
    given = parser.parse_args()
    if given.alone:
        work = PARTS[given.parts[0]](given.clients[0])
        began = time.perf_counter()
        work()
        print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
        return
    print("part          clients   seconds   MB of the process   exponent")
    for part in given.parts:
        before = None
        for clients in given.clients:
            words = [sys.executable, __file__, "--alone", "--parts", part, "--clients", str(clients)]
            done = subprocess.run(words, check=True, capture_output=True, text=True)
            seconds, megabytes = map(float, done.stdout.split())
            grows = "" if before is None else f"{math.log(seconds / before[1]) / math.log(clients / before[0]):.2f}"
            print(f"{part:<13} {clients:<9} {seconds:7.1f}   {megabytes:<19,.0f} {grows}", flush=True)
            before = clients, seconds


if __name__ == "__main__":
    main()
