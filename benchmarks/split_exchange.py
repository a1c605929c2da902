"""How long does a training step over a cut take, against the same unsplit?

MiniLM, LoRA of rank 8 on query and value, batches of 16 sequences of 8 to 40 random tokens, the cut at block 3.
A site in this process and a server in another, over loopback mutual TLS, turn about with training on the whole model in
this process: `ratio tls/unsplit`, of the median seconds of a step.

    python benchmarks/split_exchange.py [--turns N] [--steps N] [--threads N]
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atlas_fl.client.job import ClientTokens, Job, Site
from atlas_fl.client.local_training import train
from atlas_fl.client.options import TrainOptions
from atlas_fl.client.split_client import client_side_of, train_below
from atlas_fl.client.split_server import TrainingHalf
from atlas_fl.data.task import Task
from atlas_fl.models.backbone import Backbone, module_dims
from atlas_fl.models.loading import load_backbone
from atlas_fl.models.lora import init_adapters, init_head
from atlas_fl.models.registry import head_shapes
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.runtime.coordinator.site_worker import ask_server_half
from atlas_fl.runtime.coordinator.split_server import SplitServer
from atlas_fl.runtime.transport.certificates import make_certs, open_certs
from atlas_fl.runtime.transport.client import Link
from atlas_fl.runtime.transport.event_loop import LoopThread
from atlas_fl.runtime.transport.server import Server
from atlas_fl.runtime.transport.sessions import Sessions
from atlas_fl.split.channel import Cut
from atlas_fl.split.model import load_client_part

CUT, BATCH, RANK = 3, 16, 8
AIM = 1.25


def site_of(backbone: Backbone, *, steps: int) -> Site:
    """A client with as many random sequences as its steps need."""
    task = Task(name="random", num_labels=2, metric="accuracy", load=lambda _: sys.exit("nothing is read"))
    draw = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(draw.integers(8, 41, size=steps * BATCH))])
    encoded = EncodedExamples(
        ids=draw.integers(1000, 20000, offsets[-1]),
        types=np.zeros(offsets[-1], dtype=np.int64),
        offsets=offsets,
        labels=draw.integers(2, size=steps * BATCH),
    )
    data = {"site-0": ClientTokens(task=task, splits={"train": encoded})}
    return Site(backbone=backbone, data=data, targets=("query", "value"), scale=lambda _: 2.0, max_tokens=1 << 20)


def job_of(site: Site) -> Job:
    dims = {name: module_dims(module) for name, module in site.modules.items()}
    shapes = head_shapes(site.backbone.family, hidden=site.backbone.hidden, num_labels=2)
    params = {**init_adapters(dims, dict.fromkeys(dims, RANK), seed=1), **init_head(shapes, seed=1, group="random")}
    options = TrainOptions(seed=0, batch_size=BATCH, clip=1.0)
    return Job(client="site-0", params=params, round=1, options=options, cut=Cut(blocks=CUT))


def serve(folder: Path, steps: int) -> None:
    """Answer a site's questions until the other end closes standard input."""
    site = site_of(load_backbone("minilm"), steps=steps)
    with LoopThread() as threads, SplitServer(site) as suffixes:

        async def answer(_name: str, head: Mapping[str, Any], tensors: Any) -> tuple[Any, Any]:
            if head["kind"] == "cut":
                answered = await suffixes.answer_request(1, head, tensors)
                assert answered is not None, "the job begins again only where clients share adapters"
                return answered
            suffixes.begin_job(1, "train", job_of(site))
            return {}, {}

        sessions = Sessions(
            answer=answer,
            admit=lambda _name, _hello: {},
            listed=lambda: {"site-0": None},
            on_presence=lambda _name, _here: None,
        )
        server = Server(sessions, open_certs(folder / "server"), host="127.0.0.1", port=0)
        print(threads.wait(server.start), flush=True)
        sys.stdin.read()
        threads.wait(server.stop)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of every turn of two ways to do one thing."""

    ways: tuple[str, str]
    seconds: np.ndarray
    """(turns, 2)."""

    def print_ratio(self) -> None:
        middle = np.median(self.seconds, axis=0)
        for name, samples in zip(self.ways, self.seconds.T, strict=True):
            low, high = np.percentile(samples, [5, 95])
            print(f"{name:12} {1000 * np.median(samples):8.1f} ms a step (p5 {1000 * low:.1f}, p95 {1000 * high:.1f})")
        name = "/".join(self.ways)
        print(f"ratio {name}: {middle[0] / middle[1]:.2f} (aim {AIM})\n")


def time_in_turns(ways: Mapping[str, Callable[[], float]], *, turns: int) -> Timing:
    """The first turn of each warms up and is left out."""
    seconds = np.array([[way() for way in ways.values()] for _ in range(turns + 1)])
    first, second = ways
    return Timing(ways=(first, second), seconds=seconds[1:])


def seconds_per_step(work: Callable[[], object], *, steps: int) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) / steps


def over_tls(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "certs"
        make_certs(folder, servers=["localhost"], clients=["site-0"])
        words = [sys.executable, __file__, "--serve", str(folder)]
        words += ["--steps", str(args.steps), "--threads", str(args.threads)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            whole = site_of(load_backbone("minilm"), steps=args.steps)
            part = replace(whole, backbone=load_client_part("minilm", blocks=CUT))
            job = job_of(whole)
            half = TrainingHalf(job, whole)
            alone = replace(job, cut=None)
            certs = open_certs(folder / "site-0")
            with Link(
                f"localhost:{port}", certs, hello=dict, patience=60, first_patience=60, on_event=lambda _: None
            ) as link:

                def split() -> None:
                    link.exchange({"kind": "begin"})
                    server = partial(ask_server_half, link=link, number=1)
                    way = client_side_of(job, part, indices=half.places, server=server)
                    train_below(half.side.below, part, way)

                ways = {
                    "tls": lambda: seconds_per_step(split, steps=args.steps),
                    "unsplit": lambda: seconds_per_step(lambda: train([alone], whole), steps=args.steps),
                }
                time_in_turns(ways, turns=args.turns).print_ratio()
                megabytes = [
                    size / 2**20 / args.steps / (args.turns + 1) for size in (link.sent_bytes, link.received_bytes)
                ]
                print(f"{megabytes[0]:.2f} MB up and {megabytes[1]:.2f} MB down in a step\n")
            assert server.stdin is not None
            server.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--serve", help="the server's process: its folder of certificates")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.serve is not None:
        serve(Path(args.serve), args.steps)
        return
    print(f"MiniLM, batch {BATCH}, cut {CUT}, {args.turns} turns of {args.steps} steps, {args.threads} thread(s)\n")
    over_tls(args)


if __name__ == "__main__":
    main()
