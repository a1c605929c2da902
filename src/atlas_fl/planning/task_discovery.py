"""Phase 1: fingerprints of all clients, the clusters they form, and the graph of similar clients.

The graph of phase 4 says who is mixed with whom, by the noise-corrected similarity of the sketches.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from atlas_fl.aggregation.graph import Graph, GraphOptions, make_graph, similarity_distances
from atlas_fl.client.fingerprint import FIRST, SECOND
from atlas_fl.client.job import Job, Update
from atlas_fl.client.label_covariance import LABELS
from atlas_fl.client.options import EvaluateOptions, FingerprintOptions
from atlas_fl.clustering.cluster import cluster_clients, oracle_clustering
from atlas_fl.clustering.fingerprints import FINGERPRINTS
from atlas_fl.clustering.labels import ClusteringSettings
from atlas_fl.clustering.merge import merge_clusters
from atlas_fl.clustering.result import Clustering, agreement, purity_warnings, summarise_clusters
from atlas_fl.clustering.sketch import variance_notes
from atlas_fl.config import Config
from atlas_fl.config.values import invalid_value
from atlas_fl.params import Params, select
from atlas_fl.runtime.engine import Engine, run_on_all_clients
from atlas_fl.setup.assembly import Assembly, without_private
from atlas_fl.setup.options import fingerprint_options, settings_for, warmup_rank
from atlas_fl.split.channel import NO_CUTS, Cut
from atlas_fl.storage.jsonl import from_json, to_json
from atlas_fl.storage.tensors import encoded_size


@dataclass(frozen=True, kw_only=True)
class TaskDiscovery:
    """The result of phase 1: clusters, warmed-up models, sketches."""

    labels: tuple[int, ...]
    clustering: Clustering | None
    """None for a rule that needs no clusters."""
    report: Mapping[str, Any]
    """The clustering as plain data, with its agreement with the true tasks."""
    warmed_models: Mapping[str, Params]
    """Every client's model after the warm-up, at the warm-up's rank."""
    sketches: np.ndarray | None  # (2, n, dim) float32
    warmup: Mapping[str, Any]
    notes: tuple[str, ...]


def discover_tasks(
    assembly: Assembly,
    engine: Engine,
    *,
    clustered: bool,
    previous: Clustering | None = None,
    round: int = 0,
    cuts: Mapping[str, Cut] = NO_CUTS,
) -> TaskDiscovery:
    """Fingerprint every client, over its cut where it has one, and cluster the sketches.

    A rule without clusters takes the same warm-up where the fingerprint is one that trains, so that every strategy
    starts from the same models and training budget, but no sketch leaves a client; a fingerprint that only looks is
    not taken at all. `round` above 0 measures again, in another order and with twice the batches
    or steps.
    """
    start_time = time.perf_counter()
    options = fingerprint_options(assembly.config, round=round)
    if clustered or options.kind == "delta":
        updates = collect_fingerprints(assembly, engine, options, round=round, cuts=cuts)
        models = models_after_fingerprints(assembly, updates, cuts)
        warmup = _warm_up_report(updates, seconds=time.perf_counter() - start_time)
        warmup["taken"] = fingerprint_signature(assembly.config, options)
    else:
        models = warm_up_models(assembly, cuts)
        warmup = {}
    if not clustered:
        labels = (0,) * len(assembly.clients)
        return TaskDiscovery(
            labels=labels,
            clustering=None,
            report={"method": "none", "labels": list(labels)},
            warmed_models=models,
            sketches=None,
            warmup=warmup,
            notes=(),
        )
    tasks = [client.task.name for client in assembly.clients]
    sketches = np.stack([[update.params[name].numpy() for update in updates] for name in (FIRST, SECOND)])
    clustering = _cluster_sketches(assembly, sketches, tasks, previous)
    if options.labels:
        clustering = _merge_clusters(assembly, clustering, updates, previous)
    return TaskDiscovery(
        labels=clustering.labels,
        clustering=clustering,
        report=clustering_report(clustering, assembly.names, tasks, {u.client: u.metrics["loss"] for u in updates}),
        warmed_models=models,
        sketches=sketches,
        warmup=warmup,
        notes=(*variance_notes(sketches, tasks), *clustering.warnings, *purity_warnings(clustering.labels, tasks)),
    )


def fingerprint_signature(config: Config, options: FingerprintOptions) -> dict[str, Any]:
    """All that two sketches must have in common to be compared, as plain data for strict JSON."""
    model = config.model
    shared = {"model": model.model, "targets": model.targets, "precision": model.precision, "alpha": model.lora_alpha}
    shared |= {"rslora": model.rslora, "rank": warmup_rank(config), "max_length": config.data.max_length}
    shared |= {"adapted_blocks": model.adapted_blocks, "image_size": config.images.image_size}
    signature: dict[str, Any] = from_json(to_json({**shared, **asdict(options)}))
    return signature


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
    jobs = [
        Job(client=name, params=params, round=round, options=options, cut=cuts.get(name))
        for name, params in warm_up_models(assembly, cuts).items()
    ]
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
    assembly: Assembly, updates: Sequence[Update], cuts: Mapping[str, Cut] = NO_CUTS
) -> dict[str, Params]:
    """The clients' models after their fingerprints; whole models are unchanged and were not sent back."""
    if assembly.is_full:
        return warm_up_models(assembly, cuts)
    return {u.client: {k: t for k, t in u.params.items() if k not in (FIRST, SECOND, LABELS)} for u in updates}


def _cluster_sketches(
    assembly: Assembly, sketches: np.ndarray, tasks: Sequence[str], previous: Clustering | None
) -> Clustering:
    options = assembly.config.clustering
    settings = ClusteringSettings(
        **settings_for(assembly.config, ClusteringSettings),
        threshold=options.similarity_threshold,
        centre=options.fingerprint in FINGERPRINTS and FINGERPRINTS[options.fingerprint].centre,
    )
    if options.clusters == "oracle":
        return oracle_clustering(sketches[0], sketches[1], tasks=tasks, settings=settings)
    return cluster_clients(sketches[0], sketches[1], settings=settings, previous=previous, names=assembly.names)


def _merge_clusters(
    assembly: Assembly, clustering: Clustering, updates: Sequence[Update], previous: Clustering | None
) -> Clustering:
    """Join clusters whose labels ask the same; cut clients, who sketch none, follow the others of their cluster."""
    threshold = assembly.config.clustering.merge_similarity
    assert threshold is not None, "labels are sketched for a threshold"
    none = np.zeros(len(updates[0].params[FIRST]), dtype=np.float32)
    return merge_clusters(
        clustering,
        np.stack([update.params[LABELS].numpy() if LABELS in update.params else none for update in updates]),
        threshold=threshold,
        names=assembly.names,
        previous=None if previous is None else previous.labels,
    )


def clustering_report(
    clustering: Clustering, names: Sequence[str], tasks: Sequence[str], losses: Mapping[str, float]
) -> dict[str, Any]:
    """The clustering as plain data, with its agreement with the true tasks and a summary of each cluster."""
    return {
        **clustering.to_json(),
        "agreement": agreement(clustering.labels, tasks),
        "clusters": summarise_clusters(clustering, clients=names, tasks=tasks, losses=losses),
    }


def _warm_up_report(updates: Sequence[Update], *, seconds: float) -> dict[str, Any]:
    sketches = [select(update.params, update.params.keys() & {FIRST, SECOND, LABELS}) for update in updates]
    return {
        "steps": {update.client: int(update.metrics["steps"]) for update in updates},
        "agreement": {update.client: update.metrics["agreement"] for update in updates},
        "fingerprint_bytes": max(map(encoded_size, sketches)),
        "seconds": seconds,
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
        return Graph(adjacency=np.zeros((size, size)), warnings=())
    options = settings_for(assembly.config, GraphOptions) | {"ema": mixing.graph_ema}
    # Without structure everyone stays alone: the nearest of strangers is still a stranger.
    if assembly.config.clustering.clusters == "auto" and not discovery.clustering.structure["found"]:
        options["singleton_neighbours"] = 0
    if mixing.graph == "adaptive" and performance is None:
        performance = _validation_scores(assembly, engine, discovery, cuts)
    return make_graph(
        similarity_distances(discovery.clustering.similarity),
        np.array(discovery.labels, dtype=np.int64),
        GraphOptions(**options),
        clients=assembly.names,
        tasks=[client.task.name for client in assembly.clients],
        performance=performance,
        previous=previous,
    )


def _validation_scores(
    assembly: Assembly, engine: Engine, discovery: TaskDiscovery, cuts: Mapping[str, Cut]
) -> np.ndarray:
    options = EvaluateOptions(split="validation")
    jobs = [
        Job(client=name, params=discovery.warmed_models[name], round=0, options=options, cut=cuts.get(name))
        for name in assembly.names
    ]
    return np.array([update.metrics["primary"] for update in run_on_all_clients(engine, "evaluate", jobs)])
