"""TRACKERS: the experiment trackers of plug-ins by name (`--tracker name=place`)."""

from collections.abc import Callable

from atlas_fl.report.trackers.track_run import Tracker

TRACKERS: dict[str, Callable[[str], Tracker]] = {}
"""By name, what makes a tracker of a place to log to."""
