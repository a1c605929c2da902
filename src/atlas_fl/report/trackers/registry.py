"""TRACKERS: experiment trackers by name, and those of plug-ins (`--tracker name=place`)."""

from collections.abc import Callable

from atlas_fl.report.trackers.track_run import Tracker
from atlas_fl.report.trackers.wandb import WandbTracker

TRACKERS: dict[str, Callable[[str], Tracker]] = {"wandb": WandbTracker}
"""By name, what makes a tracker of a place to log to."""
