"""Number of runs that fit into the machine's memory at once: free memory over that of a run of this comparison."""

from collections.abc import Sequence
from pathlib import Path

from atlas_fl.config import run_folder
from atlas_fl.experiment.sweep import Point, run_state
from atlas_fl.storage.jsonl import read_json

TYPICAL_BYTES = 2 * 10**9
"""Memory of a process that makes several runs of a text preset with a dial (`benchmarks/RESULTS.md`); of others it is
not known before the first has ended."""
SPARE = 0.1
"""Share of the free memory that is left to others."""


def free_bytes(*, root: Path = Path("/")) -> int | None:
    """Memory that a new process may take: of the machine, or less where a control group (a container) allows less.

    None where the system does not say, as on macOS.
    """
    limits = [*_machine(root / "proc/meminfo"), *_group(root / "sys/fs/cgroup")]
    return min(limits, default=None)


def _machine(path: Path) -> list[int]:
    lines = path.read_text().splitlines() if path.is_file() else []
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]


def _group(folder: Path) -> list[int]:
    most, used = folder / "memory.max", folder / "memory.current"
    if not most.is_file() or not used.is_file() or most.read_text().strip() == "max":
        return []
    return [max(0, int(most.read_text()) - int(used.read_text()))]


def bytes_of_a_run(points: Sequence[Point]) -> int:
    """The most memory that a finished run of these took; the typical one before any has ended."""
    finished = [run_folder(point.config) for point in points if run_state(point.config) == "finished"]
    peaks = [read_json(folder.summary).get("memory", {}).get("rss_bytes", 0) for folder in finished]
    return max(peaks, default=0) or TYPICAL_BYTES


def jobs_that_fit(jobs: int, *, free: int | None, each: int) -> int:
    """So many of these jobs as fit at once, at least one.

    >>> [jobs_that_fit(8, free=free, each=2 * 10**9) for free in (10 * 10**9, 10**9, None)]
    [4, 1, 8]
    """
    return jobs if free is None else max(1, min(jobs, int(free * (1 - SPARE)) // each))


def memory_note(jobs: int, fitting: int, *, free: int | None, each: int) -> list[str]:
    """One line where fewer run at once than were asked for."""
    if free is None or fitting == jobs:
        return []
    return [
        f"{fitting} of --jobs {jobs} at once: {free / 1e9:.1f} GB of memory are free, and a run takes up to"
        f" {each / 1e9:.1f} GB"
    ]
