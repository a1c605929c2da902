"""Phase 1: fingerprints of all clients, the clusters they form, and the graph of similar clients.

The graph of phase 4 says who is mixed with whom, by the noise-corrected similarity of the sketches.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array

from atlas_fl.aggregation.graph import Graph, GraphOptions, make_graph, similarity_distances
from atlas_fl.client.fingerprint import FIRST, SECOND
from atlas_fl.client.job import Update, make_jobs
from atlas_fl.client.options import EvaluateOptions, FingerprintOptions
from atlas_fl.clustering import blocks, cluster, fingerprints, result
from atlas_fl.clustering.labels import ClusteringSettings
from atlas_fl.config.values import invalid_value
from atlas_fl.errors import CheckpointError
from atlas_fl.frozen import Frozen
from atlas_fl.params import ByClient, Params
from atlas_fl.planning.plan import PlanResult
from atlas_fl.ranks.allocation import cluster_importance
from atlas_fl.runtime.engine import Engine, run_on_all_clients
from atlas_fl.setup.assembly import Assembly, without_private
from atlas_fl.setup.options import fingerprint_options, is_reclustered, settings_for, warmup_rank
from atlas_fl.split.channel import NO_CUTS, Cut


class TaskDiscovery(Frozen):
    """The result of phase 1: clusters, warmed-up models, sketches."""

    labels: tuple[int, ...]
    clustering: result.Clustering | None
    """None for a rule that needs no clusters."""
    report: Mapping[str, Any]
    """The clustering as plain data, with its agreement with the true tasks."""
    warmed_models: Mapping[str, Params]
    """Every client's model after the warm-up, at the warm-up's rank."""
    sketches: np.ndarray | None  # (2, n, dim) float32
    notes: tuple[str, ...] = ()

    def inside_clusters(self, importance: np.ndarray) -> np.ndarray:
        """Importance of layers, (n, layers) float64, in which clients of one cluster have their mean.

        A rule without clusters keeps every client's own: nothing may be shared that it does not share.
        """
        return importance if self.clustering is None else cluster_importance(importance, self.labels)


def discover_tasks(
    assembly: Assembly,
    engine: Engine,
    *,
    clustered: bool,
    previous: result.Clustering | None = None,
    round: int = 0,
    cuts: Mapping[str, Cut] = NO_CUTS,
) -> TaskDiscovery:
    """Fingerprint every client, over its cut where it has one, and cluster the sketches.

    A rule without clusters takes the same warm-up where the fingerprint is one that trains, so that every strategy
    starts from the same models and training budget, but no sketch leaves a client; a fingerprint that only looks is
    not taken at all. `round` above 0 measures again, in another order and with twice the batches
    or steps.
    """
    options = fingerprint_options(assembly.config, round=round)
    if clustered or options.kind == "delta":
        updates = collect_fingerprints(assembly, engine, options, round=round, cuts=cuts)
        models = models_after_fingerprints(assembly, updates, cuts)
    else:
        models = warm_up_models(assembly, cuts)
    if not clustered:
        return _without_clusters(models, clients=len(assembly.clients))
    tasks = [client.task.name for client in assembly.clients]
    sketches = np.stack([[update.params[name].numpy() for update in updates] for name in (FIRST, SECOND)])
    phase = assembly.config.clustering
    settings = ClusteringSettings(
        **settings_for(assembly.config, ClusteringSettings),
        threshold=phase.similarity_threshold,
        centre=fingerprints.is_centred(phase.fingerprint),
    )
    if phase.clusters == "oracle":
        clustering = cluster.oracle_clustering(sketches[0], sketches[1], tasks=tasks, settings=settings)
    else:
        clustering = cluster.cluster_clients(
            sketches[0], sketches[1], settings=settings, previous=previous, names=assembly.names
        )
    losses = {update.client: update.metrics["loss"] for update in updates}
    report = _clustering_report(clustering, assembly.names, tasks, losses)
    return TaskDiscovery(
        labels=clustering.labels,
        clustering=clustering,
        report=report,
        warmed_models=models,
        sketches=sketches,
        notes=(*clustering.warnings, *result.purity_warnings(report["clusters"])),
    )


def _without_clusters(models: ByClient, *, clients: int) -> TaskDiscovery:
    labels = (0,) * clients
    report = {"method": "none", "labels": list(labels)}
    return TaskDiscovery(labels=labels, clustering=None, report=report, warmed_models=models, sketches=None)


def discover_newcomer(
    assembly: Assembly, planned: PlanResult, engine: Engine, *, number: int, cuts: Mapping[str, Cut]
) -> TaskDiscovery:
    """Fingerprints and clusters of all before this round, the newcomer last, and its warmed-up model.

    Its fingerprint has the options of the newest clustering. The labels of the others do not change.
    """
    config = assembly.config
    newcomer = assembly.only_last()
    if planned.clustering is None:
        discovery = discover_tasks(newcomer, engine, clustered=False, cuts=cuts)
        return _without_clusters(discovery.warmed_models, clients=len(assembly.clients))
    if planned.sketches is None:
        raise CheckpointError("the sketches of this run are not beside its plan; restore them, or begin another run")
    clustering_round = max((n for n in range(1, number) if is_reclustered(config, n)), default=0)
    (update,) = collect_fingerprints(
        newcomer, engine, fingerprint_options(config, round=clustering_round), round=clustering_round, cuts=cuts
    )
    first, second = (update.params[half].numpy() for half in (FIRST, SECOND))
    tasks = [client.task.name for client in assembly.clients]
    if config.clustering.clusters == "oracle":
        labels = planned.clustering.labels
        label = dict(zip(tasks, labels)).get(tasks[-1], max(labels) + 1)
    else:
        label = result.assign_client(planned.clustering, first, second).cluster
    sketches = np.concatenate([planned.sketches, np.stack([first, second])[:, None]], axis=1)
    clustering = result.append_client(planned.clustering, sketches, label=label)
    groups = planned.plan.clustering["clusters"]
    losses = {member: group["difficulty"] for group in groups for member in group["clients"]}
    return TaskDiscovery(
        labels=clustering.labels,
        clustering=clustering,
        report=_clustering_report(clustering, assembly.names, tasks, {**losses, update.client: update.metrics["loss"]}),
        warmed_models=models_after_fingerprints(newcomer, [update], cuts),
        sketches=sketches,
    )


def collect_fingerprints(
    assembly: Assembly,
    engine: Engine,
    options: FingerprintOptions,
    *,
    round: int = 0,
    cuts: Mapping[str, Cut] = NO_CUTS,
) -> list[Update]:
    """Collect every client's sketches and warmed-up model, at the warm-up's rank.

    Raises `ConfigError` where gradients of more blocks are asked for than the model has, or a warm-up of adapters of
    clients that have none.
    """
    if options.kind == "delta" and assembly.is_full:
        raise invalid_value(
            "--fingerprint", options.kind, "fisher or gradient for whole models: a warm-up needs adapters"
        )
    if options.kind != "delta" and options.blocks > assembly.shape.num_layers:
        raise invalid_value(
            "--fingerprint-blocks", options.blocks, f"1 to {assembly.shape.num_layers}, the model's blocks"
        )
    jobs = make_jobs(warm_up_models(assembly, cuts), options, round=round, cuts=cuts)
    return run_on_all_clients(engine, "fingerprint", jobs)


def warm_up_models(assembly: Assembly, cuts: Mapping[str, Cut] = NO_CUTS) -> dict[str, Params]:
    """The initial models of the warm-up: whole models, or adapters at the warm-up's rank; heads are fresh."""
    if assembly.is_full:
        return assembly.full_models()
    ranks = (warmup_rank(assembly.config),) * assembly.shape.num_layers
    return {
        client.name: without_private(assembly, assembly.initial_params(client, ranks), cuts.get(client.name))
        for client in assembly.clients
    }


def models_after_fingerprints(
    assembly: Assembly, updates: Sequence[Update], cuts: Mapping[str, Cut]
) -> dict[str, Params]:
    """The clients' models after their fingerprints; whole models are unchanged and were not sent back.

    A tensor that has not moved is the initial one itself, wherever its client is: equal models are stored once.
    """
    before = warm_up_models(assembly, cuts)
    return before if assembly.is_full else {one.client: _model_after(before[one.client], one.params) for one in updates}


def _model_after(before: Params, after: Params) -> Params:
    """The model after a fingerprint, of the tensors before where they are equal; that before where all are."""
    model = {key: tensor for key, tensor in after.items() if key not in (FIRST, SECOND)}
    same = {key for key, tensor in model.items() if key in before and torch.equal(tensor, before[key])}
    if same == before.keys() == model.keys():
        return before
    return {key: before[key] if key in same else tensor for key, tensor in model.items()}


def _clustering_report(
    clustering: result.Clustering, names: Sequence[str], tasks: Sequence[str], losses: Mapping[str, float]
) -> dict[str, Any]:
    """The clustering as plain data, with its agreement with the true tasks and a summary of each cluster."""
    return {
        **clustering.to_json(),
        "agreement": result.agreement(clustering.labels, tasks),
        "clusters": result.summarise_clusters(clustering, clients=names, tasks=tasks, losses=losses),
    }


def make_client_graph(
    assembly: Assembly,
    engine: Engine,
    discovery: TaskDiscovery,
    *,
    previous: np.ndarray | None = None,
    performance: np.ndarray | None = None,
    cuts: Mapping[str, Cut] = NO_CUTS,
) -> Graph:
    """The graph of these clients; without clusters one without edges.

    The `adaptive` graph needs a validation score of every client; where none is given, the warmed-up models are scored.
    """
    mixing = assembly.config.mixing
    if discovery.clustering is None:
        size = len(assembly.clients)
        empty = np.zeros((size, size)) if size <= blocks.MOST_EXACT else csr_array((size, size))
        return Graph(adjacency=empty, warnings=())
    options = settings_for(assembly.config, GraphOptions) | {"ema": mixing.graph_ema}
    # Without structure everyone stays alone: the nearest of strangers is still a stranger.
    if assembly.config.clustering.clusters == "auto" and not discovery.clustering.structure["found"]:
        options["singleton_neighbours"] = 0
    if mixing.graph == "adaptive" and performance is None:
        performance = validation_scores(assembly, engine, discovery.warmed_models, cuts)
    similarity, labels = discovery.clustering.similarity, np.array(discovery.labels, dtype=np.int64)
    if options["alpha"] is None and not isinstance(similarity, np.ndarray):
        options["alpha"] = 0.5  # one over the squared distance of clients that have nothing in common
    warnings: list[str] = []

    def edges(similarity: np.ndarray, places: np.ndarray) -> np.ndarray:
        graph = make_graph(
            similarity_distances(similarity),
            labels[places],
            GraphOptions(**options),
            clients=[assembly.names[k] for k in places],
            tasks=[assembly.clients[k].task.name for k in places],
            performance=None if performance is None else performance[places],
            previous=None if previous is None else blocks.dense(previous, places),
        )
        warnings.extend(graph.warnings)
        dense: np.ndarray = graph.adjacency
        return dense

    return Graph(adjacency=blocks.by_blocks(similarity, edges), warnings=tuple(warnings))


def validation_scores(assembly: Assembly, engine: Engine, models: ByClient, cuts: Mapping[str, Cut]) -> np.ndarray:
    """Each client's validation score of its model, (n,)."""
    jobs = make_jobs(models, EvaluateOptions(split="validation"), round=0, cuts=cuts, clients=assembly.names)
    return np.array([update.metrics["primary"] for update in run_on_all_clients(engine, "evaluate", jobs)])
