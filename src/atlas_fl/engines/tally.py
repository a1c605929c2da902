"""An engine that keeps count of what crosses the cuts of its clients."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from atlas_fl.clients.base import Job, Update
from atlas_fl.engines.base import Engine
from atlas_fl.io.ledger import Direction, Kind, LedgerRow


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Another engine's updates, with the bytes through every cut by client and action."""

    engine: Engine
    crossed: dict[tuple[str, str], Counter[tuple[Kind, Direction]]] = field(default_factory=dict)

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, as the engine gives them."""
        updates = self.engine.run(action, jobs)
        for update in updates:
            if update.crossed:
                self.crossed.setdefault((update.client, action), Counter()).update(update.crossed)
        return updates

    def rows(self, *, round: int) -> Iterator[LedgerRow]:
        """A row for all messages of one client, action, kind and direction, in the order in which they came."""
        for (client, action), sizes in self.crossed.items():
            for (kind, direction), size in sizes.items():
                yield LedgerRow(round=round, client=client, direction=direction, kind=kind, bytes=size, phase=action)
