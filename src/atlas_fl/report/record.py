"""A run folder read into memory, as the figures and tables need it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from atlas_fl.experiment.summary import MEASURED, History, histories
from atlas_fl.storage.digests import check_files, read_checked, read_checked_rows
from atlas_fl.storage.ledger import LedgerRow, Totals, totals
from atlas_fl.storage.run_folder import RunFolder, find_run
from atlas_fl.storage.tensors import read_sketches


@dataclass(frozen=True, kw_only=True)
class Record:
    """Files of a run in memory, as far as it went."""

    name: str
    plan: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    ledger: Sequence[LedgerRow]
    sketches: tuple[np.ndarray, np.ndarray] | None = None
    """Both sketches of every client, float32 (n, dim) each; None where no client was fingerprinted."""

    @cached_property
    def histories(self) -> dict[str, History]:
        """The evaluations by client, in the order of the plan."""
        by_client = histories(self.metrics)
        return {name: by_client[name] for name in self.clients if name in by_client}

    @cached_property
    def totals(self) -> Totals:
        """The sums of the ledger."""
        return totals(self.ledger)

    @property
    def clients(self) -> list[str]:
        """The clients' names, in the order of the plan."""
        return [client["name"] for client in self.plan["clients"]]

    @property
    def task_of(self) -> dict[str, str]:
        """Each client's task."""
        return {client["name"]: client["task"] for client in self.plan["clients"]}

    @property
    def tasks(self) -> list[str]:
        """The tasks, in the order of their first client: the order of their colours."""
        return list(dict.fromkeys(self.task_of.values()))

    @property
    def sharing(self) -> list[Mapping[str, Any]]:
        """The rows that say how much of its own a client keeps, older ones first."""
        return [row for row in self.metrics if row.get("event") == MEASURED]

    @property
    def has_adapters(self) -> bool:
        """True if clients trained adapters; the plan of whole models has an empty list of ranks for everyone."""
        return any(client.get("ranks") != [] for client in self.plan["clients"])

    @property
    def cluster_of(self) -> dict[str, int]:
        """Each client's cluster; -1 is in none."""
        return {client["name"]: client.get("cluster", -1) for client in self.plan["clients"]}

    @property
    def by_task(self) -> dict[str, list[History]]:
        """The evaluations by task."""
        members = self.histories.values()
        return {task: [member for member in members if member.task == task] for task in self.tasks}

    @property
    def sorted_clients(self) -> list[int]:
        """Indices of the clients with clusters side by side, tasks inside them, undecided clients last."""
        clusters, tasks = self.cluster_of, self.tasks
        sort_keys = [(clusters[name] < 0, clusters[name], tasks.index(self.task_of[name])) for name in self.clients]
        return sorted(range(len(sort_keys)), key=lambda index: sort_keys[index])


def read_record(run: Path | str) -> Record:
    """The record of a run folder; of a run that is not complete, the rounds up to its newest checkpoint.

    Raises:
        CheckpointError: this is no run folder, or a file in it is damaged.
    """
    folder: RunFolder = find_run(run)
    file, plan = _plan(folder)
    check_files(folder, folder.sketches_of(file.name))
    sketches = read_sketches(folder.sketches_of(file.name))
    return Record(
        name=folder.path.resolve().name,
        plan=plan,
        metrics=read_checked_rows(folder, folder.metrics),
        ledger=[LedgerRow(**row) for row in read_checked_rows(folder, folder.ledger)],
        sketches=None if sketches is None else (sketches[0], sketches[1]),
    )


def _plan(folder: RunFolder) -> tuple[Path, Mapping[str, Any]]:
    """The plan that all is shown by, and its file: the first one, or where clients joined later the last one."""
    first, last = folder.plan, folder.plans()[-1]
    plans = {file: read_checked(folder, file, "clients") for file in dict.fromkeys((first, last))}
    file = last if len(plans[last]["clients"]) > len(plans[first]["clients"]) else first
    return file, plans[file]
