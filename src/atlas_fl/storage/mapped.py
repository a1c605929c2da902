"""Tensors of a large federation on the disk, in files that no name leads to.

They are mapped into memory: the system reads their pages when they are used, and drops them where memory is short. A
file is removed as soon as it is mapped, so that nobody can change it; its space is free once its tensors are gone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path
from weakref import WeakValueDictionary

from safetensors.torch import load_file
from torch import Tensor

from atlas_fl.frozen import Frozen
from atlas_fl.storage.folder_access import draft_name
from atlas_fl.storage.run_folder import MAPPED
from atlas_fl.storage.tensors import parts_of, write_tensors

LARGEST_IN_MEMORY = 1 << 30
"""Most bytes of tensors that stay in memory."""
FILE_BYTES = 1 << 24
"""Bytes with which a mapped file is full: its space is free only when all of its tensors are gone."""


class MappedTensors(Frozen):
    """Moves tensors to the disk where they take too much memory."""

    folder: Path
    """Where a file lies until it is mapped, as a draft (`storage.folder_access`)."""
    mapped: WeakValueDictionary[int, Tensor] = field(default_factory=WeakValueDictionary)
    """The tensors on the disk by `id`."""

    def move(self, tensors: Iterable[Tensor]) -> dict[int, Tensor]:
        """By the `id` of each tensor in memory, its copy on the disk; empty where they take at most the limit."""
        in_memory = {id(tensor): tensor for tensor in tensors if self.mapped.get(id(tensor)) is not tensor}
        if sum(tensor.nbytes for tensor in in_memory.values()) <= LARGEST_IN_MEMORY:
            return {}
        moved = {key: tensor for part in parts_of(in_memory, FILE_BYTES) for key, tensor in self._map(part).items()}
        self.mapped.update({id(tensor): tensor for tensor in moved.values()})
        return moved

    def _map(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        path = self.folder / draft_name(MAPPED)
        write_tensors(path, {str(key): tensor for key, tensor in tensors.items()})
        mapped = load_file(path)
        path.unlink()
        return {int(name): tensor for name, tensor in mapped.items()}
