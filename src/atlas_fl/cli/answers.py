"""`atlas evaluate` and `atlas generate`: what the models of a finished run write."""

from rich.table import Table

from atlas_fl.cli import options as cli
from atlas_fl.cli.display import show
from atlas_fl.experiment.answers import Answer, Evaluation, evaluate_run
from atlas_fl.experiment.answers import generate as write_answer
from atlas_fl.storage.run_folder import find_run

SHOWN = 3
"""Answers that are shown, of different clients."""
KINDS = ("base", "alone", "federated")
COLUMNS = {
    "primary": "score",
    "perplexity": "perplexity",
    "rougeL": "ROUGE-L",
    "exact_match": "exact match",
    "preferred": "preferred",
}
"""Scores that are shown, by what their columns are called."""


def evaluate(options: cli.EvaluateOptions) -> int:
    """Score the models of the run that these words name; 0."""
    found = evaluate_run(
        options.run,
        runs_dir=options.runs_dir,
        split=options.split,
        clients=options.client,
        answers=options.answers,
        new_tokens=options.new_tokens,
    )
    shown = list({answer.client: answer for answer in found.answers}.values())[:SHOWN]
    folder = find_run(options.run, runs_dir=options.runs_dir)
    written = f"written: {folder.evaluation}" + f" and {folder.answers}" * bool(found.answers)
    show([_table(found), *(line for answer in shown for line in _lines(answer)), written])
    return 0


def _table(found: Evaluation) -> Table:
    """The mean scores over clients, a row for each kind of model."""
    table = Table(
        box=None, pad_edge=False, header_style="bold", title=f"{found.split} rows, {len(found.scores)} clients"
    )
    means = {kind: {name: found.mean(kind, name) for name in COLUMNS} for kind in KINDS}  # type: ignore[arg-type]
    names = [name for name in COLUMNS if any(row[name] is not None for row in means.values())]
    for title in ("model", *(COLUMNS[name] for name in names)):
        table.add_column(title, justify="left" if title == "model" else "right")
    for kind, row in means.items():
        if row["primary"] is not None:
            table.add_row(kind, *("-" if row[name] is None else f"{row[name]:.3f}" for name in names))
    return table


def _lines(answer: Answer) -> list[str]:
    said = [f"  {kind}: {text!r}" for kind, text in answer.answers.items()]
    return [f"{answer.client}: {answer.prompt!r}", f"  reference: {answer.reference!r}", *said]


def generate(options: cli.GenerateOptions) -> int:
    """Print what the model writes; 0."""
    show(
        [
            write_answer(
                options.run,
                options.text,
                client=options.client,
                kind=options.kind,
                runs_dir=options.runs_dir,
                new_tokens=options.new_tokens,
            )
        ]
    )
    return 0
