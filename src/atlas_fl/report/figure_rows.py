"""The numbers that each figure of a run shows, as rows: for the CSV files beside the figures and for charts of pages.

A row is a mapping from column to text or number; the columns of one figure are the same in all its rows. What the run
does not hold has no row.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from atlas_fl.experiment.summary import class_counts, class_names, mean_series, sampled_series
from atlas_fl.report.csv_text import format_csv
from atlas_fl.report.record import Record

Row: TypeAlias = dict[str, Any]
EVERY_CLIENT = "(mean)"
"""In the column of clients: the mean over the clients of a task."""


def convergence_rows(record: Record) -> list[Row]:
    """Scores and losses by round: of every client, and their mean over each task."""
    rows: list[Row] = []
    for task, members in record.by_task.items():
        for member in members:
            for name, split, metric in _SERIES:
                rows += _series_rows(member.series(split, metric), task=task, client=member.client, series=name)
        for name, split, metric in _SERIES:
            mean = sampled_series if split == "train" else mean_series
            rows += _series_rows(mean(members, split, metric), task=task, client=EVERY_CLIENT, series=name)
    return rows


_SERIES = (
    ("validation score", "validation", "primary"),
    ("validation accuracy", "validation", "accuracy"),
    ("majority class", "validation", "majority"),
    ("validation loss", "validation", "loss"),
    ("training loss", "train", "loss"),
)


def _series_rows(values: Mapping[int, float], **names: str) -> list[Row]:
    return [{**names, "round": at, "value": value} for at, value in values.items()]


def score_rows(record: Record) -> list[Row]:
    """Validation score of every client and round, and its accuracy above the majority class where both are known."""
    rows = []
    for history in record.histories.values():
        for at, row in history.splits.get("validation", {}).items():
            if "primary" in row:
                has_gain = "accuracy" in row and "majority" in row
                gain = row["accuracy"] - row["majority"] if has_gain else None
                names = {"client": history.client, "task": history.task}
                rows.append({**names, "round": at, "score": row["primary"], "gain": gain})
    return rows


def pair_rows(record: Record, matrix: Sequence[Sequence[float]] | None, *, name: str) -> list[Row]:
    """A matrix of clients, (clients, clients), entry by entry; clients with clusters side by side."""
    order, clients = record.sorted_clients, record.clients
    if matrix is None:
        return []
    return [{"client": clients[i], "other": clients[j], name: matrix[i][j]} for i in order for j in order]


def adjacency_rows(record: Record) -> list[Row]:
    """The weight of every edge of the client graph."""
    rows = pair_rows(record, record.plan.get("adjacency"), name="weight")
    return [row for row in rows if row["weight"]]


def similarity_rows(record: Record) -> list[Row]:
    """The similarity of every two clients that clusters were made from."""
    return pair_rows(record, (record.plan.get("clustering") or {}).get("similarity"), name="similarity")


def member_rows(record: Record) -> list[Row]:
    """Task and cluster of every client, in the order of the heat maps."""
    clients = [record.clients[index] for index in record.sorted_clients]
    return [{"client": name, "task": record.task_of[name], "cluster": record.cluster_of[name]} for name in clients]


def component_rows(record: Record, places: np.ndarray, *, names: tuple[str, str] = ("x", "y")) -> list[Row]:
    """Where each client lies, (clients, 2), with its task and cluster."""
    return [
        {"client": client, "task": record.task_of[client], "cluster": record.cluster_of[client]}
        | dict(zip(names, place.tolist()))
        for client, place in zip(record.clients, places)
    ]


def sketch_rows(record: Record) -> list[Row]:
    """The principal components of every client's sketch: the mean of its two halves, and both halves."""
    if record.sketches is None:
        return []
    first, second, _ = principal_components(*record.sketches)
    halves = [dict(zip(("x1", "y1", "x2", "y2"), (*a, *b))) for a, b in zip(first.tolist(), second.tolist())]
    return [row | half for row, half in zip(component_rows(record, (first + second) / 2), halves)]


def principal_components(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both halves on the first two principal components of their means, (n, 2) each, and the shares of variance (2,).

    Sketches are (n, dim). With fewer than three clients the missing components are zero.
    """
    mean = (first.astype(np.float64) + second.astype(np.float64)) / 2
    centre = mean.mean(axis=0)
    _, sizes, directions = np.linalg.svd(mean - centre, full_matrices=False)
    axes = np.zeros((2, mean.shape[1]))
    axes[: len(directions[:2])] = directions[:2]
    axes *= np.where(axes[np.arange(2), np.abs(axes).argmax(axis=1)] < 0, -1.0, 1.0)[:, None]  # the sign is free
    shares = np.zeros(2)
    variance = np.square(sizes)
    shares[: len(variance[:2])] = variance[:2] / max(float(variance.sum()), 1e-300)
    return (first - centre) @ axes.T, (second - centre) @ axes.T, shares


def rank_rows(record: Record) -> list[Row]:
    """The rank of every client and layer."""
    planned = [record.plan["clients"][index] for index in record.sorted_clients]
    return [
        {"client": client["name"], "device": client.get("device", ""), "layer": layer, "rank": rank}
        for client in planned
        for layer, rank in enumerate(client.get("ranks", ()))
    ]


def traffic_rows(record: Record) -> list[Row]:
    """Bytes by round, direction and kind."""
    sums: dict[tuple[int, str, str], int] = defaultdict(int)
    for row in record.ledger:
        sums[row.round, row.direction, row.kind] += row.bytes
    return [
        {"round": at, "direction": direction, "kind": kind, "bytes": total}
        for (at, direction, kind), total in sorted(sums.items())
    ]


def label_rows(record: Record) -> list[Row]:
    """Training examples of every client and class, and their share of the client's; no row where labels are numbers."""
    rows: list[Row] = []
    for data in record.plan.get("data") or ():
        labels = data.get("labels")
        if "distance" not in data or not isinstance(labels, Mapping):
            continue
        total = sum(labels.values())
        names = {"client": data["client"], "task": data["task"]}
        rows += [
            {**names, "class": name, "examples": held, "share": held / total if total else None}
            for name, held in labels.items()
        ]
    return rows


def leakage_rows(record: Record) -> list[Row]:
    """Leakage of each task's texts through a cut after so many blocks."""
    return [dict(row) for row in record.plan.get("leakage") or ()]


def sharing_rows(record: Record) -> list[Row]:
    """Share of its own that each client keeps of a group of parameters, by the last measurement."""
    latest = {(row["client"], row["parameters"]): row for row in record.sharing}
    shown = ("client", "parameters", "own_share", "effective_clients", "variance_over_noise", "round")
    return [{name: row.get(name) for name in shown} for row in latest.values()]


def group_order(group: str) -> tuple[bool, list[int], str]:
    """The place of a group of parameters: layers by their number, heads after all of them."""
    return group == "head", [int(number) for number in re.findall(r"\d+", group)], group


def mask_rows(record: Record) -> list[Row]:
    """The share of the weights of each tensor that may move."""
    layers = (record.plan.get("sparse") or {}).get("layers") or {}
    return [{"tensor": name, "moving": moving} for name, moving in layers.items()]


def class_rows(record: Record) -> list[Row]:
    """Test examples of every client and class, and how many of them were recognised."""
    rows: list[Row] = []
    for member in record.histories.values():
        counts = class_counts(member)
        if counts is not None:
            hits, examples = counts
            names = class_names(record.plan, member.task) or [str(index) for index in range(len(hits))]
            rows += [
                {
                    "task": member.task,
                    "client": member.client,
                    "class": name,
                    "hits": int(right),
                    "examples": int(total),
                }
                for name, right, total in zip(names, hits, examples, strict=True)
            ]
    return rows


ROWS: dict[str, Callable[[Record], list[Row]]] = {
    "convergence": convergence_rows,
    "scores": score_rows,
    "adjacency": adjacency_rows,
    "clusters": sketch_rows,
    "ranks": rank_rows,
    "bytes": traffic_rows,
    "classes": label_rows,
    "leakage": leakage_rows,
    "sharing": sharing_rows,
    "mask": mask_rows,
    "by-class": class_rows,
}
"""By the name of the figure's file."""


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows with a header, numbers in full precision, unknown ones empty; empty where there is no row."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return format_csv(names, [[row.get(name) for name in names] for row in rows]) if rows else ""
