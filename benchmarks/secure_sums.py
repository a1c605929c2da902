"""What do secure sums cost over the plain exchange of a round? Bytes, CPU and wall seconds, with and without dropouts.

A hundred sites, each a process, are connected to the server, this process, over mutual TLS on loopback, by the client
loop, link, streams, sessions and client manager of `atlas join` and `atlas serve`. In a round each gets the adapters of
MiniLM (q and v of six layers, rank 8) and answers the job of training at once, with a change of its own; the server
makes the mean, of what came or by a secure sum. Nobody trains, checks models or records rounds, which takes the same
with both.

In each repetition both federations are new, and their rounds alternate. In its first one a site checks the certificates
of the others and agrees on a secret with each. Who leaves says so in the place of its adapters or its masked vector,
which costs the server most; silence would cost a deadline besides, with both.

Bytes are all that loopback carried (frames, HTTP/2, TLS, TCP and IP), so nothing else should use it.

    python benchmarks/secure_sums.py
    python benchmarks/secure_sums.py --clients 30 --repetitions 2
"""

import argparse
import contextlib
import multiprocessing
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from atlas_fl.aggregation.secure_mean import SumGroup, SumSettings, secure_means
from atlas_fl.client.job import Job, Update, make_jobs
from atlas_fl.client.options import TrainOptions
from atlas_fl.deployment.privacy_record import pay_sums
from atlas_fl.events import ignore
from atlas_fl.params import Params, Split
from atlas_fl.rng import generator
from atlas_fl.runtime.coordinator import site_worker
from atlas_fl.runtime.coordinator.coordinator import ClientManager
from atlas_fl.runtime.coordinator.secure_sums import SumSite
from atlas_fl.runtime.protocol.client_metadata import ClientMetadata
from atlas_fl.runtime.protocol.messages import Identity as RunIdentity
from atlas_fl.runtime.protocol.model_sync import Receiver, Sender, SenderState
from atlas_fl.runtime.remote import RemoteEngine
from atlas_fl.runtime.transport.certificates import make_certs, open_certs, private_key_of, public_key_of
from atlas_fl.runtime.transport.client import Link
from atlas_fl.runtime.transport.event_loop import LoopThread
from atlas_fl.runtime.transport.frames import Head, Message
from atlas_fl.runtime.transport.server import Server
from atlas_fl.runtime.transport.sessions import NO_TENSORS, Sessions
from atlas_fl.secure_sums import Identity, KeyBook

PROCESSES = multiprocessing.get_context("forkserver")
"""Processes of which the imports are made once."""
PROCESSES.set_forkserver_preload(
    ["atlas_fl.runtime.remote", "atlas_fl.runtime.coordinator.site_worker", "atlas_fl.runtime.transport.client"]
)
WIDTH, LAYERS, EXAMPLES, SECONDS = 384, 6, 100, 600.0
IDENTITY = RunIdentity(version="1", config="c", model="m", architecture="a", tokenizer="t")
SETTINGS = SumSettings(run="a benchmark", bound=4.0, max_share=1.0)
COUNTS: dict[Split, int] = {"train": EXAMPLES, "validation": 2, "test": 2}
METADATA = ClientMetadata(
    task="movie",
    num_labels=2,
    metric="accuracy",
    label_names=("bad", "good"),
    max_length=16,
    examples=COUNTS,
    labels={split: (count / 2, count / 2) for split, count in COUNTS.items()},
    lengths={split: ((5, 0, count),) for split, count in COUNTS.items()},
)


def adapters(rank: int, *seeds: object) -> Params:
    shapes = {"lora_A": (rank, WIDTH), "lora_B": (WIDTH, rank)}
    draw = generator(0, "a benchmark", *seeds)
    return {
        f"encoder.layer.{layer}.attention.self.{part}.{end}": torch.from_numpy(draw.normal(0, 0.02, shape)).float()
        for layer in range(LAYERS)
        for part in ("query", "value")
        for end, shape in shapes.items()
    }


def key_book(ca: bytes) -> KeyBook:
    return KeyBook(run=SETTINGS.run, verifier=lambda name, pem: public_key_of(pem, name=name, ca=ca))


# sites


@dataclass(frozen=True, kw_only=True)
class Leaver:
    """A link over which a step of the server, when it is asked for, fails."""

    link: Link
    step: str
    asked: list[str]

    def exchange(self, head: Head, tensors: Params = NO_TENSORS) -> Message:
        if self.asked and self.asked.pop() == self.step:
            head, tensors = {"kind": "failed", "number": head["number"], "reason": "it leaves"}, NO_TENSORS
        answer = self.link.exchange(head, tensors)
        self.asked.append(str(answer[0].get("step", answer[0]["kind"])))
        return answer


class Consent:
    """Consent to everything."""

    def check_job(self, head: Mapping[str, Any]) -> None: ...

    def check_private(self, head: Mapping[str, Any]) -> None: ...

    def check_model(self, action: str, job: Job, *, is_own: bool, own: Params) -> None: ...

    def check_answer(self, action: str, job: Job, tensors: Params) -> None: ...

    def check_final_model(self, params: Params, *, own: Params) -> None: ...


def train_at_once(jobs: Sequence[Job], change: Any) -> list[Update]:
    """The job's model and a change that is the client's own."""
    metrics = {"loss": 1.0, "seconds": 0.0, "steps": 1.0}
    return [
        Update(
            client=job.client,
            params={key: tensor + change[key] for key, tensor in job.params.items()},
            examples=EXAMPLES,
            metrics=metrics,
        )
        for job in jobs
    ]


def join(folder: Path, port: int, name: str, rank: int, leaves: str, secure: bool, meter: Connection) -> None:
    """A site in this process until it is killed; the answer to each question of `meter` is its CPU seconds."""
    torch.set_num_threads(1)
    site_worker.ACTIONS = {"train": train_at_once}  # type: ignore[attr-defined]
    certs, change = open_certs(folder / name), adapters(rank, name)
    identity = Identity(
        name=name,
        book=key_book(certs.ca),
        signer=private_key_of(certs),
        certificate=certs.cert,
        examples=EXAMPLES,
    )
    address, record = f"localhost:{port}", partial(pay_sums, path=folder / f"{name}-sums")
    with Link(address, certs, hello=dict, patience=SECONDS, first_patience=SECONDS, on_event=ignore) as link:
        client = site_worker.SiteClient(
            name=name,
            load_site=lambda *_: change,
            link=Leaver(link=link, step=leaves, asked=[]),
            registration={**asdict(METADATA), "device": "cpu_2gb"},
            on_event=ignore,
            receiver=Receiver(),
            on_final_model=lambda *_: None,
            policy=Consent(),
            sums=SumSite(identity=identity, settings=SETTINGS, pay=record) if secure else None,
        )
        threading.Thread(target=client.run, daemon=True).start()
        while meter.recv():
            meter.send(time.process_time())


# server


class Federation:
    """A server, and the processes of its sites."""

    def __init__(self, folder: Path, args: argparse.Namespace, *, secure: bool, gone: list[str]) -> None:
        self.secure, self.names, self.model, self.round = secure, site_names(args.clients), adapters(args.rank), 0
        self.sums: tuple[str, ...] = ()
        self.running = contextlib.ExitStack()
        bridge = self.running.enter_context(LoopThread())
        common = SenderState()
        manager = ClientManager(
            self.names, IDENTITY, settings="", on_note=bridge.note, new_sender=lambda: Sender(common=common)
        )
        sessions = Sessions(
            answer=manager.answer,
            admit=manager.handshake,
            listed=lambda: dict.fromkeys(self.names),
            on_presence=manager.on_presence,
            limit=manager.max_request_bytes,
        )
        certs = open_certs(folder / "server")
        server = Server(sessions, certs, host="127.0.0.1", port=0)
        port = bridge.wait(server.start)
        self.running.callback(lambda: bridge.wait(server.stop, "over"))
        self.engine = RemoteEngine(
            manager=manager,
            bridge=bridge,
            deadline_seconds=SECONDS,
            split_server=None,
            min_clients=1,
            key_book=key_book(certs.ca),
        )
        self.meters = list[Connection]()
        for name in self.names:
            here, there = PROCESSES.Pipe()
            leaves = ("mask" if secure else "job") if name in gone else ""
            site = PROCESSES.Process(
                target=join, args=[folder, port, name, args.rank, leaves, secure, there], daemon=True
            )
            site.start()
            self.running.callback(site.kill)
            self.meters.append(here)
        bridge.call(manager.wait_for_clients, self.names, min_clients=len(self.names), seconds=SECONDS)

    def counters(self) -> np.ndarray:
        """(bytes over loopback, CPU seconds of all sites, of this process) so far, (3,)."""
        for meter in self.meters:
            meter.send(True)
        sites = sum(meter.recv() for meter in self.meters)
        (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
        return np.array([float(line.split()[1]), sites, time.process_time()])

    def measure_round(self) -> np.ndarray:
        """(bytes of a site, CPU seconds of a site, of the server, of all, wall seconds) of a round, (5,)."""
        counters, start = self.counters(), time.perf_counter()
        self.round += 1
        jobs = make_jobs(dict.fromkeys(self.names, self.model), TrainOptions(seed=0), round=self.round)
        updates = {update.client: update.params for update in self.engine.run("train", jobs)}
        if self.secure:
            group = SumGroup(clients=tuple(self.names), keys=tuple(self.model), what="the adapters")
            before = dict.fromkeys(self.names, self.model)
            means = secure_means((group,), SETTINGS, before, updates, self.engine.sum_of, round=self.round)
            assert not means.lost, means.lost
            self.model, self.sums = means.updates[self.names[-1]], means.sums
        else:
            self.model = {key: torch.stack([own[key] for own in updates.values()]).mean(0) for key in self.model}
        seconds = time.perf_counter() - start
        size, sites, server = self.counters() - counters
        return np.array([size / len(self.names), sites / len(self.names), server, sites + server, seconds])


def site_names(count: int) -> list[str]:
    return [f"site-{k:03}" for k in range(count)]


def measure(args: argparse.Namespace, *, share: float) -> None:
    """Print rows of the table for this share of clients that leave in each round."""
    names = site_names(args.clients)
    gone = names[: round(share * len(names))]
    rounds = dict[tuple[bool, bool], list[np.ndarray]]()
    for _ in range(args.repetitions):
        with TemporaryDirectory() as made, contextlib.ExitStack() as running:
            folder = Path(made) / "certs"
            make_certs(folder, servers=["localhost"], clients=names)
            federations = [Federation(folder, args, secure=secure, gone=gone) for secure in (False, True)]
            for federation in federations:
                running.enter_context(federation.running)
            for number in range(1 + args.later):
                for federation in federations:
                    rounds.setdefault((number == 0, federation.secure), []).append(federation.measure_round())
            plain, summed = (federation.model for federation in federations)
            error = max(float((plain[key] - summed[key]).abs().max()) for key in plain)
            assert error < 1e-4, f"the means differ by {error}"
    for (is_first, is_secure), found in rounds.items():
        name = f"{'first round' if is_first else 'later'}, {len(gone)} leave, {'secure' if is_secure else 'plain'}"
        print_row(name, np.array(found), np.array(rounds[is_first, False]))
    print(f"means of {', '.join(federations[1].sums)}; after all rounds {error:.1g} from the plain ones")


def print_row(name: str, rounds: np.ndarray, plain: np.ndarray) -> None:
    """The medians of these rounds, of seconds with the least in brackets, and their ratios to those of plain ones."""
    median, least = np.median(rounds, axis=0), rounds.min(axis=0)
    over = median / np.median(plain, axis=0)
    site, server, wall = (f"{median[k]:.4f} ({least[k]:.4f})" for k in (1, 2, 4))
    print(f"| {name} | {median[0]:,.0f} | {over[0]:.2f} | {site} | {server} | {over[3]:.1f} | {wall} | {over[4]:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--later", type=int, default=4, help="rounds after the first")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| | bytes of a site | over plain | CPU seconds of a site | of the server | all, over plain | wall | over |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for share in (0.0, 0.1):
        measure(args, share=share)


if __name__ == "__main__":
    main()
