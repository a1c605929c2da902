"""What all the others hold alike, a newcomer begins with: those very tensors.

A mean of equal numbers is that number; but in floating point a weighted sum of them may end in another last bit. Whole
models would then be in memory twice, and under a mask both ends of a wire would no longer agree on what is frozen.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from atlas_fl.mixing.matrices import Federation
from atlas_fl.tree import HEAD, is_whole
from atlas_fl.types import ByClient, Params


def as_all_hold(begun: ByClient, held: ByClient, federation: Federation) -> dict[str, Params]:
    """The models that these newcomers begin with; `held` are those of the others, whose heads count inside a task.

    Adapters are left as they are: nobody needs them to be the very same.
    """
    tasks = dict(zip(federation.clients, federation.head_groups, strict=True))

    def common(name: str, key: str) -> Tensor | None:
        # those of its own task first: who holds all that they hold shares their model as a whole
        fellows = [other for other in held if tasks[other] == tasks[name]]
        others = [] if key.startswith(HEAD) else [other for other in held if tasks[other] != tasks[name]]
        return _one([held[other][key] for other in (*fellows, *others)])

    models: dict[str, Params] = {}
    for name, params in begun.items():
        found = {key: common(name, key) for key in params} if is_whole(params) else {}
        models[name] = {key: own if (one := found.get(key)) is None else one for key, own in params.items()}
    return models


def _one(tensors: Sequence[Tensor]) -> Tensor | None:
    """The first of these where all are equal to it, bit for bit as far as numbers show; None where they are not."""
    if not tensors:
        return None
    first = tensors[0]
    return first if all(own is first or torch.equal(own, first) for own in tensors[1:]) else None
