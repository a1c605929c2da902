"""The words that every package shares."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch

Params: TypeAlias = Mapping[str, torch.Tensor]
"""A client's trainable tensors by name, read-only: `<module>.lora_A`, `<module>.lora_B`, `head.<name>`.

`lora_A` is (rank, d_in), `lora_B` is (d_out, rank); the update of the module is `scale * lora_B @ lora_A`.
"""

ByClient: TypeAlias = Mapping[str, Params]
"""Params of every client by the client's name: the only road from server to client."""

ServerState: TypeAlias = Mapping[str, "torch.Tensor | ServerState"]
"""What a strategy remembers between rounds: nested mappings whose leaves are tensors, read-only; empty of most.

Names hold no slash: a leaf's path through the mappings, joined by slashes, is its name in a checkpoint.
"""

Split: TypeAlias = Literal["train", "validation", "test"]
