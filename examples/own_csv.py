"""Two clients that share a task of your own, from a csv file.

python examples/own_csv.py                            # writes a small csv of made-up reviews and trains on it
python examples/own_csv.py FILE.csv review stars      # your file, its text column and its label column
"""

import csv
import itertools
import sys
from dataclasses import replace
from pathlib import Path

from atlas_fl import find_preset, run_config, validate

GOOD = ("works at once", "is worth every penny", "made my week", "does what it says", "feels solid")
BAD = ("broke on the first day", "is a waste of money", "ruined my week", "never did what it says", "feels cheap")
THINGS = ("kettle", "lamp", "keyboard", "backpack", "umbrella", "radio", "chair", "clock", "mixer", "torch")
PLACES = ("in the kitchen", "at work", "on the road", "at home", "in the garden", "for my sister")


def write_made_up(path: Path) -> None:
    """300 different sentences for each label."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["review", "stars"])
        for label, opinions in (("good", GOOD), ("bad", BAD)):
            for thing, setting, opinion in itertools.product(THINGS, PLACES, opinions):
                rows.writerow([f"The {thing} {opinion} {setting}.", label])


def main(path: Path, text: str, label: str) -> None:
    # `smoke` is small; a name in `tasks` that `task` describes is your own
    base = find_preset("smoke")
    task = f"reviews={path},text={text},label={label}"
    data = replace(base.data, tasks=("reviews",), task=(task,), samples=64, validation_samples=32, test_samples=32)
    result = run_config(validate(replace(base, data=data)), resume=True)
    for name, client in result.summary["clients"].items():
        test = client["final"]["test"]
        print(f"{name}: accuracy {test['accuracy']:.3f}, always saying the same {test['majority']:.3f}")
    print(f"adapters: {result.folder / 'adapters'}")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    else:
        made_up = Path("made_up_reviews.csv")
        write_made_up(made_up)
        main(made_up, "review", "stars")
