"""A run folder read into memory, as the figures and tables need it."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from atlas_fl.experiment.summary import History, histories
from atlas_fl.frozen import Frozen
from atlas_fl.report.finished_runs import read_summary
from atlas_fl.storage import digests, tensors
from atlas_fl.storage.ledger import LedgerRow, Totals, totals
from atlas_fl.storage.run_folder import find_run


class Record(Frozen):
    """Files of a run in memory, as far as it went."""

    name: str
    plan: Mapping[str, Any]
    """The first plan, or where clients joined later the last one."""
    metrics: Sequence[Mapping[str, Any]]
    ledger: Sequence[LedgerRow]
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Empty until the run is complete."""
    sketches: np.ndarray | None = None
    """Both sketches of every client, float32 (2, n, dim); None where no client was fingerprinted."""

    @cached_property
    def histories(self) -> dict[str, History]:
        """The evaluations by client, in the order of the plan."""
        by_client = histories(self.metrics)
        return {name: by_client[name] for name in self.task_of if name in by_client}

    @cached_property
    def totals(self) -> Totals:
        """The sums of the ledger."""
        return totals(self.ledger)

    @cached_property
    def task_of(self) -> dict[str, str]:
        """Each client's task, in the order of the plan."""
        return {client["name"]: client["task"] for client in self.plan["clients"]}

    @property
    def tasks(self) -> list[str]:
        """The tasks, in the order of their first client: the order of their colours."""
        return list(dict.fromkeys(self.task_of.values()))

    @property
    def by_task(self) -> dict[str, list[History]]:
        """The evaluations by task."""
        members = self.histories.values()
        return {task: [member for member in members if member.task == task] for task in self.tasks}

    @property
    def sorted_clients(self) -> list[str]:
        """The clients with clusters side by side, tasks inside them, undecided clients last."""
        clusters = {client["name"]: client.get("cluster", -1) for client in self.plan["clients"]}
        tasks = self.tasks
        return sorted(
            self.task_of, key=lambda name: (clusters[name] < 0, clusters[name], tasks.index(self.task_of[name]))
        )


def read_record(run: Path | str) -> Record:
    """The record of a run folder; of a run that is not complete, the rounds up to its newest checkpoint.

    Raises:
        CheckpointError: this is no run folder, or a file in it is damaged.
    """
    folder = find_run(run)
    first, last = folder.plan, folder.plans()[-1]
    plans = {file: digests.read_checked(folder, file, "clients") for file in dict.fromkeys((first, last))}
    file = last if len(plans[last]["clients"]) > len(plans[first]["clients"]) else first
    digests.check_files(folder, folder.sketches_of(file.name))
    return Record(
        name=folder.path.resolve().name,
        plan=plans[file],
        metrics=digests.read_checked_rows(folder, folder.metrics),
        ledger=[LedgerRow(**row) for row in digests.read_checked_rows(folder, folder.ledger)],
        summary=read_summary(folder.path) if folder.summary.exists() else {},
        sketches=tensors.read_sketches(folder.sketches_of(file.name)),
    )
