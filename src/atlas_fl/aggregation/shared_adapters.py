"""Adapters shared by a cluster above its clients' cuts, in the server's step: one model instead of several.

    row of a shared set = sum_k p_k M_k        over the owners k that are present, p_k their shares of the examples

so that every owner gets the same; all of M's weights on owners fall on the first of them, whose tensors are everyone's.
A set with one owner, and the set of clusters that mix within themselves by averaging, move as without sharing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float64

from atlas_fl.aggregation.matrices import Federation, bounded_weights
from atlas_fl.params import HEAD, LORA_A, LORA_B, PRIVATE, ByClient, Params


def owners_of(federation: Federation, layer: int) -> list[list[int]]:
    """The clients, by their places, that share the adapters of this block: those of a cluster that are cut below it."""
    by_cluster: dict[int, list[int]] = {}
    for k, (cluster, cut) in enumerate(zip(federation.clusters.tolist(), federation.cuts)):
        if cut is not None and cut <= layer:
            by_cluster.setdefault(cluster, []).append(k)
    return [owners for owners in by_cluster.values() if len(owners) > 1]


def shared_layer_of(federation: Federation, key: str) -> int | None:
    """The block of an adapter's tensor; None for a head, and for the name of what is at the client."""
    return (
        None
        if key.startswith(HEAD) or key == PRIVATE
        else federation.layer_of[key.removesuffix(LORA_A).removesuffix(LORA_B)]
    )


def tie_rows(
    matrix: Float64[np.ndarray, "n n"],
    federation: Federation,
    layer: int,
    *,
    present: Bool[np.ndarray, " n"],
    max_share: float = 1.0,
) -> Float64[np.ndarray, "n n"]:
    """M (n, n) for the tensors of this block, in which those who share them have one row."""
    groups = owners_of(federation, layer)
    if not groups:
        return matrix
    new = np.array(matrix, np.float64)
    for owners in groups:
        counted = [k for k in owners if present[k]] or owners
        examples = np.asarray(federation.weights)[counted]
        row = np.average(matrix[counted], axis=0, weights=bounded_weights(examples, max_share))
        weight, row[owners] = row[owners].sum(), 0.0
        # Who is drawn to nobody stays exactly what it is.
        row[owners[0]] = weight if row.any() else 1.0
        new[owners] = row if row[owners[0]] != 1.0 or np.count_nonzero(row) > 1 else np.eye(len(matrix))[owners]
    return new


def sync_shared(models: ByClient, federation: Federation, trained: Sequence[str]) -> dict[str, Params]:
    """The models, in which every set is what the first of its owners that trained has of it, or as it was."""
    new = dict(models)
    for key, owners in _sets(models, federation):
        names = [federation.clients[k] for k in owners]
        source = next((name for name in names if name in trained), None)
        if source is not None:
            left = [name for name in names if name not in trained]
            new |= {name: {**new[name], key: models[source][key]} for name in left}
    return new


def average_initial(models: ByClient, federation: Federation) -> dict[str, Params]:
    """The models, in which every set begins as the mean of what its owners have of it, weighted by their examples.

    All have drawn the same A, so the mean of B is the mean of the updates.
    """
    new = dict(models)
    for key, owners in _sets(models, federation):
        names, examples = [federation.clients[k] for k in owners], np.asarray(federation.weights)[owners]
        mean = first = models[names[0]][key]
        if not all(models[name][key].equal(first) for name in names):
            parts = zip(names, (examples / examples.sum()).tolist(), strict=True)
            mean = torch.stack([share * models[name][key] for name, share in parts]).sum(0)
        new |= {name: {**new[name], key: mean} for name in names}
    return new


def _sets(models: ByClient, federation: Federation) -> list[tuple[str, list[int]]]:
    """(name, owners' places) of every tensor that several clients share."""
    if not any(cut is not None for cut in federation.cuts):
        return []
    keys = sorted({key for params in models.values() for key in params})
    layers = {key: shared_layer_of(federation, key) for key in keys}
    return [
        (key, owners) for key, layer in layers.items() if layer is not None for owners in owners_of(federation, layer)
    ]
