"""A program that has imported everything and forks: a server and its sites start at once, as processes of their own.

python zygote.py    reads lines of JSON, {"words": [...], "out": FIFO, "cwd": DIR, "fault": one of `faults.FAULTS` or
                    nothing}; writes `pid N`, `end N CODE`
"""

import json
import os
import select
import signal
import sys
import traceback

import torch
from faults import FAULTS

import atlas_fl.deployment.server  # noqa: F401
from atlas_fl.cli.main import main


def start(order: dict) -> int:
    child = os.fork()
    if child:
        return child
    # Whoever is started in the background is told to ignore Ctrl-C, and a suite may be.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["cwd"])
    out = os.open(order["out"], os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    code = 1
    try:
        if order["fault"]:
            FAULTS[order["fault"]]()
        code = main(order["words"])
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()  # nobody else would: the process ends here
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def reap() -> None:
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if child == 0:
            return
        print(f"end {child} {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.fsync = bool  # does nothing: what a killed process wrote is lost only where the power fails
    print("ready", flush=True)
    rest = b""
    while True:
        reap()
        if not select.select([0], [], [], 0.05)[0]:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            sys.exit(0)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            print(f"pid {start(json.loads(line))}", flush=True)
