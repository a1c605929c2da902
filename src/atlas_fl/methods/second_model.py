"""A second model of every client, its own, beside the shared one: what Ditto, APFL and FedDPA have in common.

The shared model is the one that the server sent and stays as it is while the second one trains, on the same examples in
the same order. What is stacked is one adapter of the ranks of both, A on A_w and a B beside (1 - a) B_w, so that
nothing else of the product knows of two; its head is the second model's.

FedALT's gate gives every layer and token x an a of its own, trained with v from G = 0 (`models.lora`):

    (a(x), 1 - a(x)) = softmax(G x + (log a, log (1 - a)))

With a = 1/2 that is the paper's; with a = 1 the gate is closed to w and nothing moves it.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from atlas_fl.methods.knobs import KNOB, Tried
from atlas_fl.methods.method import OwnTraining, Part, RoundStart
from atlas_fl.params import HEAD, LORA_A, LORA_B, LORA_GATE, PRIVATE, SHARE, ByClient, Params, lora_modules
from atlas_fl.ranges import Range


class SecondModel(Part):
    """A second model of one kind, at the client and in the round."""

    second_weight: Annotated[
        float,
        Range(least=0),
        Tried("ditto", values=(0.5, 0.1, 1.0, 0.03)),
        Tried("apfl", "feddpa", "fedalt", "fedalt_fixed", values=(0.5, 0.25, 0.75, 0.9)),
    ] = 0.5
    """Weight of the pull of a proximal second model; share of the others' own model to begin with, or throughout where
    it is stacked without a gate."""
    second_gate: Annotated[Literal["none", "input"], KNOB] = "none"
    """`input`: in every adapted layer a gate weighs a stacked own adapter against the frozen one token by token. It
    trains with the own adapter and is never sent (FedALT)."""

    kind: ClassVar[str] = "none"
    """The value of `--second-model`."""
    role: ClassVar[str] = "companion"
    """The kind under which the shared model goes to the second training: an `anchor` pulls it by the second weight."""
    begins_there: ClassVar[bool] = False
    """The client trains on from its companion, and not from its own model."""

    tells_share: ClassVar[bool] = False
    """The shared model may come with the client's share in it."""

    # at the client

    def companion(self, own: Params, shared: Params) -> Params:
        """Part of what the server has sent that stands beside the client's own model: all of it.

        With a share s of the client in it, it is what the others have in it: (shared - s own) / (1 - s).
        """
        if SHARE not in shared:
            return shared
        share = float(shared[SHARE])
        mean = {key: tensor for key, tensor in shared.items() if key != SHARE}
        if share >= 1:  # there is nobody else
            return {key: own[key] for key in mean}
        return {key: ((one.double() - share * own[key].double()) / (1 - share)).to(one) for key, one in mean.items()}

    def combine(self, own: Params, shared: Params, gate: Params) -> Params:
        """Model that a client computes with: its second model and the shared one together; gradients reach the second.

        With a `gate` (`initial_gate`) what is stacked is weighed by the input, and the gate is among the tensors.
        """
        del shared, gate
        return own

    def after_step(self, leaves: Mapping[str, Tensor]) -> None:
        """Put trained values back into their range, in place."""

    # in the round

    def initial(self, start: Params) -> Params:
        """The second model before its first round: the one that everyone starts with."""
        return start

    @property
    def own_options(self) -> Mapping[str, Any]:
        """Options of the second training that differ from those of the first."""
        return {
            "report": "none",
            "proximal_mu": self.second_weight if self.role == "anchor" else 0.0,
            "second_model": self.kind,
            "second_weight": self.second_weight,
            "control_variates": False,
            "update_filter": (),  # it never leaves its client
        }

    def own_training(self, round: RoundStart) -> OwnTraining | None:
        """The second training of the clients of the round, beside the shared models as they were sent."""
        shared = {name: round.client_models[name] for name in round.clients}
        models = {name: round.of("second").get(name) or self.initial(params) for name, params in shared.items()}
        return OwnTraining(
            models=models,
            sent={self.role: shared},
            kept={"gate": self.gates(round, shared)},
            options=self.own_options,
        )

    def predict(self, round: RoundStart) -> ByClient:
        """The second model beside the newest shared one; of a client without one the latter."""
        return self.together(round, own=round.of("second"), shared=round.client_models)

    def together(self, round: RoundStart, *, own: ByClient, shared: ByClient) -> ByClient:
        """Models that clients with one of their own predict with, with the newest gate.

        One that is at its client alone is named beside the shared one, and combined with it there.
        """
        gate = self.gates(round, own)

        def both(name: str) -> Params:
            if self.role == "companion" and PRIVATE in own[name]:
                return {**shared[name], PRIVATE: own[name][PRIVATE]}
            companion = self.companion(own[name], shared[name])
            return self.combine(own[name], companion, gate.get(name, {}))

        return {name: both(name) if name in own else params for name, params in round.client_models.items()}

    def gates(self, round: RoundStart, models: ByClient) -> ByClient:
        """The gate of every client, that before its first round where it has none yet; empty without `--second-gate`.

        `models` say which layers are adapted. The gate of a model that stays at its site lies there with it.
        """
        known, here = round.of("gate"), {name: own for name, own in models.items() if PRIVATE not in own}
        return {name: known.get(name) or self.initial_gate(own) for name, own in here.items()}

    def initial_gate(self, model: Params) -> Params:
        """The gate before its first round; empty without `--second-gate`."""
        return {} if self.second_gate == "none" else initial_gate(model)


def initial_gate(model: Params) -> dict[str, Tensor]:
    """The gate before its first round: G = 0, (2, d_in) of every adapted module, so that its weight is a everywhere."""
    return {
        module + LORA_GATE: torch.zeros(2, model[module + LORA_A].shape[1], dtype=torch.float32)
        for module in lora_modules(model)
    }


def stack(own: Params, shared: Params, *, weights: tuple[float, float], scale: Callable[[int], float]) -> Params:
    """One adapter that computes the weighted sum of both, with the head of `own`."""
    stacked: dict[str, Tensor] = {key: value for key, value in own.items() if key.startswith(HEAD)}
    for module in lora_modules(own):
        if module + LORA_A not in shared:  # nothing is frozen there
            stacked |= {module + end: own[module + end] for end in (LORA_A, LORA_B)}
            continue
        (a, b), (other_a, other_b) = ((params[module + LORA_A], params[module + LORA_B]) for params in (own, shared))
        both, own_scale = scale(len(a) + len(other_a)), scale(len(a)) if len(a) else 0.0
        # what a router weighs are several adapters of one's own rank
        other_scale = scale(len(a if module + LORA_GATE in own else other_a))
        stacked[module + LORA_A] = torch.cat([a, other_a.to(a)])
        parts = [weights[0] * own_scale / both * b, weights[1] * other_scale / both * other_b.to(b)]
        stacked[module + LORA_B] = torch.cat(parts, dim=1)
    return stacked


def stack_by_gate(own: Params, shared: Params, gate: Params, *, weight: float, scale: Callable[[int], float]) -> Params:
    """The same with weights by the input: the gate is among the tensors as a model holds it, (2, d_in + 1).

    Its last column holds the logarithms of both weights.
    """
    offset = torch.tensor([[weight], [1 - weight]]).log()
    held = {key: torch.cat([value, offset.to(value)], dim=1) for key, value in gate.items()}
    return {**stack(own, shared, weights=(1.0, 1.0), scale=scale), **held}
