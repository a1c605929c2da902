"""The settings of image tasks: what trains of the model, and of whole models which weights may move."""

import re
from dataclasses import dataclass
from typing import Literal

WHOLE = "whole"
OF_WHOLE = frozenset({"frozen_blocks", "ridge", "momentum", "nesterov", "carry_momentum"})
"""Settings of images that adapters have no use for."""
OF_ADAPTERS = frozenset({"targets", "lora_alpha", "rslora", "init_adapter", "gradient_checkpointing"})
"""Settings of the model that whole models have no use for."""
EVENLY = "iid"
"""What `nc` says where every client has all classes."""


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Image tasks: all weights are trained by SGD, or adapters as on texts."""

    tune: Literal["whole", "lora"] = "whole"
    """What trains: all weights by SGD, or LoRA adapters and a head on the frozen model by AdamW, with fingerprints,
    clusters and ranks as on texts."""
    nc: str = EVENLY
    """Classes of each client of an image task: `iid` (all of them), or a number."""
    validation_share: float | None = None
    """Share of a data set's training images that becomes its validation split, where it brings none; a fifth, and at
    most 2,000, by default."""
    image_size: int | None = None
    """Side of the square that the model sees, in pixels; what it was pretrained on by default."""
    frozen_blocks: int = 0
    """Blocks from the first one up that stay as they are, the embeddings with them; 0 freezes nothing."""
    head_first: Literal["none", "ridge"] = "ridge"
    """Fit the head before anything else, by ridge regression over all clients' sums (no image leaves a client).
    Of whole models: beside adapters it begins and trains as on texts."""
    ridge: float = 10.0
    """Penalty of that regression, in examples."""
    local_steps: int | None = None
    """Steps of a client in a round (J); whole passes (`--local-epochs`) by default."""
    momentum: float = 0.9
    """SGD's momentum; it begins anew in every round, or with `--carry-momentum` once."""
    nesterov: bool = False
    """Nesterov's momentum."""
    carry_momentum: bool = False
    """Let every client begin a round with the momentum that it ended its last one with; needs all clients in every
    round, and memory for one more model a client."""
    label_smoothing: float = 0.0
    """Share of a label that is spread over all classes."""
    crop: int = 0
    """Border in pixels, of the images as they are, out of which training images are cropped at random; 0 for none."""
    flip: bool = False
    """Mirror every second training image."""


@dataclass(frozen=True, kw_only=True)
class SparseConfig:
    """Task arithmetic: only the weights under a mask move."""

    mask: Literal["none", "least_sensitive", "most_sensitive", "lowest_magnitude", "highest_magnitude", "random"] = (
        "none"
    )
    """Which weights may move; the head, once fitted, is not among them."""
    mask_file: str | None = None
    """A mask that there is, in the place of one that is made: `mask.safetensors` of a run's folder, or what
    `atlas masks --merge` wrote. A run puts the digest of its content behind it and goes on with no other."""
    sparsity: float = 0.9
    """Share of the weights that may not."""
    mask_scope: Literal["global", "layer"] = "global"
    """Choose over all weights together, or the same share of each tensor."""
    calibration_rounds: int = 1
    """Rounds in which the mask is made: in each a part is frozen and the rest is scored again."""
    calibration_clients: int = 10
    """Clients, drawn once, that score the weights; all where there are fewer."""
    calibration_examples: int = 32
    """Training examples of each of them that its scores are made from."""
    fisher_labels: Literal["sampled", "true"] = "sampled"
    """Labels of the Fisher information: drawn from the model, or the true ones (empirical Fisher)."""

    @property
    def masked(self) -> bool:
        """Whether only some weights may move."""
        return self.mask != "none" or self.mask_file is not None


def mask_source(mask_file: str | None) -> tuple[str | None, str | None]:
    """(the path, the digest of its content) that a `mask_file` says; None for what it does not."""
    if mask_file is None:
        return None, None
    match = re.fullmatch(r"(.+)#sha256=([0-9a-f]{16})", mask_file)
    return (mask_file, None) if match is None else (match[1], match[2])
