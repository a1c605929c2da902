"""The options of a client's jobs: training, evaluation, fingerprint, importance, calibration (`Job.options`).

A job carries one of these across the wire; `setup.options` makes them from the config.
"""

from collections.abc import Mapping
from typing import Literal, TypeAlias

from atlas_fl.frozen import Frozen
from atlas_fl.params import HEAD, LORA_A, LORA_B, LORA_CORE, LORA_SCALE, Split, is_last_layer

TrainedParts: TypeAlias = Literal[
    "all", "B", "core", "head", "alternate", "head_then_rest", "last_layer_then_rest", "without_head"
]
OptimizerName: TypeAlias = Literal["adamw", "sgd"]
Schedule: TypeAlias = Literal["constant", "linear", "cosine", "step"]
OWN_TRAINER = "atlas"
"""The training loop of `client.local_training`, among those of plug-ins."""


class TrainOptions(Frozen):
    """Options of local training. A run has `rounds * steps` steps; the schedule runs over all of them."""

    seed: int
    """The run's. A client with a secret draws nothing about its examples from it (`client.draws`)."""
    rounds: int = 1
    epochs: int = 1
    max_steps: int | None = None
    batch_size: int = 16
    lr: float = 1e-3
    schedule: Schedule = "constant"
    warmup: float = 0.0
    weight_decay: float = 0.0
    clip: float = 1.0
    optimizer: OptimizerName = "adamw"
    momentum: float = 0.0
    """Momentum setting of SGD."""
    nesterov: bool = False
    """Momentum setting of SGD."""
    proximal_mu: float = 0.0
    """Weight of FedProx's term (`client.optimizer`); 0 for none."""
    dropout: float = 0.0
    trained_parts: TrainedParts = "all"
    """Which parameters train (`trains`, `moves`)."""
    head_epochs: int = 0
    """Passes in which the head moves alone, before those of the round; 0 for half of the round's steps."""
    head_rate: float = 1.0
    """Multiple of the learning rate in steps of the head alone."""
    trainer: str = OWN_TRAINER
    """Name of the training loop (`client.trainers`)."""
    personal_rounds: int = 0
    """Last rounds of the run, in which all parameters train."""
    half: int | None = None
    """Train on the first (0) or second (1) half of the examples only, for as many steps as on all: `methods.kriging`,
    fingerprints that check themselves."""
    most: int | None = None
    """Train on at most so many of these examples; which ones is drawn once for all rounds."""
    label_smoothing: float = 0.0
    """Share of a class label that is spread over all classes."""
    dpo_beta: float | None = None
    """Weight of the rewards of DPO (`client.preferences`); None for another loss."""
    orpo_lambda: float | None = None
    """Weight of the odds ratio of ORPO; None for another loss."""
    crop: int = 0
    """Border in pixels out of which images are cropped at random."""
    flip: bool = False
    """Mirror every second image."""
    hash_loaded: bool = False
    """Hash what was really loaded, for the audit."""
    rate_by_round: bool = False
    """Follow the schedule round by round, not step by step."""
    update_filter: tuple[str, ...] = ()
    """Filters of what leaves the client, in their order (`methods.update_filters`)."""
    error_feedback: bool = False
    """Add what they took from the client's last change, which it keeps."""
    prior_correction: bool = False
    """Add the log frequencies of the client's classes to its logits (`methods.prior_correction`)."""
    second_model: str = "none"
    """Kind of the job's model, beside its `companion` (`methods.registry.SECOND_MODELS`)."""
    second_weight: float = 0.5
    """Share of the job's model in what is stacked."""
    control_variates: bool = False
    """Hand back the mean gradient of the round's steps, but not in personal rounds (SCAFFOLD)."""
    carry_momentum: bool = False
    """Begin with the job's momentum, and hand back what there is at the end."""
    feature_alignment: float = 0.0
    """Weight of the pull to the job's centroids (`methods.fedpac`); 0 for none."""
    orthogonality: float = 0.0
    """Weight of the pull away from the directions of the frozen part (`methods.hilora`); 0 for none."""
    dp: Literal["none", "example"] = "none"
    """Unit of differential privacy (`client.privacy`)."""
    pays_halves: bool = False
    """The budget is also for models of halves, which are trained once."""
    epsilon: float = 8.0
    """Budget of the whole run under `dp`."""
    delta: float | None = None
    """Delta of this budget; n^-1.1 for n examples where it is None."""
    report: str = "none"
    """Kind of what is reported beside the update (`methods.method.Method.report`)."""

    @property
    def learns_preferences(self) -> bool:
        """Return whether it learns from pairs of a chosen and a rejected answer."""
        return self.dpo_beta is not None or self.orpo_lambda is not None

    def trains(self, name: str, *, round: int) -> bool:
        """Return whether the parameter of this name trains in this round (from 1; 0 before round one).

        `B` is FFA-LoRA (Sun et al. 2024, arXiv:2403.12313), `alternate` RoLoRA (Chen et al. 2025, arXiv:2502.01755),
        `without_head` FedBABU (Oh et al. 2022, arXiv:2106.06042), `head` a linear probe, `core` Fed-SB and RAVAN
        (`methods.core`).

        >>> TrainOptions(seed=0, trained_parts="alternate").trains("q.lora_A", round=2)
        True
        """
        if self.is_personal(round):
            return True
        if self.trained_parts == "core":
            return name.startswith(HEAD) or name.endswith((LORA_CORE, LORA_SCALE))
        if self.trained_parts == "alternate":
            return not name.endswith(LORA_B if round % 2 == 0 else LORA_A)
        if self.trained_parts in ("head", "without_head"):
            return name.startswith(HEAD) == (self.trained_parts == "head")
        return not (self.trained_parts == "B" and name.endswith(LORA_A))

    @property
    def is_head_first(self) -> bool:
        """The head moves alone before the rest does, or with `last_layer_then_rest` its last layer."""
        return self.trained_parts in ("head_then_rest", "last_layer_then_rest")

    def moves(self, name: str, *, round: int, is_head_step: bool) -> bool:
        """Return whether a parameter that trains in this round moves in a step, which may be one of the head alone.

        FedRep (Collins et al. 2021, arXiv:2102.07078, algorithm 1) trains the head before the representation, FedPAC
        (`methods.fedpac`) its last layer.
        """
        if self.is_personal(round) or not self.is_head_first:
            return True
        is_head = name.startswith(HEAD) if self.trained_parts == "head_then_rest" else is_last_layer(name)
        return is_head == is_head_step

    def is_personal(self, round: int) -> bool:
        """Return whether this round is one of the last, in which a client trains for itself alone."""
        return self.personal_rounds > 0 and round > self.rounds - self.personal_rounds


class EvaluateOptions(Frozen):
    """Which split to score."""

    split: Split
    new_tokens: int = 0
    """Most tokens that are written after each of a client's prompts, for ROUGE; 0 writes nothing."""
    prior_correction: bool = False
    """Add the log frequencies of the client's classes to its logits."""
    outcomes: bool = False
    """Report the outputs and labels of every example; of simulated clients alone."""


class FingerprintOptions(Frozen):
    """Options of a fingerprint."""

    kind: str
    sketch_dim: int
    train: TrainOptions
    """The warm-up's training, or the batches of the gradients."""
    batches: int
    """Most gradient batches of each half."""
    steps: int
    """Most warm-up steps of each half."""
    blocks: int = 2
    """Last blocks whose gradients are taken."""
    samples: int | None = None
    """Most examples of both halves together; all where it is None."""
    stride: int = 10
    """Warm-up steps between two looks at the halves' agreement."""
    reliability: float = 0.3
    """Agreement of the halves at which the warm-up ends early."""

    @property
    def batch_size(self) -> int:
        """Examples in a step of both halves together; engines size packs by it."""
        return 2 * self.train.batch_size

    def most(self, half: int) -> int | None:
        """Most examples of this half: the first takes the odd one."""
        return None if self.samples is None else (self.samples + 1 - half) // 2


class ImportanceOptions(Frozen):
    """Options of layer importance."""

    kind: Literal["gradient", "rngwp"]
    train: TrainOptions
    """Batch size and seed of the batches."""
    batches: int

    @property
    def batch_size(self) -> int:
        """Examples in a step; engines size packs by it."""
        return self.train.batch_size


class RidgeOptions(Frozen):
    """No options: every training example counts once."""


class ScaleOptions(Frozen):
    """Number of a client's first validation examples that are looked at."""

    examples: int


class SensitivityOptions(Frozen):
    """From which examples the scores are made, and with which labels."""

    seed: int
    examples: int
    """At most so many of a client's training examples, drawn once."""
    labels: Literal["sampled", "true"] = "sampled"
    names: tuple[str, ...] = ()
    """The weights that are scored."""


OPTIONS: Mapping[str, type[object]] = {
    "fingerprint": FingerprintOptions,
    "importance": ImportanceOptions,
    "train": TrainOptions,
    "evaluate": EvaluateOptions,
    "ridge": RidgeOptions,
    "scale": ScaleOptions,
    "sensitivity": SensitivityOptions,
}
"""The options of every action of `client.registry.ACTIONS`."""
