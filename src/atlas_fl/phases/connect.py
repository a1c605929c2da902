"""The graph of phase 4: who listens to whom, from the sketches' noise-corrected similarity."""

from collections.abc import Mapping

import numpy as np

from atlas_fl.assemble import Assembly
from atlas_fl.clients.base import Job
from atlas_fl.clients.evaluate import EvaluateOptions
from atlas_fl.engines.base import Engine, run_all
from atlas_fl.mixing.graph import Graph, GraphOptions, make_graph, similarity_distances
from atlas_fl.phases.identify import Identified
from atlas_fl.split.step import NO_CUTS, Cut


def connect(
    assembly: Assembly,
    engine: Engine,
    found: Identified,
    *,
    previous: np.ndarray | None = None,
    performance: np.ndarray | None = None,
    cuts: Mapping[str, Cut] = NO_CUTS,
) -> Graph:
    """The graph of these clients; without clusters one without edges.

    The `adaptive` graph needs a validation score of every client; where none is given, the warmed-up models are scored.
    """
    config = assembly.config.mixing
    # Without structure everyone stays alone: the nearest of strangers is still a stranger.
    sought = assembly.config.clustering.clusters == "auto"
    strangers = found.clustering is not None and sought and not found.clustering.structure["found"]
    if found.clustering is None:
        size = len(assembly.clients)
        return Graph(adjacency=np.zeros((size, size)), warnings=())
    if config.graph == "adaptive" and performance is None:
        performance = _scores(assembly, engine, found, cuts)
    return make_graph(
        similarity_distances(found.clustering.similarity),
        np.array(found.labels, dtype=np.int64),
        GraphOptions(
            graph=config.graph,
            alpha=config.alpha,
            symmetrize=config.symmetrize,
            neighbours=config.neighbours,
            singleton_neighbours=0 if strangers else config.singleton_neighbours,
            ema=config.graph_ema,
            block_diagonal=config.block_diagonal,
        ),
        clients=assembly.names,
        tasks=[client.task.name for client in assembly.clients],
        performance=performance,
        previous=previous,
    )


def _scores(assembly: Assembly, engine: Engine, found: Identified, cuts: Mapping[str, Cut]) -> np.ndarray:
    options = EvaluateOptions(split="validation")
    jobs = [
        Job(client=name, params=found.warmed[name], round=0, options=options, cut=cuts.get(name))
        for name in assembly.names
    ]
    return np.array([update.metrics["primary"] for update in run_all(engine, "evaluate", jobs)])
