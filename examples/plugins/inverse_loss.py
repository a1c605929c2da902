"""A method of one's own: clients with a low training loss count more.

atlas run --plugin examples/plugins/inverse_loss.py --strategy inverse_loss --knob power=2 --preset smoke
"""

from typing import Annotated

import numpy as np

from atlas_fl.aggregation.matrices import average
from atlas_fl.methods.method import Method
from atlas_fl.plugins import register
from atlas_fl.ranges import Range


@register("method")
class InverseLoss(Method):
    """One average over all clients, weighted by the inverse of their mean training losses; heads inside their task."""

    name = "inverse_loss"
    power: Annotated[float, Range(least=0, most=10)] = 1.0
    """Exponent of the inverse losses: 0 is equal shares."""

    def rule(self, step):
        """The same row for everyone who may mix: 1 / F_k^power over those who took part."""
        metrics = {} if step.models is None else step.models.answers.metrics
        losses = np.array([metrics.get(client, {}).get("loss", 1.0) for client in step.federation.clients])
        return average(np.maximum(losses, 1e-3) ** -self.power, step.groups, step.present)
