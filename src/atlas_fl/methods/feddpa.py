"""FedDPA: a shared adapter and one of the client's own, stacked.

    W0 x + a s B A x + (1 - a) s B_w A_w x          (A, B) = v trains, (A_w, B_w) = w as it was sent

Yang, Long, Shen, Jiang and Blumenstein 2024, "Dual-personalizing adapter for federated foundation models",
arXiv:2403.19211; here with a fixed weight a at inference (`--second-weight`), where theirs follows the instance.
"""

from atlas_fl.methods.second_model import SecondModel, stack, stack_by_gate
from atlas_fl.params import Params


class FedDpa(SecondModel):
    """An own adapter on the shared one, weighed by a number, or by the input with `--second-gate input`."""

    kind = "stacked"

    def combine(self, own: Params, shared: Params, gate: Params) -> Params:
        """Both adapters as one."""
        weight, scale = self.second_weight, self.options.scale
        if gate:
            return stack_by_gate(own, shared, gate, weight=weight, scale=scale)
        return stack(own, shared, weights=(weight, 1 - weight), scale=scale)
