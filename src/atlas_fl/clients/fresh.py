"""What a client begins with before anything is measured or trained."""

from collections.abc import Mapping

from torch import nn

from atlas_fl.lora.adapters import init_adapters, init_head
from atlas_fl.models.backbone import Backbone, module_dims
from atlas_fl.models.family import head_shapes
from atlas_fl.tasks.spec import Task
from atlas_fl.types import Params


def fresh(
    backbone: Backbone, modules: Mapping[str, nn.Module], *, ranks: Mapping[str, int], task: Task, seed: int
) -> Params:
    """The shared initialisation of these modules at these ranks, and the head of the task: the same for its clients.

    Every tensor is drawn from a stream of its own, so that whoever draws some of them has those of the whole.
    """
    dims = {name: module_dims(modules[name]) for name in ranks}
    shapes = head_shapes(backbone.family, hidden=backbone.width, num_labels=task.num_labels)
    return {**init_adapters(dims, ranks, seed=seed), **init_head(shapes, seed=seed, group=task.name)}
