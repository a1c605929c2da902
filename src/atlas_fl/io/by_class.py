"""Accuracy by class, from the counts that the rows of test images hold."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atlas_fl.io.scores import History

Counts = np.ndarray[Any, np.dtype[np.int64]]


def counts_of(history: History) -> tuple[Counts, Counts] | None:
    """(hits, examples) by class of a client's last test scores, (classes,) each; None where they were not counted."""
    rows = history.splits.get("test", {})
    found = rows[max(rows)].get("classes") if rows else None
    return None if found is None else (np.array(found["hits"]), np.array(found["examples"]))


def class_names(plan: Mapping[str, Any], task: str) -> list[str]:
    """The task's classes in order, as the plan names them; none where it does not."""
    rows = [row for row in plan.get("data") or () if row["task"] == task]
    return list(rows[0].get("labels", ())) if rows else []


def classes_of(members: Sequence[History], *, plan: Mapping[str, Any]) -> dict[str, Any]:
    """`classes`: by class, the test examples of these clients and the share of them that was recognised.

    Every image counts once, each scored by the model of its own client. Of no example there is no accuracy. Nothing
    where the clients' rows have no counts.
    """
    found = [own for member in members if (own := counts_of(member)) is not None]
    if not found:
        return {}
    hits, examples = (np.sum([own[place] for own in found], axis=0) for place in (0, 1))
    names = class_names(plan, members[0].task) or [str(place) for place in range(len(hits))]
    return {
        "classes": {
            name: {"examples": int(total)} | ({"accuracy": float(right / total)} if total else {})
            for name, right, total in zip(names, hits, examples, strict=True)
        }
    }
