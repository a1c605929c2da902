"""What a cost model must know of a transformer: sizes and nothing else."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a backbone with its adapted modules; bytes are of the frozen weights as they are held."""

    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Width inside the feed-forward layers."""
    heads: int
    """Attention heads."""
    layers: tuple[tuple[tuple[int, int], ...], ...]
    """Of every block: (d_in, d_out) of each adapted module."""
    block_bytes: tuple[int, ...]
    """Frozen bytes of every block."""
    block_params: tuple[int, ...]
    """Frozen parameters of every block."""
    embedding_bytes: int
    """Frozen bytes of the embeddings and of what stands outside the blocks."""
    tail_bytes: int = 0
    """Of these, what stands behind the last block: norm, pooler, an output embedding of its own."""
    vocabulary: int = 0
    """Tokens that are told apart where text is written; 0 where none is."""

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.layers)
