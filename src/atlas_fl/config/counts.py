"""How many clusters there can be of so many clients."""

from atlas_fl.config.groups import ClusteringConfig
from atlas_fl.config.kinds import mistake, whole_number


def check_counts(clustering: ClusteringConfig, *, clients: int | None) -> None:
    """Nothing where so many clients, or a number that is not known yet, can be in clusters as these settings say.

    Raises:
        ConfigError: they cannot.
    """
    wanted, number = clustering.clusters, whole_number(clustering.clusters) or 0
    if wanted not in ("auto", "oracle") and not 1 <= number <= (number if clients is None else clients):
        most = "1" if clients is None else f"1 to {clients}, the number of clients"
        raise mistake("--clusters", wanted, f"auto, oracle, or a number from {most}")
    if clients is not None and clustering.min_cluster_size > clients:
        raise mistake("--min-cluster-size", clustering.min_cluster_size, f"at most {clients}, the number of clients")
