"""Numbers of docs/paper.md that no page of results has: over some federations alone, or over several files of rows.

Ranks of 3.7; the three means that no test tells apart; the best of what costs nothing; cells that say *better* although
Student's interval over seeds contains 0; how often the Bayesian test says *better* or *worse* of two methods that are
equal; FedAvg's clients under contradiction; James-Stein at the rate of `kriging`.

    python benchmarks/paper_numbers.py
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from atlas_fl.report.federation_ranks import rank_methods
from atlas_fl.report.statistics import bayesian_signed_rank, compare_with_control, t_interval
from atlas_fl.rng import generator

FOLDER = Path(__file__).parent
NATURAL = ("senses", "raters", "countries", "editorials", "reviews")
SHOWN = 0.95

Scores = Mapping[str, Mapping[str, Mapping[int, np.ndarray]]]
"""By federation, method and seed, the scores of the clients."""


def read(name: str) -> Scores:
    """The rows of a file of `atlas results --csv`."""
    runs: dict[str, dict[str, dict[int, np.ndarray]]] = defaultdict(lambda: defaultdict(dict))
    with (FOLDER / name).open(newline="") as file:
        for row in csv.DictReader(file):
            scores = dict(zip(row["clients"].split(), map(float, row["scores"].split()), strict=True))
            runs[row["preset"]][row["strategy"]][int(row["seed"])] = np.array([scores[key] for key in sorted(scores)])
    return runs


def means(rows: Scores) -> dict[str, dict[str, float]]:
    """By federation and method, the mean over seeds and clients."""
    return {
        name: {method: float(np.mean(list(seeds.values()))) for method, seeds in methods.items()}
        for name, methods in rows.items()
    }


def ranks(title: str, federations: Mapping[str, Mapping[str, float]], *, without: Sequence[str] = ()) -> Iterator[str]:
    """Average ranks of the methods that all these federations have, with Holm's p against FedAvg and Friedman's."""
    common = [name for name in next(iter(federations.values())) if all(name in one for one in federations.values())]
    scores = {name: np.array([one[name] for one in federations.values()]) for name in common if name not in without}
    found = rank_methods(scores, control="fedavg")
    yield f"\n{title}: Friedman p {found.friedman_p:.3f}"
    for name, rank in sorted(found.average_ranks.items(), key=lambda item: item[1]):
        chance = f", p {found.against_control[name]:.3f}" if name in found.against_control else ""
        yield f"  {name} {rank:.1f}{chance}"


def uncertain(rows: Scores) -> Iterator[str]:
    """Methods that are shown better than FedAvg over seeds, while Student's interval contains 0."""
    for name, methods in rows.items():
        shared = set.intersection(*(set(seeds) for seeds in methods.values()))
        scores = {method: np.stack([seeds[seed] for seed in sorted(shared)]) for method, seeds in methods.items()}
        for method, pair in compare_with_control(scores, control="fedavg", seed=0).items():
            low, high = t_interval(np.array(pair.differences))
            if pair.bayesian.right >= SHOWN and low <= 0:
                yield f"  {name}, {method}: {pair.mean:+.3f}, 95% {low:+.3f} to {high:+.3f}"


def deviations(rows: Scores) -> str:
    """Median and largest deviation over seeds of the differences from FedAvg."""
    found = []
    for methods in rows.values():
        for method, seeds in methods.items():
            shared = sorted(seeds.keys() & methods["fedavg"].keys())
            gains = [seeds[seed].mean() - methods["fedavg"][seed].mean() for seed in shared]
            found += [np.std(gains, ddof=1)] if method != "fedavg" else []
    return f"median {np.median(found):.3f}, largest {max(found):.3f}"


def wrong_calls(seeds: int, deviation: float, *, draws: int = 1000) -> float:
    """The share of draws in which two equal methods are called better or worse."""
    rng = generator(0, "paper", seeds, str(deviation))
    wrong = 0
    for _ in range(draws):
        found = bayesian_signed_rank(rng.normal(0, deviation, seeds), rng=rng, draws=2000)
        wrong += max(found.left, found.right) >= SHOWN
    return wrong / draws


def main() -> None:
    """Print them all."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    developed, new = means(read("equal_terms.csv")), means(read("new_federations.csv"))
    texts = {name: one for name, one in new.items() if name != "clothes"}
    natural = {name: new[name] for name in NATURAL}
    lines = [
        *ranks("Five federations whose data name the clients (3.7)", natural),
        *ranks("Nine of texts (3.7)", texts),
        *ranks("All ten, without FedPAC (3.7)", new, without=["fedpac"]),
        "\n`kriging` minus the others, mean over the six federations of 3.1 and the first five of 3.7",
    ]
    eleven = [*developed.values(), *natural.values()]
    others = ("fedpac", "stb", "fedper")
    lines += [f"  {other} {np.mean([one['kriging'] - one[other] for one in eleven]):+.4f}" for other in others]
    free = ("fedavg", "local", "fedavg_prior")
    lines.append(f"\n`kriging` minus the best of {', '.join(free)} (3.1)")
    lines += [
        f"  {name} {one['kriging'] - max(one[method] for method in free):+.3f}" for name, one in developed.items()
    ]
    five = [one for name, one in developed.items() if name != "contradiction"]
    average = {method: np.mean([one[method] for one in five]) for method in five[0]}
    best = sorted(average, key=lambda method: -average[method])[:3]
    lines.append("means without contradiction: " + ", ".join(f"{method} {average[method]:.3f}" for method in best))
    lines.append("\nShown better, though Student's interval over the seeds contains 0 (3.7)")
    lines += uncertain(read("new_federations.csv"))
    lines.append("\nTwo equal methods called better or worse, by seeds and deviation of a difference over seeds")
    for seeds in (5, 10):
        calls = (f"{deviation} {wrong_calls(seeds, deviation):.1%}" for deviation in (0.02, 0.04, 0.06, 0.08))
        lines.append(f"  {seeds} seeds: {', '.join(calls)}")
    for section, name in (("3.1", "equal_terms.csv"), ("3.7", "new_federations.csv")):
        lines.append(f"Deviations in {section}: {deviations(read(name))}")
    one_model = read("equal_terms.csv")["contradiction"]["fedavg"]
    clients = np.mean(list(one_model.values()), axis=0).round(2)
    lines.append(f"\nFedAvg under contradiction, by client: {clients.tolist()}")
    ours = read("at_fedavgs_rate.csv")["concept-shift"]["kriging"]
    shrunk = read("other_methods.csv")["concept-shift"]["james_stein"]
    apart = [shrunk[seed].mean() - ours[seed].mean() for seed in shrunk]
    words = f"{np.mean(apart):+.3f}, by seed {np.round(apart, 3).tolist()}"
    lines.append(f"James-Stein minus `kriging`, both at the rate .005, concept shift: {words}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
