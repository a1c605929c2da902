"""How uneven a federation's data is: sizes and label distributions of its clients."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atlas_fl.tasks.clients import ClientData, majority


def label_statistics(clients: Sequence[ClientData]) -> tuple[dict[str, Any], ...]:
    """One row of plain data per client, in their order.

    `examples` and `majority` per split, `labels` (training examples per class name, or mean and standard deviation of
    a regression's labels), and `distance`: half the L1 distance (total variation, 0 to 1) of the client's training
    mix to that of all clients of its task; absent for a regression, as `majority` is. Of texts to be written, `words`
    (mean and standard deviation over texts) stand in the place of `labels`.
    """
    peers: dict[str, list[ClientData]] = {}
    for client in clients:
        peers.setdefault(client.task.name, []).append(client)
    return tuple(_row(client, peers[client.task.name]) for client in clients)


def shard_notes(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """A line for each task with classes of these statistics: how many examples and classes its clients have, and how
    far their mixes are from the task's.
    """
    tasks: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if "distance" in row:
            tasks.setdefault(row["task"], []).append(row)
    return tuple(_note(task, own) for task, own in tasks.items())


def _note(task: str, rows: Sequence[Mapping[str, Any]]) -> str:
    sizes = [row["examples"]["train"] for row in rows]
    classes = [sum(count > 0 for count in row["labels"].values()) for row in rows]
    apart = float(np.mean([row["distance"] for row in rows]))
    return (
        f"{task}: {sum(sizes):,} training examples over {len(rows)} client{'s' * (len(rows) > 1)}, {_span(sizes)} each,"
        f" of {_span(classes)} of {len(rows[0]['labels'])} classes; labels {apart:.2f} from the task's mix (0 to 1)"
    )


def _span(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _row(client: ClientData, same_task: Sequence[ClientData]) -> dict[str, Any]:
    splits = {"train": client.train, "validation": client.validation, "test": client.test}
    row: dict[str, Any] = {
        "client": client.name,
        "task": client.task.name,
        "examples": {split: len(rows) for split, rows in splits.items()},
    }
    if not client.task.has_classes:
        label = client.train.label
        kind = "words" if client.task.writes else "labels"
        return {**row, kind: {"mean": float(label.mean()), "std": float(label.std())}}
    own = _counts(client)
    everyone = np.sum([_counts(other) for other in same_task], axis=0)
    return {
        **row,
        "majority": {split: majority(rows) for split, rows in splits.items()},
        "labels": dict(zip(client.task.label_names, own.tolist())),
        "distance": float(0.5 * np.abs(own / own.sum() - everyone / everyone.sum()).sum()),
    }


def _counts(client: ClientData) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.bincount(client.train.label, minlength=client.task.num_labels)
