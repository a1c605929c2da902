"""The settings of rounds and local training."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Rounds and local training."""

    rounds: int = 12
    """Rounds of the whole run."""
    local_epochs: int = 1
    """Passes of a client over its data in a round."""
    batch_size: int = 16
    """Examples in a client's step."""
    lr: float | None = None
    """Peak learning rate of AdamW, or of SGD on images; the model's own by default (`atlas list models`)."""
    schedule: Literal["constant", "linear", "cosine", "step"] = "constant"
    """Learning rate over the steps of all rounds; `step`: a tenth after half, a hundredth after three quarters."""
    warmup: float = 0.0
    """Share of all steps in which the learning rate rises from zero."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay, or SGD's."""
    clip: float = 1.0
    """Largest gradient norm of a client; 0 switches clipping off."""
    participation: float = 1.0
    """Share of the clients that train in a round."""
    eval_every: int = 1
    """Rounds between two evaluations; the last round is always evaluated."""
    patience: int = 0
    """Rounds without a better mean validation score after which the run ends early; 0 for never."""
    min_delta: float = 0.0
    """What a score must exceed the last better one by to be better, under `--patience`."""
    pack_tokens: int | None = None
    """Tokens that train together; chosen for the machine by default, and never above the memory budget."""
    pack_memory_gb: float = 4.0
    """Memory that one pack's activations may take."""
