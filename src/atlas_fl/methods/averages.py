"""FedAvg over all clients or inside clusters, local training, and the published methods that are settings of these.

FedAvg: McMahan et al. 2017, arXiv:1602.05629. The settings of a row say what is shared (`share`), where it is mixed
(`space`, `align`) and what a client trains (`trained_parts`, `personal_rounds`, `proximal_mu`).
"""

import numpy as np

from atlas_fl.aggregation.rules import MixingContext, clustered_average, weighted_average
from atlas_fl.methods.method import FACTORS, Method, PublishedMethod


class Local(Method):
    """Everyone keeps what it trained; nothing is sent."""

    name = "local"
    matrix = "identity"
    relative_bytes = "0"
    communicates = False

    def rule(self, step: MixingContext) -> np.ndarray:
        """The identity."""
        return np.eye(len(step.present))


class FedAvg(Method):
    """One average over all clients, weighted by examples; heads only inside their task."""

    name = "fedavg"
    matrix = "shares of the examples"
    is_average = True

    def rule(self, step: MixingContext) -> np.ndarray:
        """The shares of the examples in each row."""
        return weighted_average(self.options, step)


class FedAvgCluster(Method):
    """The weighted average inside each cluster; who is undecided stays alone.

    With one rank everywhere and `space="factors"` this is the baseline of the papers.
    """

    name = "fedavg_cluster"
    matrix = "shares of the examples inside clusters"
    clustered = True

    def rule(self, step: MixingContext) -> np.ndarray:
        """The shares of the examples inside clusters."""
        return clustered_average(self.options, step)


FEDIT = PublishedMethod(
    summary="FedIT: A and B averaged apart (Zhang et al. 2024, arXiv:2305.05644).",
    rule="fedavg",
    settings=FACTORS,
    equal_ranks=True,
)
FLEXLORA = PublishedMethod(
    summary="FlexLoRA: the products B A averaged, each client's ranks by SVD (Bai et al. 2024, arXiv:2402.11505).",
    rule="fedavg",
    settings={"space": "product", "share": ("A", "B", "head")},
)
FFA = PublishedMethod(
    summary="FFA-LoRA: A frozen as drawn, B trained and averaged (Sun et al. 2024, arXiv:2403.12313).",
    rule="fedavg",
    settings={"space": "factors", "share": ("B", "head"), "trained_parts": "B"},
    equal_ranks=True,
)
ROLORA = PublishedMethod(
    summary="RoLoRA: B in odd rounds, A in even ones (Chen et al. 2025, arXiv:2502.01755).",
    rule="fedavg",
    settings={"space": "factors", "share": ("A", "B", "head"), "trained_parts": "alternate"},
    equal_ranks=True,
)
FEDSA = PublishedMethod(
    summary="FedSA-LoRA: A averaged; B and head stay (Guo et al. 2025, arXiv:2410.01463).",
    rule="fedavg",
    settings={"space": "factors", "share": ("A",)},
    equal_ranks=True,
)
FEDPER = PublishedMethod(
    summary="FedPer: all but the head averaged (Arivazhagan et al. 2019, arXiv:1912.00818).",
    rule="fedavg",
    settings={"share": ("A", "B")},
)
FEDREP = PublishedMethod(
    summary="FedRep: FedPer whose clients train the head, then the rest (Collins et al. 2021, arXiv:2102.07078).",
    rule="fedavg",
    settings={"share": ("A", "B"), "trained_parts": "head_then_rest"},
)
FEDBABU = PublishedMethod(
    summary="FedBABU: the head as drawn until the last rounds, which fine-tune (Oh et al. 2022, arXiv:2106.06042).",
    rule="fedavg",
    settings={"share": ("A", "B"), "trained_parts": "without_head"},
    suggested={"personal_rounds": 2},
)
FEDAVG_FT = PublishedMethod(
    summary="FedAvg, then rounds of local fine-tuning (Wang et al. 2019, arXiv:1910.10252).",
    rule="fedavg",
    suggested={"personal_rounds": 2},
)
FEDAVG_CLUSTER_FT = PublishedMethod(
    summary="Clustered FedAvg, then rounds of local fine-tuning.",
    rule="fedavg_cluster",
    suggested={"personal_rounds": 2},
)
FEDLEASE = PublishedMethod(
    summary="FedLEASE's clusters: cosines of B after a warm-up, k by silhouette (arXiv:2509.15087); no router.",
    rule="fedavg_cluster",
    settings={"fingerprint": "delta", "cluster_by": "silhouette"},
)
FEDAVG_ORACLE = PublishedMethod(
    summary="FedAvg inside the true tasks, which nobody knows in practice: a reference.",
    rule="fedavg_cluster",
    settings={"clusters": "oracle"},
)
CENTRALIZED = PublishedMethod(
    summary="One model a task, trained on the examples of all its clients in one place: a reference.",
    rule="local",
    settings={"centralized": True},
)
MULTITASK = PublishedMethod(
    summary="One adapter for all tasks and a head for each, trained in one place (Caruana 1997): a reference.",
    rule="local",
    settings={"centralized": True, "multitask": True},
    equal_ranks=True,
)
LINEAR_PROBE = PublishedMethod(
    summary="Each client trains its head alone on the frozen model, and sends nothing: a reference.",
    rule="local",
    settings={"trained_parts": "head"},
)
HSPLITLORA = PublishedMethod(
    summary="HSplitLoRA: ranks by |weight x gradient|, cuts by device (Lin et al. 2025, arXiv:2505.02795).",
    rule="fedavg",
    settings={"space": "product", "ranks": "budget", "importance": "rngwp", "split": "auto"},
)
FEDPROX = PublishedMethod(
    summary="FedProx: FedAvg of clients held near their start (Li et al. 2020, arXiv:1812.06127).",
    rule="fedavg",
    suggested={"proximal_mu": 0.01},
)
