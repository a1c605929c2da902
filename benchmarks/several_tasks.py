"""Write a federation whose clients have texts of two tasks each, for methods that tell the tasks of a client apart.

Nine clients share three tasks (sentiment of films, types of questions, spam), three clients each pair of them, with 100
texts of either task. A label is a word of its task, so a client of films and questions has eight classes.

    python benchmarks/several_tasks.py mixed.csv
    atlas compare --task mixed=mixed.csv,text=text,label=label,client=client --adapted-blocks 2 --ranks 8 \\
        --lr 1e-2 --strategies local fedavg fedper kriging fedrouter --control fedavg --seeds 3
"""

import argparse
import csv
from itertools import combinations
from pathlib import Path

import numpy as np

from atlas_fl.data.registry import TASKS
from atlas_fl.data.task import Rows, Source, load_task
from atlas_fl.storage.assets import embedded_dir

NAMES = ("movie", "trec", "sms")
CLIENTS_OF_PAIR = 3
TEXTS = 100
"""Texts of each task at a client."""


def rows() -> list[tuple[str, str, str]]:
    """(text, label, client) of all clients; no text is at two of them."""
    unused: dict[str, list[tuple[str, str]]] = {}
    for name in NAMES:
        train = load_task(TASKS[name], Source(cache_dir=embedded_dir())).train
        assert isinstance(train, Rows)
        drawn = np.random.default_rng(0).permutation(len(train))
        unused[name] = [(train.text[index], f"{name} {train.label[index]}") for index in drawn]
    found = []
    for first, second in combinations(NAMES, 2):
        for number in range(CLIENTS_OF_PAIR):
            for name in (first, second):
                own, unused[name] = unused[name][:TEXTS], unused[name][TEXTS:]
                found += [(text, label, f"{first}-{second}-{number}") for text, label in own]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the csv file to write")
    args = parser.parse_args()
    with args.file.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("text", "label", "client"))
        table.writerows(rows())


if __name__ == "__main__":
    main()
