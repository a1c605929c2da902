"""What do a hundred clients cost one server: time of a round, memory for a client, and does it grow?

A real federation over loopback mutual TLS: the server in a process of its own, sites in threads of a few processes,
each with its own stream, session, data and model. The model is a random BERT so small that the streams are what is
seen; every round all clients train two steps and one average goes back to all. Memory is the server's resident set:

    memory per client      from where it listens to the end of round 5, over the clients; with what a run loads once
    of it before training  the same until all have registered: streams, sessions, seats and the server's thread
    growth                 from the end of round 5 on

    python benchmarks/many_clients.py [--clients 100] [--rounds 50] [--processes 4]

With `--own` it is a simulation in one process instead, in which each client keeps an adapter of its own (`--strategy
local`) and few take part in a round: memory, checkpoint and seconds of every tenth round.

    python benchmarks/many_clients.py --own --clients 10000 --participation 0.02 --rounds 20 [--hidden 256] [--rank 32]
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atlas_fl.config import Config, with_values
from atlas_fl.config.schema import RunConfig
from atlas_fl.deployment import site
from atlas_fl.deployment.server import remote_backend
from atlas_fl.deployment.service import ServerOptions
from atlas_fl.events import Event, Note, RoundFinished
from atlas_fl.experiment.run import run_config
from atlas_fl.runtime.transport.certificates import make_certs

WARM = 5
"""Rounds after which everything is loaded and warm."""
WORDS = [f"w{i}" for i in range(40)]
SECONDS = 600.0


def names(count: int) -> list[str]:
    return [f"site-{k}" for k in range(count)]


def make_model(folder: Path, **other: int) -> None:
    """A random BERT of two narrow blocks, or of other sizes, with a tokenizer of forty words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    core = Tokenizer(models.WordLevel({word: k for k, word in enumerate([*special, *WORDS])}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    roles = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=core, **roles).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"vocab_size": len(core.get_vocab()), "max_position_embeddings": 64, **other}
    BertModel(BertConfig(**sizes)).save_pretrained(folder)


def make_data(folder: Path, count: int) -> None:
    """Forty texts for every site; the label is whether the first word is of the first half."""
    for k, name in enumerate(names(count)):
        draw = np.random.default_rng(k)
        lines = ["text,label"]
        for _ in range(40):
            words = draw.integers(len(WORDS), size=int(draw.integers(4, 12)))
            lines.append(f"{' '.join(WORDS[word] for word in words)},{int(words[0] < 20)}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


def config_of(folder: Path, rounds: int) -> Config:
    settings = {
        **{"model": str(folder / "model"), "strategy": "fedavg", "ranks": "2", "candidates": "2", "max_length": "16"},
        **{"samples": "16", "validation_samples": "4", "test_samples": "4", "batch_size": "8", "lr": "1e-3"},
        **{
            "fingerprint_steps": "1",
            "rounds": str(rounds),
            "eval_every": str(WARM),
            "runs_dir": str(folder / "runs"),
        },
    }
    return with_values(Config(run=RunConfig(name="many")), settings)


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def own_memory() -> int:
    """Bytes of this process in memory that are of no file, and so cannot be dropped."""
    return 1024 * int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0])


def serve(folder: Path, count: int, rounds: int) -> None:
    """Run the federation; one line of JSON for its port, and one at the end for what was measured."""
    marks: dict[str, int] = {}
    sizes, seconds = list[int](), list[float]()

    def on_event(event: Event) -> None:
        if isinstance(event, Note) and event.text.startswith("listening"):
            marks["listening"] = resident()
            print(json.dumps({"port": int(event.text.split(" for ")[0].rpartition(":")[2])}), flush=True)
        elif isinstance(event, Note) and f"({count} of {count} here)" in event.text:
            marks["here"] = resident()
        elif isinstance(event, RoundFinished):
            sizes.append(resident())
            seconds.append(event.seconds)

    service = ServerOptions(certs=folder / "certs/server", host="127.0.0.1", port=0, wait=SECONDS, deadline=SECONDS)
    run_config(config_of(folder, rounds), backend=remote_backend(service), on_event=on_event)
    print(json.dumps({**marks, "sizes": sizes, "seconds": seconds}), flush=True)


def join_all(folder: Path, port: int, mine: list[str]) -> None:
    """These sites, each in a thread."""
    site.assemble = one_at_a_time(site.assemble)  # type: ignore[attr-defined]
    threads = [
        threading.Thread(
            target=site.join_federation,
            args=[
                site.SiteOptions(
                    address=f"localhost:{port}",
                    certs=folder / "certs" / name,
                    task=f"texts={folder / name}.csv",
                    device="gpu_16gb",
                    first_seconds=SECONDS,
                    to=str(folder / f"{name}-adapter"),
                )
            ],
        )
        for name in mine
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def one_at_a_time(work: Callable[..., Any]) -> Callable[..., Any]:
    """Loading sets what the whole process computes with for a moment, so threads must not do it at once."""
    lock = threading.Lock()

    def run_locked(*args: Any, **how: Any) -> Any:
        with lock:
            return work(*args, **how)

    return run_locked


@contextlib.contextmanager
def program(script: str, *words: str) -> Iterator["subprocess.Popen[str]"]:
    """This script with these words, in a process of its own that is gone in the end."""
    with subprocess.Popen([sys.executable, script, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def measure(args: argparse.Namespace) -> None:
    rounds = args.rounds + WARM
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        folder, everyone = Path(made), names(args.clients)
        make_certs(folder / "certs", servers=["localhost"], clients=everyone)
        make_model(folder / "model")
        make_data(folder, args.clients)
        words = ["--clients", str(args.clients), "--rounds", str(rounds)]
        server = stack.enter_context(program(__file__, "--serve", made, *words))
        assert server.stdout is not None
        port = json.loads(server.stdout.readline())["port"]
        for k in range(args.processes):
            mine = ",".join(everyone[k :: args.processes])
            stack.enter_context(program(__file__, "--join", made, "--port", str(port), "--names", mine))
        print_measurements(json.loads(server.stdout.readline()), args)


def simulate(folder: Path, args: argparse.Namespace) -> None:
    """A run in which clients keep their own adapters; what every tenth round leaves in memory and on the disk."""
    sizes = {"hidden_size": args.hidden, "num_attention_heads": args.hidden // 16, "intermediate_size": 2 * args.hidden}
    make_model(folder / "model", **sizes)
    draw = np.random.default_rng(0)
    lines = ["text,label,client"]
    for client in range(args.clients):
        texts = draw.integers(len(WORDS), size=(12, 8))
        lines += [f"{' '.join(WORDS[word] for word in words)},{int(words[0] < 20)},c{client}" for words in texts]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    rounds = args.rounds
    settings = {
        **{"tasks": "none", "task": f"x={folder / 'rows.csv'},text=text,label=label,client=client", "alone": "none"},
        **{"model": str(folder / "model"), "strategy": "local", "ranks": str(args.rank), "candidates": str(args.rank)},
        **{"participation": str(args.participation), "rounds": str(rounds), "eval_every": str(rounds)},
        **{"samples": "none", "validation_samples": "none", "test_samples": "none", "max_length": "16"},
        **{"batch_size": "8", "runs_dir": str(folder / "runs")},
    }
    started = time.perf_counter()

    def on_event(event: Event) -> None:
        if isinstance(event, RoundFinished) and (event.round == 1 or event.round % 10 == 0 or event.round == rounds):
            newest = max((folder / "runs/own/checkpoints").iterdir())
            files = [path.stat() for path in newest.iterdir()]
            stored = sum(file.st_size for file in files)
            new = sum(file.st_size for file in files if file.st_nlink == 1)
            print(
                f"round {event.round}: {event.seconds:.1f} s, resident {resident() / 1e6:.0f} MB, of no file"
                f" {own_memory() / 1e6:.0f} MB, newest checkpoint {stored / 1e6:.0f} MB, of it written"
                f" {new / 1e6:.0f} MB, {time.perf_counter() - started:.0f} s in all",
                flush=True,
            )

    print(f"resident {resident() / 1e6:.0f} MB before the run", flush=True)
    run = run_config(with_values(Config(run=RunConfig(name="own")), settings), on_event=on_event)
    summary = json.loads((run.folder / "summary.json").read_text())
    print(
        "seconds by phase:", ", ".join(f"{phase} {spent:.0f}" for phase, spent in summary["seconds"]["phases"].items())
    )
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    print(f"peak {peak / 1e3:.0f} MB of resident memory; {args.clients} clients, rank {args.rank}, width {args.hidden}")


def print_measurements(measurements: dict[str, Any], args: argparse.Namespace) -> None:
    sizes, seconds = np.array(measurements["sizes"]) / 2**20, np.array(measurements["seconds"])[WARM:]
    listening, here = measurements["listening"] / 2**20, measurements["here"] / 2**20
    print(f"{args.clients} clients in {args.processes} processes; load {os.getloadavg()[0]:.1f}")
    print(f"server: {listening:.0f} MB before any client, {sizes[WARM - 1]:.0f} MB after round {WARM}")
    print(f"memory per client: {(sizes[WARM - 1] - listening) / args.clients:.2f} MB")
    print(f"of it before training: {(here - listening) / args.clients:.2f} MB")
    print(f"growth over {args.rounds} rounds: {sizes[-1] - sizes[WARM - 1]:.1f} MB")
    every = ", ".join(f"{size:.0f}" for size in sizes[WARM - 1 :: max(1, args.rounds // 10)])
    print(f"resident MB on the way: {every}")
    p50, p95 = np.percentile(seconds, [50, 95])
    print(f"round seconds p50/p95: {p50:.2f} / {p95:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--own", action="store_true", help="simulate clients that keep their own adapters")
    parser.add_argument("--participation", type=float, default=0.02, help="share of clients in a round (--own)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (--own)")
    parser.add_argument("--rank", type=int, default=32, help="rank of the adapters (--own)")
    for inner in ("serve", "join", "names"):
        parser.add_argument(f"--{inner}", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.own:
        with tempfile.TemporaryDirectory() as made:
            simulate(Path(made), args)
    elif args.serve is not None:
        serve(Path(args.serve), args.clients, args.rounds)
    elif args.join is not None:
        join_all(Path(args.join), args.port, args.names.split(","))
    else:
        measure(args)


if __name__ == "__main__":
    main()
