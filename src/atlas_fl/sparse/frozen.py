"""Frozen weights in the server's step: they stay what they are, bit for bit.

Everybody holds the same ones, so their mean is what they are; but in floating point a weighted sum of equal numbers may
end in another last bit, and then both ends of a wire that carries the kept values alone would no longer agree.
"""

from torch import Tensor

from atlas_fl.sparse.choose import Mask
from atlas_fl.types import ByClient, Params


def with_frozen(mixed: ByClient, held: ByClient, mask: Mask) -> dict[str, Params]:
    """The mixed models, with those weights that the mask freezes as each client held them.

    Clients that share a model or a tensor before and after go on sharing it, and a model that was not mixed is the same
    object as before.
    """
    tensors: dict[tuple[int, int], Tensor] = {}
    models: dict[tuple[int, ...], Params] = {}

    def kept(key: str, new: Tensor, old: Tensor) -> Tensor:
        if new is old:
            return old
        place = id(new), id(old)
        if place not in tensors:
            tensors[place] = new.where(mask[key].to(new.device), old)
        return tensors[place]

    def whole(new: Params, old: Params) -> Params:
        if new is old:
            return old
        place = (*map(id, new.values()), *map(id, old.values()))
        return models.setdefault(place, {key: kept(key, tensor, old[key]) for key, tensor in new.items()})

    return {name: whole(params, held[name]) for name, params in mixed.items()}
