"""Trackio as a tracker: a project in the folder of `TRACKIO_DIR`, or where `TRACKIO_SPACE_ID` or `_SERVER_URL` say.

pip install '.[trackio]'
atlas run --plugin examples/plugins/trackio_tracker.py --tracker trackio=PROJECT
"""

import re
from collections.abc import Mapping
from typing import Any

from atlas_fl.errors import ConfigError
from atlas_fl.plugins import register
from atlas_fl.report.trackers import TrackedRun, Tracker, importing, summary_numbers

NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
"""Trackio takes other characters out of a name, and so may log to another project."""


@register("tracker", "trackio")
class TrackioTracker(Tracker):
    """Logs to a project of Trackio; a run that goes on is the one of its name there."""

    title = "Trackio"

    def __init__(self, project: str) -> None:
        self.project = project
        self._run: Any = None
        self._round = 0

    def check(self) -> None:
        """Raise ConfigError unless trackio is installed and the project has a name."""
        if not NAME.fullmatch(self.project):
            allowed = "the name of a project has letters, digits, - and _, at most 100"
            raise ConfigError(f"--tracker trackio={self.project[:100]!r}: {allowed}")
        _trackio()

    def begin(self, run: TrackedRun) -> None:
        """Begin a run, or go on with the one of its name; the machine's own load is not logged."""
        self._run = _trackio().init(
            project=self.project,
            name=run.name,
            config=run.settings,
            resume="allow" if run.first_round > 1 else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, numbers: Mapping[str, float], *, round: int) -> None:
        """Log them as the step of the round."""
        self._round = round
        self._run.log(dict(numbers), step=round)

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """Log what it says of all clients, at the step of the last round."""
        self.log(summary_numbers(summary), round=self._round)

    def finish(self, *, is_failed: bool) -> None:  # noqa: ARG002  # Trackio knows no failed runs
        """Wait until everything is handed over."""
        self._run.finish()


def _trackio() -> Any:
    with importing("Trackio", package="trackio"):
        import trackio

        _ = trackio.init
    return trackio
