"""The page of one run, in the order in which people ask."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atlas_fl.experiment.summary import attack_note
from atlas_fl.report.finished_runs import read_summary
from atlas_fl.report.html.elements import Page
from atlas_fl.report.html.run_clients import data_of_clients, likeness, moving_weights, ranks, sharing
from atlas_fl.report.html.run_costs import leakage, memory, mishaps, time, traffic
from atlas_fl.report.html.run_scores import convergence, outcome
from atlas_fl.report.html.run_settings import settings_section
from atlas_fl.report.record import read_record
from atlas_fl.storage.json_shapes import require_fields
from atlas_fl.storage.run_folder import find_run


def run_page(run: Path | str) -> Page:
    """The page of a run; of one that is not complete, of its rounds up to the newest checkpoint.

    A section for which the run's files hold nothing is left out.

    Raises:
        CheckpointError: this is no run folder, or a file in it is damaged.
    """
    folder = find_run(run)
    record = read_record(folder.path)
    summary = read_summary(folder.path) if folder.summary.exists() else None
    if summary is not None:
        require_fields(summary, "run", "clients", file=folder.summary)
    sections = [
        outcome(record, summary),
        data_of_clients(record),
        likeness(record),
        ranks(record),
        sharing(record),
        moving_weights(record),
        convergence(record),
        traffic(record, summary),
        memory(record, summary),
        time(record, summary),
        mishaps(record),
        leakage(record),
        settings_section(folder, summary),
    ]
    last = max((row["round"] for row in record.metrics), default=0)
    attack = attack_note(summary or {})
    warnings = [*([] if summary is not None else [_incomplete_note(last)]), *([attack] if attack else [])]
    return Page(
        title=record.name,
        subtitle=_subtitle((summary or {}).get("run") or {}, last),
        sections=[section for section in sections if section is not None],
        warnings=warnings,
    )


def _incomplete_note(last: int) -> str:
    """What is missing of a run without a summary."""
    done = f"Shown is what was saved after round {last}." if last else "No round has been saved yet."
    return f"This run is not complete. {done}"


def _subtitle(run: Mapping[str, Any], last: int) -> str:
    words = [f"{name} {run[name]}" for name in ("preset", "strategy", "model", "seed") if run.get(name) is not None]
    return ", ".join(["one run", *words, f"{last} round{'' if last == 1 else 's'}"])
