"""What do secure sums cost over the plain exchange of a round? Bytes and CPU seconds, with and without dropouts.

A hundred clients send the adapters of MiniLM (q and v of six layers, rank 8) and get their mean. The plain exchange is
frames up, the weighted sum, frames down; the secure one the same with all steps of the protocol, on one core.

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
from atlas_fl.secure_sums import SumClient, Terms, open_sum

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
    sys.stdout.write("| | bytes of a client | over plain | CPU seconds of a client | of the server | error |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    sys.stdout.write(f"| plain | {plain_bytes:,} | | {plain_seconds:.4f} (with the server's) | | |\n")
    for share in (0.0, 0.1):
        gone = names[: round(share * len(names))]
        sent, client, server, error = secure(models, gone)
        ratio = (sent + down) / plain_bytes
        row = f"| secure, {share:.0%} leave | {sent + down:,} | {ratio:.2f} | {client:.3f} | {server:.2f}"
        sys.stdout.write(f"{row} | {error:.1e} |\n")


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


def secure(models: Mapping[str, Mapping[str, torch.Tensor]], gone: list[str]) -> tuple[int, float, float, float]:
    """(mean bytes of a survivor but for the model down, its CPU seconds, those of the server, the largest error)."""
    names = tuple(models)
    terms = Terms(clients=names, about="a benchmark", bound=4.0)
    with TemporaryDirectory() as folder:
        make_certs(Path(folder) / "certs", servers=["server"], clients=names)
        certs = {name: open_certs(Path(folder) / "certs" / name) for name in names}
    here = [name for name in names if name not in gone]
    flat = {
        name: np.concatenate([one.numpy().ravel() for one in params.values()]).astype(np.float64)
        for name, params in models.items()
    }
    start = time.process_time()
    clients = {}
    for name in names:
        verifiers = {peer: public_key_of(certs[peer].cert, name=peer, ca=certs[name].ca) for peer in names}
        signer = private_key_of(certs[name])
        clients[name] = SumClient(name=name, terms=terms, signer=signer, verifiers=verifiers, examples=100)
    keys = {name: client.keys() for name, client in clients.items()}
    sealed = {name: client.shares(keys) for name, client in clients.items()}
    # clients that leave do so after they have shared, which costs the server most
    opened = {name: {by: told[name] for by, told in sealed.items()} for name in here}
    masked = {name: clients[name].mask(opened[name], flat[name]) for name in here}
    signatures = {name: clients[name].confirm(masked) for name in here}
    revealed = {name: clients[name].reveal(signatures) for name in here}
    middle = time.process_time()
    total = open_sum(terms, keys=keys, sharers=sealed, masked=masked, revealed=revealed)
    end = time.process_time()
    error = float(np.abs(total - np.sum([flat[name] for name in here], axis=0)).max())

    def size(messages: Mapping[str, bytes]) -> int:
        return sum(map(len, messages.values()))

    first = here[0]
    sent = len(keys[first]) + size(sealed[first]) + 4 * total.size + len(signatures[first]) + size(revealed[first])
    sent += sum(len(one.cert) for one in certs.values()) + size(keys) + size(opened[first]) + size(signatures)
    return sent, (middle - start) / len(here), end - middle, error


if __name__ == "__main__":
    main()
