"""The trials of a search as a table and as CSV."""

import csv
import re
from collections.abc import Sequence
from io import StringIO

from rich.markup import escape
from rich.table import Table

from atlas_fl.report.words import add_columns, new_table, number
from atlas_fl.search.trials import Search, Trial

SHOWN_DIGITS, LONGEST = 3, 8


def search_table(search: Search) -> Table:
    """A row for each trial, what was chosen and what it scored on validation; the best is bold."""
    names, best = list(search.best.changes), search.best
    table = new_table(f"{len(search.trials)} trials")
    add_columns(table, ["trial", *names], ["validation", "best\nround", "rounds"])
    for trial in search.trials:
        chosen = [escape(_short(trial.changes[name])) for name in names]
        score = number(trial.score, 4) if trial.scores else "-"
        rounds = f"{max(trial.scores, default=0)}{' given up' if trial.pruned else ''}"
        cells = [str(trial.number), *chosen, score, str(trial.best_round) if trial.scores else "-", rounds]
        table.add_row(*cells, style="bold" if trial is best else None)
    table.caption = f"mean validation score over clients in a trial's best round; best: trial {best.number}, {best.run}"
    return table


def search_csv(trials: Sequence[Trial]) -> str:
    """The trials as CSV with a header, in full precision."""
    names = list(trials[0].changes) if trials else []
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", *names, "validation", "best_round", "rounds", "pruned", "run"])
    for trial in trials:
        chosen = [trial.changes[name] for name in names]
        scored = [trial.score, trial.best_round, max(trial.scores)] if trial.scores else ["", "", ""]
        writer.writerow([trial.number, *chosen, *scored, str(trial.pruned).lower(), trial.run])
    return text.getvalue()


def _short(text: str) -> str:
    """A number with the digits that matter, every other value as it is.

    >>> [_short(text) for text in ("0.0003488520557", "8", "1e-4", "random")]
    ['0.000349', '8', '1e-4', 'random']
    """
    is_long = len(text) > LONGEST and re.fullmatch(r"-?[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?", text)
    return f"{float(text):.{SHOWN_DIGITS}g}" if is_long else text
