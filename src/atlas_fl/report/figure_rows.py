"""The numbers that each figure of a run shows, as rows: those of its charts on the page and of the CSV file beside it.

A row is a mapping from column to text or number; the columns of one figure are the same in all its rows. What the run
does not hold has no row.
"""

import re
from collections import defaultdict
from typing import Any, TypeAlias

import numpy as np

from atlas_fl.experiment.summary import MEASURED, class_scores, mean_series, sampled_series
from atlas_fl.report.format import MOST_SHOWN, cluster_name
from atlas_fl.report.record import Record

Row: TypeAlias = dict[str, Any]
EVERY_CLIENT = "(mean)"
"""In the column of clients: the mean over the clients of a task; the specifications of charts name it too."""
ALL = "(all clients)"
"""In the column of clients: all test examples of a task."""
EMBEDDED = range(6, 2001)
"""Clients with which t-SNE shows more than the two principal components, and takes seconds."""
_SERIES = (
    ("validation score", "validation", "primary"),
    ("validation accuracy", "validation", "accuracy"),
    ("majority class", "validation", "majority"),
    ("validation loss", "validation", "loss"),
    ("training loss", "train", "loss"),
)


def convergence_rows(record: Record) -> list[Row]:
    """Scores and losses by round: of every client, and their mean over each task."""
    rows: list[Row] = []
    for task, members in record.by_task.items():
        for name, split, metric in _SERIES:
            mean = sampled_series if split == "train" else mean_series
            by_client = {member.client: member.series(split, metric) for member in members}
            by_client[EVERY_CLIENT] = mean(members, split, metric)
            rows += [
                {"task": task, "client": client, "series": name, "round": at, "value": value}
                for client, series in by_client.items()
                for at, value in series.items()
            ]
    return rows


def score_rows(record: Record) -> list[Row]:
    """Validation score of every client and round."""
    return [
        {"client": name, "task": record.task_of[name], "round": at, "score": score}
        for name in record.sorted_clients
        if name in record.histories
        for at, score in record.histories[name].series("validation").items()
    ]


def adjacency_rows(record: Record) -> list[Row]:
    """The weight of every edge of the client graph, where there are few enough clients for a map."""
    places = {name: place for place, name in enumerate(record.task_of)}
    matrix: Any = record.plan.get("adjacency") or []
    clients = record.sorted_clients if len(matrix) and len(places) <= MOST_SHOWN else []
    return [
        {"client": client, "other": other, "weight": matrix[places[client]][places[other]]}
        for client in clients
        for other in clients
        if matrix[places[client]][places[other]]
    ]


def sketch_rows(record: Record) -> list[Row]:
    """Principal components of every client's sketch, of the mean of its two halves and of both; its t-SNE if many."""
    if record.sketches is None or len(record.task_of) < 3:
        return []
    first, second, _ = principal_components(record.sketches)
    embedded = embed(record.sketches) if len(first) in EMBEDDED else np.empty((len(first), 0))
    return [
        {"client": client["name"], "task": client["task"], "cluster": cluster_name(client.get("cluster", -1))}
        | dict(zip(("x", "y", "x1", "y1", "x2", "y2"), [*(a + b) / 2, *a, *b]))
        | dict(zip(("tsne_x", "tsne_y"), place))
        for client, a, b, place in zip(record.plan["clients"], first, second, embedded)
    ]


def principal_components(sketches: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Both halves (2, n, dim) on the first two components of their means, (n, 2) each; the shares of variance (2,)."""
    halves = sketches.astype(np.float64)
    mean = halves.mean(axis=0)
    _, sizes, directions = np.linalg.svd(mean - mean.mean(axis=0), full_matrices=False)
    axes = directions[:2]
    axes *= np.where(axes[np.arange(2), np.abs(axes).argmax(axis=1)] < 0, -1.0, 1.0)[:, None]  # the sign is free
    first, second = (halves - mean.mean(axis=0)) @ axes.T
    return first, second, np.square(sizes[:2]) / max(float(np.square(sizes).sum()), 1e-300)


def embed(sketches: np.ndarray) -> np.ndarray:
    """t-SNE (van der Maaten and Hinton, 2008) of the means of two halves, (2, clients, dim): (clients, 2)."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    mean = sketches.astype(np.float64).mean(axis=0)
    perplexity = min(30.0, (len(mean) - 1) / 3)
    with threadpool_limits(1):  # its threads wait for each other: seconds in the place of milliseconds on busy cores
        places: np.ndarray = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(mean)
    return places.astype(np.float64)


def rank_rows(record: Record) -> list[Row]:
    """The rank of every client and layer that has an adapter."""
    planned = {client["name"]: client for client in record.plan["clients"]}
    return [
        {"client": name, "device": planned[name].get("device", ""), "layer": layer, "rank": rank}
        for name in record.sorted_clients
        for layer, rank in enumerate(planned[name].get("ranks", ()))
        if rank
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
    return [
        {"client": data["client"], "task": data["task"], "class": name, "examples": count}
        | {"share": count / max(1, sum(data["labels"].values()))}
        for data in record.plan.get("data") or ()
        if "distance" in data
        for name, count in data["labels"].items()
    ]


def sharing_rows(record: Record) -> list[Row]:
    """Share of its own that each client keeps of a group of parameters, by the last measurement."""
    measured = [row for row in record.metrics if row.get("event") == MEASURED]
    latest = {(row["client"], row["parameters"]): row for row in measured}
    shown = ("client", "parameters", "own_share", "effective_clients", "variance_over_noise", "round")
    return [{name: row.get(name) for name in shown} for row in latest.values()]


def group_order(group: str) -> tuple[bool, list[int], str]:
    """The place of a group of parameters: layers by their number, heads after all of them."""
    return group == "head", [int(number) for number in re.findall(r"\d+", group)], group


def mask_rows(record: Record) -> list[Row]:
    """The share of the weights of each tensor that may move."""
    sparse = record.plan.get("sparse") or {}
    mask = str(sparse.get("mask")).replace("_", " ")
    return [{"mask": mask, "tensor": name, "moving": moving} for name, moving in sparse.get("layers", {}).items()]


def class_rows(record: Record) -> list[Row]:
    """Test examples of every class, and the share that was recognised: of all clients of a task, then of each."""
    rows: list[Row] = []
    for task, members in record.by_task.items():
        groups = {ALL: members, **{member.client: [member] for member in members}}
        for client, group in groups.items():
            scores = class_scores(group, plan=record.plan).get("classes", {})
            present = {name: score for name, score in scores.items() if score["examples"]}
            rows += [{"task": task, "client": client, "class": name, **score} for name, score in present.items()]
    return rows
