"""What can be wrong in a program that `zygote.py` starts: one function of it is replaced before it begins."""

import itertools
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from atlas_fl.deployment import site
from atlas_fl.models import peft_io
from atlas_fl.runtime.coordinator import coordinator, site_worker
from atlas_fl.storage import checkpoint

SMALL = 200
"""Bytes of a file that a full disk takes."""


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fill_the_disk() -> None:
    export = site.export_own_model

    def full(*args: Any, **words: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, SMALL))
        export(*args, **words)

    site.export_own_model = full


def die_before_the_answer(number: int) -> None:
    """The answers before this one are sent."""
    kept = coordinator.ClientManager._confirm_saved
    answers = itertools.count(1)

    async def answer(own: Any, seat: Any, head: Any) -> Any:
        answered = await kept(own, seat, head)
        if next(answers) == number:
            die()
        return answered

    coordinator.ClientManager._confirm_saved = answer  # type: ignore[method-assign]


def die_before_the_checkpoint_of_round_two() -> None:
    save = checkpoint.save

    def saved(folder: Any, *, round: int, **content: Any) -> Any:
        if round == 2:
            die()
        return save(folder, round=round, **content)

    checkpoint.save = saved


def wait_before_training() -> None:
    """Each training waits until a file `CLIENT-ROUND` lies in the folder, and removes it."""
    train = site_worker.ACTIONS["train"]

    def late(jobs: Any, here: Any) -> Any:
        file = Path(f"{jobs[0].client}-{jobs[0].round}")
        while not file.exists():
            time.sleep(0.01)
        file.unlink()
        return train(jobs, here)

    site_worker.ACTIONS = {**site_worker.ACTIONS, "train": late}


FAULTS: Mapping[str, Callable[[], None]] = {
    "dies before it writes its model": lambda: setattr(site, "export_own_model", die),
    "dies while it writes its model": lambda: setattr(peft_io, "write_tensors", die),
    "dies before it says so": lambda: setattr(site_worker, "confirm_saved", die),
    "dies before it removes its private part": lambda: setattr(site, "clear_store", die),
    "dies before it ends": lambda: setattr(site, "SiteResult", die),
    "dies before the checkpoint of round two": die_before_the_checkpoint_of_round_two,
    "has a full disk": fill_the_disk,
    "waits before it trains": wait_before_training,
    "dies before it answers who has its model": lambda: die_before_the_answer(1),
    "dies before it answers the last one": lambda: die_before_the_answer(2),
}
"""By what then happens."""
