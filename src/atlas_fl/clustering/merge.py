"""Merging of the clusters of one task that come from several sources, by what their labels ask.

Fingerprints of gradients separate sources of text. Labels say more: the sketches of `client.label_covariance` of two
clusters that ask the same point in one direction, however different their texts are. So the two clusters whose mean
sketches are nearest are joined, again and again, as long as their cosine reaches the threshold.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from atlas_fl.clustering.labels import decided_labels, number_by_first_client, stable_labels
from atlas_fl.clustering.result import Clustering


def merge_clusters(
    clustering: Clustering,
    label_sketches: np.ndarray,
    *,
    threshold: float,
    names: Sequence[str],
    previous: Sequence[int] | None = None,
) -> Clustering:
    """The clustering with clusters joined whose mean label sketches have a cosine of `threshold` or more.

    `label_sketches` (n, dim) are of its clients, called `names`, a row of zeros of one that has none; a cluster of such
    clients alone is joined with no other. Where clients showed no structure nothing is joined, and neither where k was
    given. With the `previous` labels of the same clients labels keep their meaning.
    """
    if clustering.settings.clusters != "auto" or not clustering.structure["found"]:
        return clustering
    labels = np.array(clustering.labels)
    notes: list[str] = []
    while (pair := _nearest(labels, label_sketches)) is not None and pair[2] >= threshold:
        first, second, cosine = pair
        one, other = (names[int(np.flatnonzero(labels == label)[0])] for label in (first, second))
        notes.append(
            f"the clusters of {one} and {other} are one: their labels vary alike with the features of their texts"
            f" (cosine {cosine:.2f}, --merge-similarity {threshold:g})"
        )
        labels[labels == second] = first
    if not notes:
        return clustering
    merged = number_by_first_client(labels)
    if previous is not None:
        merged = stable_labels(previous, merged)
    return replace(
        clustering,
        labels=tuple(merged),
        before_merging=clustering.labels,
        warnings=(*clustering.warnings, *notes),
    )


def _nearest(labels: np.ndarray, label_sketches: np.ndarray) -> tuple[int, int, float] | None:
    """The two clusters with the largest cosine of their mean sketches, and the cosine; None of fewer than two."""
    means = {label: label_sketches[labels == label].mean(axis=0) for label in decided_labels(labels.tolist())}
    unit = {label: mean / np.linalg.norm(mean) for label, mean in means.items() if mean.any()}
    pairs = [(left, right) for left in unit for right in unit if left < right]
    if not pairs:
        return None
    first, second = max(pairs, key=lambda pair: float(unit[pair[0]] @ unit[pair[1]]))
    return first, second, float(unit[first] @ unit[second])
