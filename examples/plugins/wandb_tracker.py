"""Weights & Biases as a tracker: what it keeps lies in the run's folder, and a resumed run goes on under its old id.

pip install '.[wandb]'
atlas run --plugin examples/plugins/wandb_tracker.py --tracker wandb=PROJECT
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from atlas_fl.config.values import invalid_value
from atlas_fl.plugins import register
from atlas_fl.report.trackers import TrackedRun, Tracker, importing
from atlas_fl.storage.folder_access import list_folder, make_folder

NOT_IN_NAMES = frozenset("/\\#?%:")
"""Characters that W&B refuses in the name of a project."""


@register("tracker", "wandb")
class WandbTracker(Tracker):
    """Logs to a project of Weights & Biases; how it is reached is wandb's affair (`WANDB_MODE`, `WANDB_API_KEY`)."""

    title = "W&B"

    def __init__(self, project: str) -> None:
        self.project = project
        self._run: Any = None

    def check(self) -> None:
        """Raise ConfigError unless wandb is installed and takes the name."""
        if not self.project.strip() or NOT_IN_NAMES & set(self.project):
            allowed = f"the name of a project, without {' '.join(sorted(NOT_IN_NAMES))}"
            raise invalid_value("--tracker wandb", self.project, allowed)
        _wandb()

    def begin(self, run: TrackedRun) -> None:
        """Begin a run, or go on with the one whose id the run's folder has."""
        wandb = _wandb()
        own = make_folder(run.folder / "wandb", within=run.folder)
        before = [name for name in list_folder(own, within=run.folder) if fnmatchcase(name, "*run-*-*")]
        self._run = wandb.init(
            project=self.project,
            name=run.name,
            # a run that goes on is the same run there too: its folders end with its id
            id=before[-1].rpartition("-")[2] if before else None,
            resume="allow" if before else None,
            config=run.settings,
            dir=run.folder,
            settings=wandb.Settings(console="off", quiet=True, disable_git=True, disable_code=True),
        )

    def log(self, numbers: Mapping[str, float], *, round: int) -> None:
        """Log them as the step of the round."""
        self._run.log(dict(numbers), step=round)

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Log all of the summary."""
        self._run.summary.update({"summary": summary})

    def finish(self, *, is_failed: bool) -> None:
        """End the session; a run that failed is marked as failed."""
        self._run.finish(exit_code=int(is_failed))


def _wandb() -> Any:
    with importing("W&B", package="wandb"):
        import wandb

        _ = wandb.init, wandb.Settings
    return wandb
