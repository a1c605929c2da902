"""The settings themselves: frozen dataclasses, one group for each part of the system.

The name of a setting is its flag and its key in a file, so no two groups share one; its docstring is its help.
"""

from dataclasses import dataclass, field
from typing import Literal

from atlas_fl.config.attack import AttackConfig
from atlas_fl.config.data import DataConfig as DataConfig
from atlas_fl.config.images import ImagesConfig, SparseConfig
from atlas_fl.config.robust import RobustConfig
from atlas_fl.config.splitting import SplitConfig
from atlas_fl.config.training import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The frozen backbone and its adapters."""

    model: str = "minilm"
    """Alias (`atlas list models`), hub name or directory."""
    targets: tuple[str, ...] = ()
    """Module names that get LoRA, or `all-linear`; PEFT's table for the architecture by default."""
    lora_alpha: float | None = None
    """LoRA alpha; twice the rank by default, so that the rank does not change the step size."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank."""
    dropout: float = 0.0
    """Dropout on the inputs of adapters and head, drawn from a generator of the client's own."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the model; bf16 and fp16 by autocast, fp16 with scaled losses, and of adapters on CUDA alone."""
    gradient_checkpointing: bool = False
    """Recompute each block in the backward pass: less memory, more time."""
    init_adapter: str | None = None
    """A PEFT adapter folder that every client starts from."""


@dataclass(frozen=True, kw_only=True)
class ClusteringConfig:
    """Phase 1: which clients share a task."""

    clusters: str = "auto"
    """`auto`, `oracle` (the true tasks) or a number of clusters."""
    cluster_by: Literal["corrected", "atlas", "silhouette", "gap"] = "corrected"
    """How `auto` finds the clusters: noise-corrected similarity without k, or a k search by this score."""
    fingerprint: Literal["fisher", "delta", "gradient"] = "fisher"
    """What a client's fingerprint is made of."""
    fingerprint_batches: int = 12
    """Batches of the gradient and fisher fingerprints."""
    fingerprint_blocks: int = 2
    """Blocks, from the last one down, whose gradients the gradient and fisher fingerprints read."""
    fingerprint_samples: int | None = None
    """Most examples of a client that its fingerprint is made from, half of them for each half; all by default."""
    fingerprint_steps: int = 60
    """Most warm-up steps of each half for the delta fingerprint."""
    sketch_dim: int = 1024
    """Length of the sketch that leaves the client."""
    pca_components: int = 64
    """Most principal components on the server; n clients have at most n - 1."""
    k_range: tuple[int, int] = (2, 5)
    """Smallest and largest k of the search."""
    min_cluster_size: int = 1
    """Clusters below this size are merged into their nearest."""
    similarity_threshold: float = 0.8
    """Noise-corrected similarity from which clients share a cluster under `corrected`."""
    min_reliability: float = 0.1
    """Agreement of a client's own halves below which it is undecided and trains alone."""
    incremental_pca: bool = False
    """Fit the principal components in batches of clients."""
    recluster_every: int = 0
    """Rounds between two clusterings; 0 clusters once."""
    stability: float = 0.0
    """Weight of the previous clusters when clients are clustered again."""


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """Phase 2: LoRA ranks per layer and client."""

    ranks: str = "budget"
    """`budget`, `greedy`, `matched` (to the bytes of uniform), `uniform`, or one rank for every layer and client."""
    candidates: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Ranks that a layer may have."""
    importance: Literal["gradient", "rngwp"] = "gradient"
    """How the importance of a layer is measured."""
    adapter_bytes: int | None = None
    """Most bytes of one client's adapters; the device's own upload budget by default."""
    budget: Literal["memory", "fractions"] = "memory"
    """Device memory by the true model, or by fixed fractions."""
    alpha_base: float = 0.35
    """Fraction of memory for the backbone, when budget is `fractions`."""
    alpha_act: float = 0.25
    """Fraction of memory for activations, when budget is `fractions`."""
    alpha_opt: float = 0.15
    """Fraction of memory for the optimizer, when budget is `fractions`."""
    rerank: bool = False
    """Choose the ranks again whenever clients are clustered again, and bring every model to them."""
    complexity_scaling: bool = False
    """Give clusters with a harder task more of their budget."""


@dataclass(frozen=True, kw_only=True)
class MixingConfig:
    """Phase 4: the server's rule."""

    strategy: str = "atlas"
    """The rule (`atlas list strategies`); `--ablation` is the same flag and takes old names, such as local_only."""
    eta: float = 0.5
    """Step of the Laplacian: 0 mixes nothing."""
    eta_decay: float = 1.0
    """Factor on eta after each round."""
    laplacian: Literal["symmetric", "random_walk", "metropolis"] = "random_walk"
    """Which Laplacian, and so which mean is kept."""
    alpha: float | None = None
    """Sharpness of the graph's RBF; one over the median squared distance by default."""
    graph: Literal["similarity", "uniform", "adaptive"] = "similarity"
    """Edge weights: fingerprint similarity, equal, or similarity times validation performance."""
    symmetrize: Literal["average", "max", "min"] = "average"
    """How a directed graph becomes symmetric."""
    neighbours: int = 0
    """Keep only this many nearest neighbours of a client; 0 keeps all."""
    singleton_neighbours: int = 1
    """Nearest clients that a client alone in its cluster is joined to; 0 leaves it alone."""
    graph_ema: float = 0.0
    """Share of the previous graph that re-clustering keeps."""
    block_diagonal: bool = True
    """Cut the edges between clusters."""
    space: Literal["factors", "product"] = "product"
    """Mix A and B apart, or the update s B A itself."""
    share: tuple[Literal["A", "B", "head"], ...] = ("A", "B", "head")
    """What leaves the client."""
    align: Literal["pad", "truncate"] = "pad"
    """How factors of different ranks meet in factor space."""
    layer_weighting: Literal["none", "importance"] = "none"
    """Scale eta per layer by the layer's importance."""
    aggregate_every: int = 1
    """Rounds between two aggregations; between them clients train on from their own models and nothing is mixed."""
    keep: Literal["mixed", "best"] = "mixed"
    """Deliver the mixed model, or on each client the better of mixed and own by validation loss."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Seed, records and machine."""

    seed: int = 42
    """Every random choice derives from it."""
    preset: str = "quick"
    """The recipe that all other defaults come from (`atlas list presets`). `--mode` is the same flag."""
    name: str | None = None
    """Name of the run's folder; preset, strategy, model, seed and config hash by default."""
    runs_dir: str = "runs"
    """Where run folders lie."""
    audit: bool = False
    """Keep what every client trained and loaded, for `atlas audit`."""
    max_rounds: int | None = None
    """Stop after this many rounds of this session; `atlas resume` goes on."""
    checkpoint_every: int = 1
    """Rounds between two checkpoints; a session always ends with one."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    keep_best: int = 0
    """Best rounds by mean validation score whose checkpoints are kept too, for `atlas export --round best`."""
    accelerator: Literal["auto", "cpu", "cuda"] = "cpu"
    """Where the packs are trained."""
    engine: Literal["local", "ray"] = "local"
    """Who trains the packs: processes of this machine, or the actors of a Ray cluster (`pip install 'atlas-fl[ray]'`;
    RAY_ADDRESS names the cluster, without it one is started here)."""
    workers: int | None = None
    """Processes that train packs at once, on shared backbone weights; by default this one alone, and with Ray one for
    each GPU, or CPU, of the cluster. With as many threads each, any number of them ends in the same bits."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    clustering: ClusteringConfig = field(default_factory=ClusteringConfig)
    ranks: RanksConfig = field(default_factory=RanksConfig)
    split: SplitConfig = field(default_factory=SplitConfig)
    mixing: MixingConfig = field(default_factory=MixingConfig)
    robust: RobustConfig = field(default_factory=RobustConfig)
    attack: AttackConfig = field(default_factory=AttackConfig)
    images: ImagesConfig = field(default_factory=ImagesConfig)
    sparse: SparseConfig = field(default_factory=SparseConfig)
    run: RunConfig = field(default_factory=RunConfig)
