"""A run of the smallest kind that is killed with SIGKILL and resumed; a script, started by test_killed.py.

Reads lines, and answers each with a JSON line of what was counted:

    steps FOLDER      killed at every step that the writing of files takes, one after the other
    replacing FOLDER  killed at every step while a checkpoint of the same round is replaced
    times FOLDER      killed after random times

Every victim is a forked process, so that torch is imported once.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from atlas_fl.storage.checkpoint import load_latest, prune, save
from atlas_fl.storage.jsonl import append_rows, truncate_to
from atlas_fl.storage.run_folder import RunFolder

FILES = ("atlas_fl/storage/files.py", "atlas_fl/storage/checkpoint.py")
EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
SECONDS = 300
"""Longest time for an answer: SIGALRM then ends this process."""


def play(path: Path, *, rounds: int, size: int, keep: int) -> None:
    """Go on from the last checkpoint to the end; what a round does depends on all rounds before it."""
    folder = RunFolder(path)
    path.mkdir(exist_ok=True)
    found, messages = load_latest(folder.checkpoints)
    if messages:
        raise SystemExit(f"a killed run left a damaged checkpoint: {messages}")
    weights = found.tensors["a/weights"] if found else torch.zeros(size, dtype=torch.float64)
    truncate_to(folder.metrics, found.state["metrics"] if found else 0)
    for at in range(found.round + 1 if found else 1, rounds + 1):
        weights = weights * 0.9 + torch.arange(size) * at
        rows = [{"round": at, "client": name, "loss": float(weights.sum())} for name in "ab"]
        offset = append_rows(folder.metrics, rows)
        save(folder.checkpoints, round=at, tensors={"a/weights": weights}, state={"metrics": offset})
        prune(folder.checkpoints, keep=keep)


def outcome(path: Path) -> tuple[bytes, ...]:
    """Everything that must not depend on when the run was killed."""
    last = max(RunFolder(path).checkpoints.glob("round-????"))
    files = [RunFolder(path).metrics, last / "state.safetensors", last / "state.json"]
    return tuple(part for file in files for part in (str(file.relative_to(path)).encode(), file.read_bytes()))


def kill_at(step: int) -> None:
    """Kill this process at a step: a line of the modules that write checkpoints, or a change of the file system."""
    left = [step]

    def count() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def trace(frame, event, arg):  # noqa: ARG001
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        if event == "line":
            count()
        return trace

    sys.addaudithook(lambda event, arguments: count() if event in EVENTS else None)  # noqa: ARG005
    sys.settrace(trace)


def forked(work: Callable[[], None]) -> int:
    """Run something in a process of its own; the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise SystemExit("the victim failed by itself")
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def kills(attempt: Callable[[], None], check: Callable[[int], None]) -> int:
    """Kill the attempt at its first step, its second and so on until it ends by itself; how often it was killed."""
    step = 1
    while True:

        def victim(step: int = step) -> None:
            kill_at(step)
            attempt()

        if not forked(victim):
            return step - 1
        check(step)
        step += 1


def every_step(folder: Path) -> dict[str, int]:
    settings = {"rounds": 2, "size": 50, "keep": 1}
    play(folder / "whole", **settings)

    def check(step: int) -> None:
        play(folder / "killed", **settings)
        if outcome(folder / "killed") != outcome(folder / "whole"):
            raise SystemExit(f"killed at step {step}, the resumed run ends differently")
        shutil.rmtree(folder / "killed")

    return {"kills": kills(lambda: play(folder / "killed", **settings), check)}


def every_step_of_replacing(folder: Path) -> dict[str, int]:
    """Saving a round again: at every moment one of the two is there, and in the end only the new one."""
    save(folder, round=2, tensors={"x": torch.zeros(3)}, state={"version": 0})
    seen: set[tuple[int, float]] = set()

    def check(step: int) -> None:
        found, messages = load_latest(folder)
        if found is None or messages:
            raise SystemExit(f"killed at step {step}, no checkpoint or a damaged one is left: {messages}")
        seen.add((found.state["version"], float(found.tensors["x"][0])))
        save(folder, round=2, tensors={"x": torch.zeros(3)}, state={"version": 0})

    def new() -> None:
        save(folder, round=2, tensors={"x": torch.ones(3)}, state={"version": 1})

    count = kills(new, check)
    if seen != {(0, 0.0), (1, 1.0)} or [path.name for path in folder.iterdir()] != ["round-0002"]:
        raise SystemExit(f"unexpected: {seen}, {list(folder.iterdir())}")
    return {"kills": count}


def random_times(folder: Path) -> dict[str, int]:
    """One run that is killed again and again until it gets to its end in spite of it."""
    settings = {"rounds": 120, "size": 100_000, "keep": 2}
    play(folder / "whole", **settings)
    draw, kills = random.Random(0), 0  # the times are as random as the machine makes them
    while True:
        child = os.fork()
        if child == 0:
            play(folder / "killed", **settings)
            os._exit(0)
        time.sleep(draw.uniform(0.005, 0.05 * 1.05**kills))  # longer and longer: a slow machine gets to the end too
        os.kill(child, signal.SIGKILL)
        if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            break
        kills += 1
    if outcome(folder / "killed") != outcome(folder / "whole"):
        raise SystemExit(f"killed {kills} times, the resumed run ends differently")
    return {"kills": kills}


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.fsync = bool  # does nothing: what a killed process wrote is lost only where the power fails
    modes = {"steps": every_step, "replacing": every_step_of_replacing, "times": random_times}
    for line in sys.stdin:
        mode, _, folder = line.strip().partition(" ")
        signal.alarm(SECONDS)
        print(json.dumps(modes[mode](Path(folder))), flush=True)
        signal.alarm(0)
