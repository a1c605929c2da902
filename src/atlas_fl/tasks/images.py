"""Labelled images, as a task holds them before any model has seen them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

import numpy as np

Pixels: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""(n, height, width, channels) uint8; one channel is grey, three are red, green and blue."""

CHANNELS = (1, 3)


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """Images of one size with a class each."""

    pixels: Pixels
    label: np.ndarray[Any, np.dtype[np.int64]]
    """(n,) classes from 0 on."""

    def __post_init__(self) -> None:
        assert self.pixels.dtype == np.uint8 and self.pixels.ndim == 4, "pixels are uint8 (n, height, width, channels)"
        assert self.pixels.shape[-1] in CHANNELS, "an image is grey or has red, green and blue"
        assert self.label.dtype == np.int64 and self.label.shape == self.pixels.shape[:1], "one int64 class an image"

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def size(self) -> tuple[int, int, int]:
        """(height, width, channels)."""
        _, height, width, channels = self.pixels.shape
        return height, width, channels

    def take(self, index: Sequence[int] | np.ndarray[Any, np.dtype[Any]]) -> Self:
        """The images of these positions, in this order."""
        positions = np.asarray(index, dtype=np.int64)
        return replace(self, pixels=self.pixels[positions], label=self.label[positions])
