"""TensorBoard as a tracker: event files in a folder of the run's name.

pip install '.[tensorboard]'
atlas run --plugin examples/plugins/tensorboard_tracker.py --tracker tensorboard=FOLDER
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atlas_fl.config.values import invalid_value
from atlas_fl.plugins import register
from atlas_fl.report.trackers import TrackedRun, Tracker, importing, summary_numbers


@register("tracker", "tensorboard")
class TensorBoardTracker(Tracker):
    """Logs to a folder that `tensorboard --logdir` shows, each run in its own folder there."""

    title = "TensorBoard"

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._writer: Any = None
        self._round = 0

    def check(self) -> None:
        """Raise ConfigError unless tensorboard is installed, and the folder is one or can be made."""
        places = (Path(self.folder), *Path(self.folder).parents)
        nearest = next((place for place in places if place.exists()), Path())
        if not self.folder or "://" in self.folder or not nearest.is_dir() or not os.access(nearest, os.W_OK):
            raise invalid_value("--tracker tensorboard", self.folder, "a folder to write to, which is made if need be")
        _summary_writer()

    def begin(self, run: TrackedRun) -> None:
        """Open an event file; what an earlier session has logged of rounds that are trained again is hidden by it."""
        folder = Path(self.folder) / run.name
        self._writer = _summary_writer()(log_dir=str(folder), purge_step=run.first_round)
        text = json.dumps(run.settings, indent=4, default=str)
        self._writer.add_text("settings", "\n".join(f"    {line}" for line in text.splitlines()), run.first_round)

    def log(self, numbers: Mapping[str, float], *, round: int) -> None:
        """Log a scalar for each, at the step of the round."""
        self._round = round
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Log what it says of all clients, at the step of the last round."""
        self.log(summary_numbers(summary), round=self._round)

    def finish(self, *, is_failed: bool) -> None:  # noqa: ARG002  # TensorBoard knows no end of a run
        """Write all that is open."""
        self._writer.close()


def _summary_writer() -> Any:
    with importing("TensorBoard", package="tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter
