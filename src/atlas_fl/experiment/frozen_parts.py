"""What FLoRA and FedEx-LoRA send beside a model: what everyone holds frozen (`aggregation.exact_average`).

Who takes part in every round is sent what each round adds. Who has missed some is sent the whole, with its model.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from atlas_fl.aggregation.exact_average import frozen_part, newest_part
from atlas_fl.config import Config
from atlas_fl.config.methods import has_frozen_part, rule_of
from atlas_fl.params import Params, ServerState


@dataclass(frozen=True, kw_only=True)
class FrozenMessages:
    """What of the frozen part a round sends, by who gets it."""

    before: Params = field(default_factory=dict)
    """The whole as the round began, for those who had missed some."""
    newest: Params = field(default_factory=dict)
    """What the round added, for those who took part."""
    after: Params = field(default_factory=dict)
    """The whole as the round ended, for those who had missed some and took no part."""
    begins_again: bool = False
    """Whether adapters are as they were drawn after every aggregation, so that nobody has to be sent any."""


NO_FROZEN = FrozenMessages()
"""Those of a strategy without a frozen part."""


def frozen_companions(config: Config, state: ServerState, clients: Collection[str]) -> dict[str, Params]:
    """What the adapters of these clients stand on in the round after this state; empty where there is nothing yet."""
    frozen = frozen_part(state) if has_frozen_part(config) else {}
    return dict.fromkeys(clients, frozen) if frozen else {}


def frozen_messages(config: Config, before: ServerState, after: ServerState) -> FrozenMessages:
    """What a round between these server states sends."""
    if not has_frozen_part(config):
        return NO_FROZEN
    return FrozenMessages(
        before=frozen_part(before),
        newest={} if after is before else newest_part(after),
        after=frozen_part(after),
        begins_again=rule_of(config) == "fedavg_stacked",
    )
