"""`atlas evaluate` and `atlas generate`: what the models of a finished run write."""

from atlas_fl.cli import options as cli
from atlas_fl.cli.display import show
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.answers import Answer, evaluate_run, judge_run
from atlas_fl.experiment.answers import generate as write_answer
from atlas_fl.experiment.harness import harness_run
from atlas_fl.experiment.judge import Judge
from atlas_fl.report.answers import harness_table, scores_table
from atlas_fl.storage.run_folder import find_run

NEEDED = {"judge_model": "judge", **dict.fromkeys(("harness_tasks", "harness_limit", "harness_chat"), "harness")}
"""By option the one that it belongs to."""
SHOWN = 3
"""Answers that are shown, of different clients."""


def evaluate(options: cli.EvaluateOptions) -> int:
    """Score the models of the run that these words name; 0."""
    for name, needed in NEEDED.items():
        if getattr(options, name) and not getattr(options, needed):
            raise ConfigError(f"--{name.replace('_', '-')} goes with --{needed}; add that, or leave it out")
    judge = None if options.judge is None else Judge(url=options.judge, model=options.judge_model or "")
    folder = find_run(options.run, runs_dir=options.runs_dir)
    if options.harness:
        results = harness_run(
            folder.path,
            options.harness,
            clients=options.client,
            tasks_dir=options.harness_tasks,
            limit=options.harness_limit,
            chat=options.harness_chat,
        )
        show([harness_table(results), f"written: {folder.harness}"])
        return 0
    evaluation = evaluate_run(
        folder.path,
        split=options.split,
        clients=options.client,
        answers=options.answers,
        new_tokens=options.new_tokens,
        choices=options.choices,
    )
    if judge is not None:
        evaluation = judge_run(folder.path, judge)
    shown = list({answer.client: answer for answer in evaluation.answers}.values())[:SHOWN]
    written = f"written: {folder.evaluation}" + f" and {folder.answers}" * bool(evaluation.answers)
    show([scores_table(evaluation), *(line for answer in shown for line in _lines(answer)), written])
    return 0


def _lines(answer: Answer) -> list[str]:
    said = [f"  {kind}: {text!r}" for kind, text in answer.answers.items()]
    return [f"{answer.client}: {answer.prompt!r}", f"  reference: {answer.reference!r}", *said]


def generate(options: cli.GenerateOptions) -> int:
    """Print what the model writes; 0."""
    written = write_answer(
        find_run(options.run, runs_dir=options.runs_dir).path,
        options.text,
        client=options.client,
        kind=options.kind,
        new_tokens=options.new_tokens,
        system=options.system,
    )
    show([written])
    return 0
