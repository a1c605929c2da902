"""How long an exchange takes: a float32 tensor up and one of the same size back, over mutual TLS, two processes.

    python benchmarks/exchange.py [--turns N] [--together 4]

The aims are 1.5, 8 and 35 ms at the median for 0.1, 1 and 8 MB; 86 MB are a whole ViT-S. Beside them stand the encoding
and decoding of the two messages alone, in this process, and the same bytes over a bare TCP socket, which no protocol
can beat. Then so many sites, a process each, do it at the same time.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from socket import create_connection, create_server
from typing import Any

import numpy as np
import torch

from atlas_fl.runtime.transport.certificates import make_certs, open_certs
from atlas_fl.runtime.transport.client import Link
from atlas_fl.runtime.transport.event_loop import LoopThread
from atlas_fl.runtime.transport.frames import decode_frame, encode_frame
from atlas_fl.runtime.transport.server import Server
from atlas_fl.runtime.transport.sessions import Sessions

AIMS_MS = {0.1: "1.5", 1.0: "8", 8.0: "35", 86.0: "-"}
"""By MB of a message."""
SITES = tuple(f"site-{number}" for number in range(1, 9))


async def echo(_name: str, head: Mapping[str, Any], tensors: Any) -> tuple[Any, Any]:
    return head, tensors


def serve(folder: Path) -> None:
    """Echo until the other end closes standard input; a thread echoes bare bytes."""
    listener = create_server(("127.0.0.1", 0))
    with LoopThread() as threads:
        sessions = Sessions(
            answer=echo,
            admit=lambda _name, _hello: {},
            listed=lambda: dict.fromkeys(SITES),
            on_presence=lambda _name, _here: None,
        )
        server = Server(sessions, open_certs(folder / "server"), host="127.0.0.1", port=0)
        print(threads.wait(server.start), listener.getsockname()[1], flush=True)
        end, _ = listener.accept()
        with end:
            while (size := int.from_bytes(receive(end, 8), "little")) > 0:
                end.sendall(receive(end, size))
        sys.stdin.read()
        print(peak())
        threads.wait(server.stop)


def peak() -> int:
    """Most MB that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000


def receive(end: Any, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (part := end.recv(min(1 << 20, size - len(data)))):
        data += part
    return bytes(data)


def time_turns(work: Callable[[], Any], *, turns: int) -> tuple[np.ndarray, float]:
    """Milliseconds of every turn, (turns,), and of this process's own computing a turn; five before are not counted."""
    for _ in range(5):
        work()
    milliseconds, computed = [], time.process_time()
    for _ in range(turns):
        began = time.perf_counter()
        work()
        milliseconds.append(1e3 * (time.perf_counter() - began))
    return np.array(milliseconds), 1e3 * (time.process_time() - computed) / turns


def open_link(folder: Path, name: str, port: int) -> Link:
    certs = open_certs(folder / name)
    return Link(f"localhost:{port}", certs, hello=dict, patience=10, first_patience=10, on_event=print)


def site(folder: Path, name: str, port: int, *, turns: int) -> None:
    """Exchange whenever a line with a size comes in, and answer with p50 and p95."""
    with open_link(folder, name, port) as link:
        print("ready", flush=True)
        for line in sys.stdin:
            tensors = {"x": torch.randn(int(float(line) * 1e6 / 4))}
            turned, _ = time_turns(partial(link.exchange, {}, tensors), turns=turns)
            print(*np.percentile(turned, [50, 95]), flush=True)


def measure_together(folder: Path, port: int, *, sites: int, turns: int) -> None:
    """So many sites at once, for every size with an aim."""
    words = [sys.executable, __file__, "--turns", str(turns), "--site", str(folder), str(port)]
    ends = [
        subprocess.Popen([*words, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in SITES[:sites]
    ]

    def lines() -> list[str]:
        return [end.stdout.readline() for end in ends if end.stdout is not None]

    lines()
    for size, aim in AIMS_MS.items():
        if aim == "-":
            continue
        for end in ends:
            assert end.stdin is not None
            end.stdin.write(f"{size}\n")
            end.stdin.flush()
        percentiles = np.array([line.split() for line in lines()], dtype=float)
        p50, p95 = percentiles[:, 0].mean(), percentiles[:, 1].max()
        print(f"{sites} sites at once, {size} MB: p50 {p50:.2f} ms, largest p95 {p95:.2f} ms")
    for end in ends:
        end.communicate("")


def measure(folder: Path, ports: tuple[int, int], *, turns: int) -> None:
    print(f"{'MB':>5} {'best':>7} {'p50':>7} {'p95':>7} {'aim':>5} {'client CPU':>11} {'coding CPU':>11}", end="")
    print(f" {'bare TCP best':>14} {'p50':>7} {'p95':>7}   all in ms")
    bare = create_connection(("127.0.0.1", ports[1]))
    with open_link(folder, SITES[0], ports[0]) as link:
        for size, aim in AIMS_MS.items():
            tensors = {"x": torch.randn(int(size * 1e6 / 4))}
            frame = encode_frame({}, tensors)

            def coding(tensors: Any = tensors) -> None:
                for _ in range(2):
                    decode_frame(encode_frame({}, tensors))

            def plain(frame: bytes = frame) -> None:
                bare.sendall(len(frame).to_bytes(8, "little") + frame)
                receive(bare, len(frame))

            turned, computed = time_turns(partial(link.exchange, {}, tensors), turns=turns)
            coded, raw = time_turns(coding, turns=turns)[1], time_turns(plain, turns=turns)[0]
            p50, p95 = np.percentile(turned, [50, 95])
            print(
                f"{size:>5} {turned.min():>7.2f} {p50:>7.2f} {p95:>7.2f} {aim:>5} {computed:>11.2f} {coded:>11.2f}",
                end="",
            )
            print(f" {raw.min():>14.2f} {np.median(raw):>7.2f} {np.percentile(raw, 95):>7.2f}")
    bare.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--together", type=int, default=4, choices=range(1, len(SITES) + 1))
    parser.add_argument("--serve", type=Path)
    parser.add_argument("--site", nargs=3, metavar=("FOLDER", "PORT", "NAME"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve is not None:
        serve(options.serve)
        return
    if options.site is not None:
        where, number, name = options.site
        site(Path(where), name, int(number), turns=options.turns)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "certs"
        make_certs(folder, servers=["localhost"], clients=list(SITES))
        words = [sys.executable, __file__, "--serve", str(folder)]
        server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            port, bare = (int(word) for word in server.stdout.readline().split())
            measure(folder, (port, bare), turns=options.turns)
            measure_together(folder, port, sites=options.together, turns=options.turns)
        finally:
            print(f"most memory of the two processes: {peak()} and {server.communicate('')[0].strip()} MB")


if __name__ == "__main__":
    main()
