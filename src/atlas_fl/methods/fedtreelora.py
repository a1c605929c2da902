"""FedTreeLoRA: one tree of clients, cut finer the higher the layer, and averages inside the clusters of each cut.

    D_kl = (1 / L) sum over layers j of D^j_kl,   D^j_kl = 1 - cos(Delta^j_k, Delta^j_l)       j = 1 ... L
    tree: average linkage of D
    c_j = argmax over c_{j-1} <= c <= min(n - 1, c_{j-1} + step) of silhouette(cut of c clusters, D^j),   c_0 = 1

"FedTreeLoRA", arXiv:2603.13282, in its variant of clusters alone: its adapter of everybody outside the cluster, with a
learned weight, would be a second one. One cluster has a silhouette of `--tree-threshold`. Delta is the first update of
the run, that of s B A in product space and of the shared factors otherwise; the paper takes B. The tree is made in the
first round in which everyone took part, before it there is one average, and it stays. Heads follow the highest layer.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.spatial.distance import squareform

from atlas_fl.aggregation import rules
from atlas_fl.aggregation.distances import cosines, gram_of_changes
from atlas_fl.aggregation.matrices import Federation, Groups, Rows, Square
from atlas_fl.methods.cfl import average_inside, clusters_by_client, clusters_in
from atlas_fl.methods.knobs import Tried
from atlas_fl.methods.method import Method, StepInputs
from atlas_fl.params import HEAD, ByClient, ServerState, shared_params, subtree
from atlas_fl.ranges import Range

CUTS = "cuts"
"""The entry of the server state: by layer the cluster of every client, by name; absent before the tree is made."""


def nested_cuts(distances: Sequence[Square], *, step: int, threshold: float) -> list[Groups]:
    """The clusters of every layer, from the lowest to the highest, each a refinement of those below.

    `distances` are D^j in this order; `step` is by how many clusters a layer may have more than the one below it.
    """
    from sklearn.metrics import silhouette_score

    n, clusters = len(distances[0]) if distances else 0, 1
    if n < 3:
        return [np.zeros(n, np.int64) for _ in distances]
    tree = linkage(squareform(np.mean(distances, axis=0), checks=False), method="average")
    cuts = []
    for own in distances:
        scores = {}
        for count in range(clusters, min(n - 1, clusters + step) + 1):
            labels = cut_tree(tree, n_clusters=count)[:, 0]
            scores[count] = threshold if count == 1 else float(silhouette_score(own, labels, metric="precomputed"))
        clusters = max(scores, key=lambda count: scores[count])
        cuts.append(np.asarray(cut_tree(tree, n_clusters=clusters)[:, 0], np.int64))
    return cuts


def layer_distances(
    before: ByClient, after: ByClient, federation: Federation, options: rules.StrategyOptions
) -> dict[int, Square]:
    """D^j by layer, lowest first, of the shared parameters that the models have there."""
    tasks = dict(zip(federation.clients, federation.head_groups, strict=True))
    keys = {key for params in after.values() for key in shared_params(params, options.share)}
    layers = sorted({rules.layer_of(federation, key) for key in keys if not key.startswith(HEAD)})

    def distances(layer: int) -> Square:
        own = {key for key in keys if not key.startswith(HEAD) and rules.layer_of(federation, key) == layer}
        return 1.0 - cosines(gram_of_changes(before, after, tasks, options, selects=own.__contains__))

    return {layer: distances(layer) for layer in layers}


class FedTreeLora(Method):
    """Averages inside nested clusters, finer in higher layers (`--tree-step`, `--tree-threshold`)."""

    tree_step: Annotated[int, Range(least=1)] = 1
    """Most clusters that a layer of `fedtreelora` may have more than the layer below it."""
    tree_threshold: Annotated[float, Range(least=0, below=1), Tried("fedtreelora", values=(0.1, 0.0, 0.2, 0.3))] = 0.1
    """The silhouette above which `fedtreelora` cuts the clients of a layer at all."""

    name = "fedtreelora"
    differs = "the adapter of everybody outside a cluster is left out"
    takes_newcomers = False
    granularity = "layer"

    def rule(self, step: rules.MixingContext) -> np.ndarray | Rows:
        """The shares of the examples inside the clusters of the layer; of heads, inside those of the highest."""
        cuts = subtree(step.server_state, CUTS)
        if not cuts:
            return rules.weighted_average(self.options, step)
        layer = max(map(int, cuts)) if step.parameters.layer is None else step.parameters.layer
        return average_inside(clusters_in(subtree(cuts, str(layer)), step.federation), step, self.options)

    def next_state(self, inputs: StepInputs) -> ServerState:
        """The tree, made in the first round in which everyone took part."""
        server_state, federation = inputs.server_state, inputs.federation
        if CUTS not in server_state and all(inputs.present):
            distances = layer_distances(inputs.client_models, inputs.after, federation, self.options)
            cuts = nested_cuts(list(distances.values()), step=self.tree_step, threshold=self.tree_threshold)
            by_layer = {
                str(layer): clusters_by_client(federation, cut) for layer, cut in zip(distances, cuts, strict=True)
            }
            server_state = {CUTS: by_layer} if by_layer else {}
        return server_state
