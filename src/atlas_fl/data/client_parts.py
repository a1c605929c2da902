"""Parts of a client: clusters of its texts, each a participant with an adapter of its own (`--client-parts`).

    c_1 .. c_P    k-means of the embeddings of the client's training texts (`client.embeddings`)
    part(x) = argmin_p || e(x) - c_p ||        of every text x: it trains, or is scored by, the adapter of that part

Talasso, de Souza, Villas and others, "Task-Centric Personalized Federated Fine-Tuning of Language Models" (FedRouter),
2026, arXiv:2604.00050, by their paper's abstract and their program (GabrielTalasso/FedRouter). There a held-out text
goes to the nearest centre of the clusters of all clients, or of those that its client has a part in; here to the
nearest of its client's own centres, so that its client alone decides. There every part takes as many steps; here a part
makes passes over its texts. A client with too few texts for a part stays whole.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from atlas_fl.data.clients import LEAST, PART, ClientData
from atlas_fl.params import Split
from atlas_fl.rng import derive_seed


def cut_client(
    client: ClientData, embeddings: Mapping[Split, np.ndarray], *, count: int, seed: int
) -> list[ClientData]:
    """The parts of a client with these embeddings of its texts by split, (examples, hidden).

    The client itself where one of `count` parts would have too few rows of a split, with a note that says so.
    """
    from sklearn.cluster import KMeans  # a second that other runs need not pay

    trained = embeddings["train"]
    means = KMeans(min(count, len(trained)), n_init=10, random_state=derive_seed(seed, "parts", client.name) % 2**32)
    means.fit(trained)
    groups = {split: means.predict(values) for split, values in embeddings.items()}
    fewest = {split: np.bincount(group, minlength=count).min() for split, group in groups.items()}
    if short := [split for split, rows in fewest.items() if rows < LEAST[split]]:
        note = f"{client.name} stays whole: one of {count} parts would have {fewest[short[0]]} {short[0]} examples"
        return [replace(client, notes=(*client.notes, note))]
    parts = []
    for number in range(count):
        rows = {split: np.flatnonzero(group == number) for split, group in groups.items()}
        part = client.with_splits(lambda split, rows=rows: client.splits[split].take(rows[split]))  # type: ignore[misc]
        given = None if client.given is None else client.given[rows["train"]]
        part = replace(part, given=given, own_rows=None, left_out=0 if number else client.left_out)
        parts.append(replace(part, name=f"{client.name}{PART}{number + 1}"))
    return parts
