"""What do secure sums cost over the plain exchange of a round? Bytes and CPU seconds, with and without dropouts.

A hundred clients send the adapters of MiniLM (q and v of six layers, rank 8) and get their mean. The plain exchange is
frames up, the weighted sum, frames down; the secure one the same with all steps of the protocol, on one core. In the
first round of a run each client checks the others' certificates and agrees on a secret with each, once.

    python benchmarks/secure_sums.py
    python benchmarks/secure_sums.py --clients 30
"""

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from atlas_fl.runtime.transport.certificates import make_certs, open_certs, private_key_of, public_key_of
from atlas_fl.runtime.transport.frames import decode_frame, encode_frame
from atlas_fl.secure_sums import Identity, KeyBook, Messages, SumClient, Terms, run_sum

WIDTH, LAYERS = 384, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rank", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [f"site-{k:03}" for k in range(args.clients)]
    draw = torch.Generator().manual_seed(0)
    models = {name: model(draw, args.rank) for name in names}
    up, down, seconds = plain(models)
    plain_bytes, plain_seconds = up + down, seconds / len(names)
    sys.stdout.write(
        "| | bytes of a client | over plain | CPU seconds of a client | of the server | both, over plain |"
    )
    sys.stdout.write(f" error |\n|---|---|---|---|---|---|---|\n| plain | {plain_bytes:,} | | {plain_seconds:.4f} |")
    sys.stdout.write(" (with a client's) | | |\n")
    for share in (0.0, 0.1):
        gone = names[: round(share * len(names))]
        run = Run(names)
        for what in ("first round", "later"):
            sent, client, server, error = secure(run, models, gone, about=what)
            times = (client + server / len(names) + plain_seconds) / plain_seconds
            row = f"| {what}, {share:.0%} leave | {sent + down:,.0f} | {(sent + down) / plain_bytes:.2f} | {client:.4f}"
            sys.stdout.write(f"{row} | {server:.3f} | {times:.1f} | {error:.1e} |\n")


class Run:
    """Clients and the server of a run, with certificates."""

    def __init__(self, names: list[str]) -> None:
        with TemporaryDirectory() as folder:
            make_certs(Path(folder) / "certs", servers=["server"], clients=names)
            certs = {name: open_certs(Path(folder) / "certs" / name) for name in names}
        self.book = self.checks(certs[names[0]].ca)
        self.identities = {
            name: Identity(
                name=name,
                book=self.checks(one.ca),
                signer=private_key_of(one),
                certificate=one.cert,
                examples=100,
            )
            for name, one in certs.items()
        }

    def checks(self, ca: bytes) -> KeyBook:
        return KeyBook(run="a benchmark", verifier=lambda name, pem: public_key_of(pem, name=name, ca=ca))


def model(draw: torch.Generator, rank: int) -> dict[str, torch.Tensor]:
    shapes = {"lora_A": (rank, WIDTH), "lora_B": (WIDTH, rank)}
    return {
        f"encoder.layer.{layer}.attention.self.{part}.{end}": torch.randn(shape, generator=draw) / 20
        for layer in range(LAYERS)
        for part in ("query", "value")
        for end, shape in shapes.items()
    }


def plain(models: Mapping[str, Mapping[str, torch.Tensor]]) -> tuple[int, int, float]:
    """(bytes up, bytes down of a client, CPU seconds of all and the server)."""
    start = time.process_time()
    frames = {name: encode_frame({"kind": "result"}, params) for name, params in models.items()}
    came = [decode_frame(frame)[1] for frame in frames.values()]
    mean = {key: torch.stack([params[key] for params in came]).mean(0) for key in came[0]}
    back = [encode_frame({"kind": "job"}, mean) for _ in models]
    for frame in back:
        decode_frame(frame)
    return len(next(iter(frames.values()))), len(back[0]), time.process_time() - start


def secure(
    run: Run, models: Mapping[str, Mapping[str, torch.Tensor]], gone: list[str], *, about: str
) -> tuple[float, float, float, float]:
    """(mean bytes of a survivor but for the model down, its CPU seconds, those of the server, the largest error)."""
    terms = Terms(clients=tuple(models), about=about, bound=4.0)
    here = [name for name in models if name not in gone]
    flat = {
        name: np.concatenate([one.numpy().ravel() for one in params.values()]).astype(np.float64)
        for name, params in models.items()
    }
    clients = {
        name: SumClient(identity=identity, terms=terms, vector=lambda _, one=flat[name]: one)  # type: ignore[misc]
        for name, identity in run.identities.items()
    }
    at_clients = 0.0

    def ask(step: str, told: Mapping[str, Messages]) -> dict[str, Messages]:
        # clients that leave do so after they have shared, which costs the server most
        nonlocal at_clients
        asked = told.keys() - (set(gone) if step == "mask" else set())
        start = time.process_time()
        said = {name: clients[name].answer(step, told[name]) for name in asked}
        at_clients += time.process_time() - start
        return said

    start = time.process_time()
    done = run_sum(terms, run.book, ask, size=len(flat[here[0]]))
    server = time.process_time() - start - at_clients
    error = float(np.abs(done.total - np.sum([flat[name] for name in here], axis=0)).max())
    sent = 4 * done.total.size + float(np.mean([sum(done.sent_bytes[name]) for name in here]))
    return sent, at_clients / len(models), server, error


if __name__ == "__main__":
    main()
