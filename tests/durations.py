"""How long every test takes: a file with all durations, and a list of the tests that lack the marker `slow`.

The hooks of this module are re-exported by `tests/conftest.py`. CPU seconds decide what is slow, since a busy machine
stretches the wall time of a test to several times its length. They still vary by some tens of percent, and the first
test of a process pays for imports and session fixtures, so that a long test is listed and does not fail.
"""

import os
from collections import defaultdict
from pathlib import Path

import pytest

SLOW_SECONDS = 3.0
"""CPU seconds of a test, of the fixtures that it set up and of the processes that it has waited for."""
MARKERS = ("slow", "core")
"""What says that a test may take longer."""
CPU_SECONDS = "cpu_seconds"
_START = pytest.StashKey[float]()


class Durations:
    """Collects the durations of all tests in the process that writes the report."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.wall: defaultdict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = {}
        self.markers: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase (setup, call or teardown) of a test."""
        self.wall[report.nodeid] += report.duration
        if CPU_SECONDS in (properties := dict(report.user_properties)):
            self.cpu[report.nodeid] = float(properties[CPU_SECONDS])
        self.markers[report.nodeid] = next((marker for marker in MARKERS if marker in report.keywords), "")

    def pytest_sessionfinish(self) -> None:
        """Write a table, separated by tabs, with the longest test first."""
        if self.path is None:
            return
        rows = [
            f"{cpu:.3f}\t{self.wall[test]:.3f}\t{self.markers[test]}\t{test}\n"
            for test, cpu in sorted(self.cpu.items(), key=lambda item: -item[1])
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(["cpu_seconds\twall_seconds\tmarker\ttest\n", *rows]), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """List the long tests without the marker."""
        unmarked = {test: cpu for test, cpu in self.cpu.items() if cpu > SLOW_SECONDS and not self.markers[test]}
        if unmarked:
            title = f"over {SLOW_SECONDS:g} CPU seconds and marked neither slow nor core"
            terminalreporter.section(title)
            for test, cpu in sorted(unmarked.items(), key=lambda item: -item[1]):
                terminalreporter.line(f"{cpu:6.1f} s  {test}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the file."""
    parser.addoption("--durations-file", type=Path, help="write the CPU and wall seconds of every test to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Collect in the controller of pytest-xdist, or where there are no workers."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config.getoption("--durations-file")))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the clock before the first fixture."""
    item.stash[_START] = sum(os.times()[:4])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Stop the clock before fixtures end, which may end processes of many tests; the report carries the figure."""
    if call.when == "call":
        item.user_properties.append((CPU_SECONDS, sum(os.times()[:4]) - item.stash[_START]))
