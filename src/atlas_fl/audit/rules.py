"""The second formula of every strategy, by name; this table alone knows methods by their names."""

from collections.abc import Mapping
from functools import partial

from atlas_fl.audit import averages, class_features, kriging, run_files, server_steps, step, update_clusters
from atlas_fl.audit.averages import CLUSTER_MEAN, MEAN, Laplacian, Mean, MeanByDistance, MeanWithShares, Own, Recorded
from atlas_fl.clustering.blocks import MOST_PREDICTED
from atlas_fl.errors import CheckpointError

MULTI_TASK = kriging.FromHalves(within="all", predict=kriging.by_multi_task_averaging)

RULES: Mapping[str, step.Formula] = {
    **dict.fromkeys(("local", "local_only", "centralized", "linear_probe", "local_prior"), Own()),
    **dict.fromkeys(("fedavg", "standard_fl", "fedit", "flexlora", "ffa", "rolora", "fedsa", "fedper"), MEAN),
    **dict.fromkeys(("mr_mtl", "fedrep", "fedbabu", "fedavg_ft", "fedavg_prior", "fedprox", "hsplitlora"), MEAN),
    **dict.fromkeys(("scaffold", "ditto", "apfl", "feddpa"), MEAN),
    **dict.fromkeys(("fedavg_cluster", "fedavg_cluster_ft", "fedavg_cluster_prior", "fedlease"), CLUSTER_MEAN),
    **dict.fromkeys(("fedavg_oracle", "fedrouter", "atlas_no_laplacian", "mr_mtl_cluster"), CLUSTER_MEAN),
    **dict.fromkeys(("atlas_laplacian", "atlas_pad", "atlas_truncate"), Laplacian()),
    **dict.fromkeys(("fedavg_by_norm", "hetlora"), Mean(shares=averages.by_norm)),
    **dict.fromkeys(("fedavg_by_rank", "raflora"), server_steps.RankPartitions()),
    **dict.fromkeys(("fedavg_by_distance", "fedamp"), MeanByDistance()),
    **dict.fromkeys(("fedavg_of_others", "fedalt", "fedalt_fixed"), MeanWithShares()),
    **dict.fromkeys(("fedavg_with_variances", "shrinkage"), averages.MeanWithVariances()),
    **dict.fromkeys(("fedavg_dynamic", "feddyn"), server_steps.Dynamic()),
    **dict.fromkeys(("fedavg_orthonormal", "fedsvd"), server_steps.Orthonormal()),
    **dict.fromkeys(("fedavg_rotated", "fedrot"), server_steps.Rotated()),
    **dict.fromkeys(("fedavg_with_rest", "fedmomentum"), server_steps.ExactAverage(kind="rest")),
    **dict.fromkeys(("fedavg_stacked", "flora"), server_steps.ExactAverage(kind="stacked")),
    **dict.fromkeys(("fedavg_with_residual", "fedex"), server_steps.ExactAverage(kind="residual")),
    **dict.fromkeys(("classifier_collaboration", "fedpac"), class_features.HeadsByFeatures()),
    **dict.fromkeys(("fedavg_by_rank_one", "fedplora"), server_steps.ByRankOne()),
    **dict.fromkeys(("fedavg_of_cores", "fedsb", "fedavg_of_heads", "ravan"), server_steps.Cores()),
    **dict.fromkeys(("fedavg_by_qr", "ilora"), server_steps.Directions()),
    "median": server_steps.Middle(reduction=averages.median),
    "trimmed_mean": server_steps.Middle(reduction=averages.trimmed_mean),
    "krum": Mean(within="settings", shares=averages.by_krum),
    "multi_krum": Mean(within="settings", shares=partial(averages.by_krum, several=True)),
    "geometric_median": Mean(within="settings", shares=averages.by_geometric_median),
    "fedavgm": server_steps.ServerOptimizer(kind="fedavgm", lr=1.0, beta1=0.9),
    "fedadagrad": server_steps.ServerOptimizer(kind="fedadagrad", lr=0.01, beta1=0.0),
    "fedyogi": server_steps.ServerOptimizer(kind="fedyogi", lr=0.01, beta1=0.9),
    "fedadam": server_steps.ServerOptimizer(kind="fedadam", lr=0.01, beta1=0.9),
    **dict.fromkeys(("fedavg_by_arrival", "fedbuff"), server_steps.Buffer()),
    "ties": server_steps.Merge(merge=server_steps.by_sign),
    "dare": server_steps.Merge(merge=server_steps.by_chance),
    "pfedgraph": kriging.ByDirections(),
    "cfl": update_clusters.Bipartition(),
    "ifca": update_clusters.Choice(),
    "fedtreelora": update_clusters.Tree(),
    "kriging": kriging.FromHalves(),
    "atlas": kriging.FromHalves(within="clusters"),
    **dict.fromkeys(("mta", "mta_minimax", "empirical_bayes"), MULTI_TASK),
    "james_stein": kriging.FromHalves(within="all", predict=kriging.by_james_stein),
    "stb": kriging.FromHalves(within="all", predict=kriging.by_similarity_tests),
    **dict.fromkeys(("fedavg_in_tree_and_outside", "fedtreelora_outside"), update_clusters.TreeWithOutside()),
    **dict.fromkeys(("fedavg_cluster_routed", "fedlease_router"), update_clusters.Routed()),
    **dict.fromkeys(("fedavg_in_levels", "hilora"), update_clusters.Levels()),
}


def predicts_in_blocks(run: run_files.Run) -> bool:
    """Return whether predictions are those of blocks of clients, and the formula is of all together."""
    return run.mixing.strategy in ("kriging", "atlas") and len(run.plan("plan.json").clients) > MOST_PREDICTED


def formula_of(run: run_files.Run, round: int | None = None) -> step.Formula:
    """The formula of the run's strategy; with a round that of the round, in which everyone may keep its own model.

    Raises CheckpointError for a strategy that no audit is written for.
    """
    if round is not None and not run.is_aggregated(round):
        return Own()
    strategy = run.mixing.strategy
    if (strategy not in RULES and run.settings.run.plugin) or predicts_in_blocks(run):
        return Recorded()
    if strategy not in RULES:
        raise CheckpointError(f"no audit is written for strategy {strategy!r}; there is one for {', '.join(RULES)}")
    return RULES[strategy]
