"""Differences from FedAvg with clients as units: what would other clients get?

Seeds are the units of the pages of results. Where a federation has the same clients and test rows in every seed, seeds
tell how batches and initial weights fell, and not what other clients would get. Here each client has one difference,
the mean over seeds, and the interval is Student's over clients.

    python benchmarks/clients_as_units.py benchmarks/new_federations.csv
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy import stats


def read_scores(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """By federation and method the scores of its clients by name, (clients,) float64, each the mean over seeds."""
    runs: dict[str, dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            name = " ".join(filter(None, (row["preset"], row["dial"])))
            # rows name clients in different orders where few take part in a round
            scores = dict(zip(row["clients"].split(), map(float, row["scores"].split()), strict=True))
            runs[name][row["strategy"]].append([scores[client] for client in sorted(scores)])
    return {
        name: {method: np.mean(scores, axis=0) for method, scores in methods.items()} for name, methods in runs.items()
    }


def lines(path: Path, control: str) -> Iterator[str]:
    """A table for each federation: difference, 95% interval and p over clients, and how many clients are ahead."""
    for name, methods in read_scores(path).items():
        count = len(methods[control])
        yield f"\n| {name}, {count} clients | minus {control} | 95% over clients | p | clients ahead |"
        yield "|---|---|---|---|---|"
        for method, scores in sorted(methods.items(), key=lambda item: -float(item[1].mean())):
            if method == control:
                continue
            gains = np.round(scores - methods[control], 9)
            if not gains.any():
                yield f"| `{method}` | the same scores | | | |"
                continue
            test = stats.ttest_1samp(gains, 0)
            low, high = test.confidence_interval()
            ahead = int((gains > 0).sum())
            yield (
                f"| `{method}` | {gains.mean():+.3f} | {low:+.3f} to {high:+.3f} | {test.pvalue:.3f} |"
                f" {ahead} of {count} |"
            )


def main() -> None:
    """Print the tables of these rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path, help="a file of `atlas results --csv`")
    parser.add_argument("--control", default="fedavg", help="the method that is taken off")
    given = parser.parse_args()
    print("\n".join(lines(given.rows, given.control)))


if __name__ == "__main__":
    main()
