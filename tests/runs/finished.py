"""Finished runs, each computed once for all tests and all workers of pytest-xdist, and handed out as copies."""

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from atlas_fl.config import Config, run_folder, to_toml, with_values
from atlas_fl.experiment import alone
from atlas_fl.experiment.run import RunResult, run_config
from atlas_fl.setup import options
from atlas_fl.storage.jsonl import read_json, write_json

Make = Callable[..., Config]
"""Makes a config; keywords set single settings by their flat names."""


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold this file's lock; other processes wait for it."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class FinishedRuns:
    """Computes the run of a config on the first request and copies its folder on every request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, config: Config) -> RunResult:
        """The result of `run(config)`, in the config's own folder, which is the test's to alter.

        Runs differ by every setting but folder and name, so by `audit` and `max_rounds` too, which are no part of the
        hash, and by the batches of their planning (`importance_is_measured_on_one_batch`) and the draws of their scores
        (`examples_are_drawn_a_few_times`).
        """
        settings = f"{options.IMPORTANCE_BATCHES} {alone.RESAMPLES}\n{to_toml(_placed(config, self.folder))}"
        original = self.folder / sha256(settings.encode()).hexdigest()[:16]
        with locked(original.with_suffix(".lock")):
            if not original.exists():
                unfinished = original.with_suffix(".part")
                shutil.rmtree(unfinished, ignore_errors=True)
                result = run_config(_placed(config, unfinished))
                outcome = {"rounds": result.rounds, "complete": result.complete, "summary": result.summary}
                write_json(unfinished / "outcome.json", outcome)
                unfinished.rename(original)
        copy = run_folder(config).path
        shutil.copytree(original / "run", copy)
        return RunResult(folder=copy, **read_json(original / "outcome.json"))


def _placed(config: Config, runs: Path) -> Config:
    return with_values(config, {"runs_dir": str(runs), "name": "run"})
