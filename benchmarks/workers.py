"""Seconds of one round with one worker process and with two, and what a worker takes of the memory.

python benchmarks/workers.py [--rounds 3]

The preset `quick` in packs of `--pack-tokens`, on the embedded model. Both engines are alive throughout and take turns
round by round, with one thread for each worker. Beside the wall's seconds stand the processor's of the busiest worker,
which others on the machine lengthen less. Memory is private (USS) and proportional (PSS) as Linux counts them.
"""

import argparse
import os
import time
from collections.abc import Iterable
from contextlib import ExitStack
from statistics import median

import psutil
import torch

from atlas_fl.client.job import Job
from atlas_fl.config import with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.events import ignore
from atlas_fl.experiment.backends import multiprocess_backend
from atlas_fl.params import digest
from atlas_fl.runtime.engine import Engine
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import train_options
from atlas_fl.storage.tensors import encoded_size


def a_round(assembly: Assembly, engine: Engine) -> tuple[float, str]:
    """(seconds, digest of all models) of training every client once."""
    options, rank = train_options(assembly.config, with_images=False), 8
    ranks = (rank,) * assembly.shape.num_layers
    jobs = [
        Job(client=client.name, params=assembly.initial_params(client, ranks), round=1, options=options)
        for client in assembly.clients
    ]
    began = time.perf_counter()
    updates = engine.run("train", jobs)
    seconds = time.perf_counter() - began
    return seconds, "".join(digest(update.params) for update in updates)


def children() -> set[int]:
    """The processes that this one has started, by their ids."""
    return {child.pid for child in psutil.Process().children()}


def busy(pids: Iterable[int]) -> dict[int, float]:
    """Processor seconds so far, by process."""
    return {pid: psutil.Process(pid).cpu_times().user for pid in pids}


def memory(pids: Iterable[int]) -> tuple[float, float]:
    """(USS, PSS) in MB, the median over these processes."""
    usages = [psutil.Process(pid).memory_full_info() for pid in pids]
    return median(usage.uss for usage in usages) / 1e6, median(usage.pss for usage in usages) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--pack-tokens", type=int, default=1500)
    options = parser.parse_args()
    settings = {"samples": str(options.samples), "pack_tokens": str(options.pack_tokens)}
    os.environ["OMP_NUM_THREADS"] = "1"  # the workers' too
    torch.set_num_threads(1)
    taken: dict[int, list[float]] = {1: [], 2: []}
    worked: dict[int, list[float]] = {1: [], 2: []}
    with ExitStack() as stack:
        backends, workers, digests = {}, dict[int, set[int]](), set()
        for count in taken:
            config = with_values(find_preset("quick"), {**settings, "workers": str(count)})
            others = children()
            backends[count] = stack.enter_context(multiprocess_backend(config, ignore))
            workers[count] = children() - others
            assert len(workers[count]) == count, "somebody else starts processes too"
        for _ in range(options.rounds):
            for count, backend in backends.items():
                before = busy(workers[count])
                seconds, models = a_round(*backend)
                taken[count].append(seconds)
                worked[count].append(max(now - before[pid] for pid, now in busy(workers[count]).items()))
                digests.add(models)
        assert len(digests) == 1, "one worker and two end with other models"
        for count, pids in workers.items():
            uss, pss = memory(pids)
            print(
                f"{count} worker(s): {median(taken[count]):.2f} s a round, busiest {median(worked[count]):.2f} s of a"
                f" processor; each {uss:.0f} MB USS, {pss:.0f} MB PSS"
            )
        weights = encoded_size(backends[1][0].site.backbone.frozen) / 1e6
        print(f"backbone: {weights:.0f} MB, once in memory for a run; the same models with both")
        print(f"ratio 1/2 of the busiest worker's processor: {median(worked[1]) / median(worked[2]):.2f}")
        print(f"ratio 1/2: {median(taken[1]) / median(taken[2]):.2f}")


if __name__ == "__main__":
    main()
