"""Scores and answers of a run's models by kind, as `atlas evaluate` left them: tables of a terminal and of a page."""

from itertools import zip_longest

from atlas_fl.data.clients import group_by
from atlas_fl.experiment.answers import KINDS, Evaluation
from atlas_fl.experiment.harness import BASE, Scores
from atlas_fl.report.format import EMPTY
from atlas_fl.report.table import Cell, Table, count, plain, word

COLUMNS = {
    "primary": "score",
    "perplexity": "perplexity",
    "rougeL": "ROUGE-L",
    "exact_match": "exact match",
    "acc": "choice",
    "acc_norm": "choice by length",
    "preferred": "preferred",
}
"""Scores that are shown, by their headings."""
SHOWN = 24
"""Most answers of a table."""
LONGEST = 400
"""Most characters of a text in it."""
NOTHING = "(nothing)"


def scores_table(found: Evaluation) -> Table:
    """The mean scores over clients, a row for each kind of model."""
    means = {kind: {name: found.mean(kind, name) for name in COLUMNS} for kind in KINDS}
    rows: list[list[Cell]] = [
        [kind, count(found.clients(kind)), *(plain(row[name]) for name in COLUMNS)]
        for kind, row in means.items()
        if row["primary"] is not None
    ]
    title = f"Models on the {found.split} rows of {len(found.scores)} clients"
    columns = ["model", "clients", *COLUMNS.values()]
    return Table(title=title, columns=columns, rows=rows, note="\n".join([NOTE, *found.notes])).without_empty()


NOTE = (
    "means over clients; choice: share of rows whose answer is the likeliest of all choices; preferred:"
    " share of pairs whose chosen answer gains more over the base than the rejected one; base: the model before"
    " fine-tuning; alone: each client's own, trained without the others; federated: the run's"
)


def answers_table(found: Evaluation) -> Table:
    """Some answers of every client, next to each other."""
    by_client = group_by(found.answers, lambda answer: answer.client)
    in_turn = [answer for answers in zip_longest(*by_client.values()) for answer in answers if answer is not None]
    shown = sorted(in_turn[:SHOWN], key=lambda answer: list(by_client).index(answer.client))
    note = f"{len(shown)} of {len(found.answers)}; all are in answers.jsonl"
    rows: list[list[Cell]] = [
        [
            answer.client,
            _end(answer.prompt),
            _beginning(answer.reference),
            *(_beginning(answer.answers.get(kind)) for kind in KINDS),
            word(answer.verdict),
        ]
        for answer in shown
    ]
    return Table(title="Answers", columns=["client", "prompt", "reference", *KINDS, "judge"], rows=rows, note=note)


def harness_table(found: Scores) -> Table:
    """Scores of lm-evaluation-harness: a row for each task and metric, a column for each model."""
    rows: list[list[Cell]] = [
        [task, metric, *(plain(own.get(task, {}).get(metric)) for own in found.values())]
        for task, metrics in found[BASE].items()
        for metric in metrics
    ]
    note = "base: the model before fine-tuning; what an adapter loses against it is forgotten"
    return Table(title="lm-evaluation-harness", columns=["task", "metric", *found], rows=rows, note=note)


def _end(text: str) -> str:
    left_out = len(text) - LONGEST
    return text if left_out <= 0 else f"[{left_out} characters left out] {text[left_out:]}"


def _beginning(text: str | None) -> str:
    """The text, cut; a dash for None, where a client has no model of this kind."""
    if text is None:
        return EMPTY
    left_out = len(text) - LONGEST
    return text or NOTHING if left_out <= 0 else f"{text[:LONGEST]} [{left_out} characters left out]"
