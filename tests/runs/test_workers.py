"""Any number of workers trains the same run; one that dies ends it, and it goes on with any number.

Processes take seconds to import what they need, so one pair of them is real here.
"""

import mmap
import os
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch

from atlas_fl.errors import DataError, ProtocolError
from atlas_fl.events import Event, Progress, RoundFinished
from atlas_fl.experiment.backends import init_worker, share_weights, worker_init_messages
from atlas_fl.experiment.run import RunResult, run_config
from atlas_fl.runtime.worker_pool import WorkerLoop, init_workers
from atlas_fl.setup.assembly import assemble
from tests.runs.finished import Make
from tests.runs.reading import rows
from tests.runs.workers import SETTINGS, check_same, check_workers, in_threads, into


@pytest.fixture(scope="module")
def whole(shared_config: Make) -> RunResult:
    return run_config(shared_config(name="whole", **SETTINGS))


@pytest.mark.slow
def test_any_number_of_workers_makes_the_same_run(config: Make, whole: RunResult) -> None:
    told: list[Event] = []
    found = run_config(config(name="workers", **SETTINGS), backend=in_threads(3), on_event=told.append)
    check_same(whole.folder, found.folder)
    steps = [event for event in told if isinstance(event, Progress) and event.phase == "train"]
    assert len(steps) > found.rounds, "one pack a round does not need workers"
    assert [step.done for step in steps if step.done == step.total] == [3] * found.rounds


SOME: Mapping[str, Any] = {"rounds": 2, "participation": 0.75, "dropout": 0.1, "pack_tokens": 200}
"""Some clients a round, so that what is asked for once is asked for in two rounds."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "halves": {"strategy": "kriging", "measure_round": 1},
    "class features": {"strategy": "fedpac"},
    "losses of clusters": {"strategy": "ifca", "ranks": "4", "ifca_clusters": 2},
    "a head at the client": {"split": "movie=1,trec-0=1,trec-1=2", "head": "client", "eta": 0.3},
    "those of whole models": {
        **{"strategy": "fedpac", "trainable": "full", "lr": 1e-3, "fingerprint": "fisher", "fingerprint_steps": 60},
        **{"clusters": "auto", "sketch_dim": 1024, "fingerprint_batches": 12, "adapter_bytes": "none"},
        **{"candidates": (4, 8, 16, 32, 64)},
    },
}
"""What rules ask for beside updates, and what is cut."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_for_comes_back_from_workers(config: Make, kind: str) -> None:
    sent = {row["kind"] for row in rows(check_workers(config, **SOME, **KINDS[kind]), "ledger")}
    assert sent & {"halves", "features", "activation"} or kind == "losses of clusters"


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"dropout": 0.1, "crop": 1, "flip": True, "frozen_blocks": 1},
        {"mask": "least_sensitive", "calibration_rounds": 2, "calibration_clients": 3, "calibration_examples": 8},
    ],
    ids=["dense", "mask"],
)
def test_workers_train_whole_models_of_images(image_config: Make, values: Mapping[str, Any]) -> None:
    check_workers(image_config, **values, eval_every=1)


def children() -> list[psutil.Process]:
    return psutil.Process().children()


@pytest.mark.product
@pytest.mark.slow
def test_a_run_whose_worker_is_killed_goes_on_with_any_number_and_leaves_nobody(config: Make, whole: RunResult) -> None:
    """Round one, which two processes make, has the files of the whole run, too."""
    before, told = children(), list[Event]()

    def kill(event: Event) -> None:
        told.append(event)
        if isinstance(event, RoundFinished):
            os.kill(next(one.pid for one in children() if one not in before), signal.SIGKILL)

    with pytest.raises(ProtocolError, match=r"worker 1 of 2 .* was ended by SIGKILL; start the run again") as caught:
        run_config(config(name="killed", workers=2, **SETTINGS), on_event=kill)
    assert "\n" not in str(caught.value)
    assert children() == before
    assert [event.round for event in told if isinstance(event, RoundFinished)] == [1]
    found = run_config(config(name="killed", workers=1, **SETTINGS), resume=True)
    check_same(whole.folder, found.folder)


def test_a_worker_that_reads_other_data_says_so(config: Make) -> None:
    memory = list[mmap.mmap]()
    assembly, places = share_weights(assemble(config()), into(memory))
    (head,) = worker_init_messages(assembly, places, devices=["cpu"], cpus=torch.get_num_threads())
    resident = [WorkerLoop(init_worker, lambda: memory[0])]
    with ThreadPoolExecutor(1) as threads, pytest.raises(DataError, match="a worker has read other data than the run"):
        init_workers(resident, [{**head, "data": "0" * 64}], threads)
