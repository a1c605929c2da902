"""Where clients compute: an engine takes jobs and brings back updates, wherever the sites are."""

from collections.abc import Sequence
from typing import Protocol

from atlas_fl.clients.base import Job, Update


class Engine(Protocol):
    """Anything that can carry out jobs."""

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, in their order; `action` is a key of `clients.ACTIONS`."""
        ...
