"""A client's images as what packs take: examples of as many tokens as the model makes of an image."""

from collections.abc import Mapping

from atlas_fl.clients.base import ClientTokens
from atlas_fl.models.tokens import encode_images
from atlas_fl.tasks.clients import ClientData
from atlas_fl.tasks.images import Images
from atlas_fl.tasks.spec import Examples
from atlas_fl.types import Split


def patches(client: ClientData, *, length: int) -> ClientTokens:
    """The client's images, `length` tokens each."""
    held: Mapping[Split, Examples] = {"train": client.train, "validation": client.validation, "test": client.test}
    splits = {}
    for split, rows in held.items():
        assert isinstance(rows, Images), "a run on images has image tasks alone"
        splits[split] = encode_images(rows.pixels, rows.label, length=length)
    return ClientTokens(task=client.task, splits=splits)
