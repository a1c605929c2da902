"""What a round holds of whole models: updates up to a bound in memory, those beyond it in files that are mapped.

A federation in which all of a hundred clients take part would hold a hundred copies of the model until they are
averaged. The pages of a mapped file are the system's to take back when memory is short. The files have no name: they
are gone when nothing reads them any more, however the process ends.
"""

import mmap
import tempfile
from collections.abc import Sequence
from dataclasses import replace

import torch

from atlas_fl.clients.base import Update
from atlas_fl.errors import DataError
from atlas_fl.models.shared import places_of, views
from atlas_fl.tree import num_bytes
from atlas_fl.types import Params

HELD_BYTES = 2**30
"""Most bytes of a round's updates in memory: twelve models of the size of ViT-S."""


def bounded(update: Update, held: Sequence[Update]) -> Update:
    """The update, in memory where it fits beside those that are held already, else in a file."""
    if sum(num_bytes(one.params) for one in (*held, update)) <= HELD_BYTES:
        return update
    return replace(update, params=on_disk(update.params))


def on_disk(params: Params) -> Params:
    """The same tensors in a mapped file of the directory for temporary files (TMPDIR).

    Raises `DataError` where there is no room for it.
    """
    places, size = places_of(params)
    try:
        with tempfile.TemporaryFile() as file:
            for place in places:
                file.seek(place["offset"])
                file.write(params[place["name"]].contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.truncate(size)
            file.flush()
            return views(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), places)
    except OSError as error:
        raise DataError(
            f"no room for a client's update of {size / 1e6:.0f} MB in {tempfile.gettempdir()} ({error.strerror}); free"
            " some, set TMPDIR to a larger place, or lower --participation"
        ) from error
