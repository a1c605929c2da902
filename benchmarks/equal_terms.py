"""Every method in every federation on equal terms, to be stopped and gone on with; the rows are the results.

A unit is a few methods in one federation: their trials on development seeds, then the chosen settings on the seeds of
the comparison (`atlas compare --trials`), in one process, where they share what they have in common. Its rows go to a
CSV file with the record of its tuning, and its folder below `--folders` is deleted; a unit that was stopped goes on
with the runs in its folder. Methods whose rows are there are not run again; rows of settings that mean something else
by now are refused by `atlas results`. The pages of results are made from the file alone.

    python benchmarks/equal_terms.py --rows benchmarks/equal_terms.csv --jobs 2 --minutes 60
    atlas results benchmarks/equal_terms.csv --control fedavg --all --to docs/results.md
"""

import argparse
import csv
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from atlas_fl.report.finished_runs import find_finished_runs, to_csv

PLAN = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Methods in one federation."""

    federation: str
    flags: str
    methods: tuple[str, ...]
    trials: int
    seeds: int

    def command(self, folder: Path) -> list[str]:
        """The comparison of these methods, whose folders and rows are below the folder."""
        words = f"--strategies {' '.join(self.methods)} --trials {self.trials} --seeds {self.seeds} --runs-dir"
        return [sys.executable, "-m", "atlas_fl", "compare", *shlex.split(f"{self.flags} {words}"), str(folder)]


def is_done(rows: Path, flags: str, method: str, seeds: int) -> bool:
    """Return whether the file has a row of each seed of this method, tuned."""
    if not rows.exists():
        return False
    values = dict(zip(*[iter(shlex.split(flags))] * 2, strict=True))
    wanted = values["--preset"], values.get("--dial", ""), method
    with rows.open(newline="") as file:
        done = {
            row["seed"]
            for row in csv.DictReader(file)
            if (row["preset"], row["dial"], row["strategy"]) == wanted and row["tuning"]
        }
    return len(done) >= seeds


def missing_units(plan: Path, rows: Path, federations: list[str], methods: list[str], together: int) -> Iterator[Unit]:
    """What the file lacks, in the order of the plan's parts; a part without federations of its own has the common."""
    parts = tomllib.loads(plan.read_text(encoding="utf-8"))
    common = parts.pop("federations", {})
    for part in parts.values():
        for federation, flags in part.get("federations", common).items():
            wanted = [
                method
                for method in part["methods"]
                if (not federations or federation in federations)
                and (not methods or method in methods)
                and not is_done(rows, flags, method, part["seeds"])
            ]
            for begin in range(0, len(wanted), together):
                counts = {"trials": part["trials"], "seeds": part["seeds"]}
                yield Unit(
                    federation=federation, flags=flags, methods=tuple(wanted[begin : begin + together]), **counts
                )


def main() -> int:
    """Run what is missing, as long as there is time; 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", type=Path, default=PLAN, help="what to run")
    parser.add_argument("--rows", type=Path, default=Path("benchmarks/equal_terms.csv"), help="the file of rows")
    parser.add_argument("--together", type=int, default=4, help="methods of a unit")
    parser.add_argument("--jobs", type=int, default=2, help="units at once")
    parser.add_argument("--folders", type=Path, default=Path("runs/equal_terms"), help="where units keep their runs")
    parser.add_argument("--minutes", type=float, default=60, help="no unit begins after so many minutes")
    parser.add_argument("--federations", nargs="*", default=[], help="these alone")
    parser.add_argument("--methods", nargs="*", default=[], help="these alone")
    given = parser.parse_args()
    end, writing = time.monotonic() + 60 * given.minutes, Lock()
    missing = list(missing_units(given.plan, given.rows, given.federations, given.methods, given.together))
    print(f"{len(missing)} units are missing", flush=True)

    def run(unit: Unit) -> None:
        if time.monotonic() > end:
            return
        began = time.monotonic()
        folder = given.folders / "-".join((unit.federation, *unit.methods))
        done = subprocess.run(unit.command(folder), capture_output=True, text=True, check=False)
        words = f"{unit.federation} {' '.join(unit.methods)}: {time.monotonic() - began:.0f} s"
        if done.returncode:
            (reason, *_) = done.stderr.strip().splitlines()[-1:] or ["no reason"]
            print(f"{words}, failed: {reason}", flush=True)
        else:
            with writing:
                places = [folder, *([given.rows] if given.rows.exists() else [])]
                given.rows.write_text(to_csv(find_finished_runs(places)), encoding="utf-8")
            print(words, flush=True)
            shutil.rmtree(folder)

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(run, missing))
    return 0


if __name__ == "__main__":
    sys.exit(main())
