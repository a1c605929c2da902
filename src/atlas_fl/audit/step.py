"""A server step as the formulas see it, and the shape of a formula: one rule, written a second time.

A formula is a frozen value. It says the weights of each client's next value, one row and one edge at a time, and where
the rule has a state, or steps from an average, what these become. How models follow from it is `audit.recompute`.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from atlas_fl.audit.dense import arrays, bound_weights, is_compared, padded, value, vector
from atlas_fl.audit.run_files import AuditPlan, Flat, Models, Run
from atlas_fl.frozen import Frozen

T = TypeVar("T")
TOLERANCE = 1e-4, 1e-6
"""Tolerance of a value of a server state: as a share of itself, and of the largest of its tensor."""
FLOAT32 = 3e38
"""A state beyond this cannot be kept, and its round is undone."""

NO_SIZES: Mapping[str, float] = {}
Values = Mapping[str, np.ndarray]
"""Dense values by name."""
Value = tuple[np.ndarray, float]
"""A dense value, and the size of what went into it."""


class Step(Frozen, eq=False):
    """Input of a server step, or of what clients that join begin with."""

    run: Run
    plan: AuditPlan
    round: int
    present: tuple[bool, ...]
    """Clients whose update counts."""
    before: Models
    """The models of the last aggregation."""
    trained: Models
    """The same with the updates."""
    without_edges: tuple[str, ...] = ()
    """Clients that are nobody's neighbour."""
    state: Flat = field(default_factory=dict)
    """Server state before the round."""
    told: Flat = field(default_factory=dict)
    """Server state after the round, as it was recorded: with what clients reported in it."""
    is_undone: bool = False
    """True if clients kept the models that they began with, because the mixed ones were none."""
    _known: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The value of `compute`, which is computed once under this key."""
        if key not in self._known:
            self._known[key] = compute()
        known: T = self._known[key]
        return known

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.plan.clients)

    def own_row(self, k: int) -> list[float]:
        """The row of who keeps its model."""
        return [float(other == k) for other in range(self.num_clients)]

    def row(self, weights: Mapping[int, float]) -> list[float]:
        """The row with these weights, by place."""
        return [float(weights.get(other, 0.0)) for other in range(self.num_clients)]

    def mates(self, k: int, key: str) -> list[int]:
        """All clients that client k may meet at this parameter, itself included."""
        return [other for other in range(self.num_clients) if self.plan.may_meet(k, other, key)]

    def there(self, clients: Sequence[int]) -> list[int]:
        """The clients among these whose update counts."""
        return [one for one in clients if self.present[one]]

    def shares(self, clients: Sequence[int]) -> list[float]:
        """Shares of these clients by their examples, none above the bound of the settings."""
        return bound_weights([self.plan.examples[one] for one in clients], self.run.settings.robust.max_share)

    def compared(self, models: Models, clients: Sequence[int], selects: Callable[[str], bool]) -> list[str]:
        """Parameters of these clients with a value that is mixed and `selects` names."""
        keys = dict.fromkeys(key for k in clients for key in models[self.plan.clients[k]])
        mixing = self.run.mixing
        return [key for key in keys if is_compared(key, mixing.share, mixing.space) and selects(key)]

    def value(self, models: Models, k: int, key: str) -> np.ndarray:
        """The value of client k at this parameter."""
        return value(self.plan, models[self.plan.clients[k]], key, self.run.mixing.space)

    def changes(self, clients: Sequence[int], key: str, first: Models, last: Models) -> list[np.ndarray]:
        """The change of each client's value from the first models to the last, as vectors of one length."""
        names, space = [self.plan.clients[k] for k in clients], self.run.mixing.space
        ends = [vector(self.plan, models[name], key, space) for models in (last, first) for name in names]
        ends = padded(ends)
        return [end - start for end, start in zip(ends[: len(names)], ends[len(names) :], strict=True)]

    def products(self, clients: Sequence[int], keys: Sequence[str], first: Models, last: Models) -> np.ndarray:
        """Inner products of the clients' changes over these parameters; heads count within a task."""
        total = np.zeros((len(clients), len(clients)))
        for key in keys:
            changes = np.stack(self.changes(clients, key, first, last))
            meets = [[self.plan.may_meet(one, other, key) for other in clients] for one in clients]
            total += changes @ changes.T * np.array(meets)
        return total


class Formula:
    """One rule. The defaults are those of a rule without a state, whose step is a weighted sum."""

    is_known = True
    """False of a plug-in's method, for which there is no second formula."""
    steps = False
    """True if the rule has a step size eta, which records hold."""
    mixes = True
    """False if everyone keeps its own model."""
    reduction: Callable[[Step, np.ndarray], np.ndarray] | None = None
    """Reduction of the clients' values, (clients, ...), to one; None for a weighted sum."""
    value: Callable[[Step, int, str], Value | None] | None = None
    """The next value of a rule that steps from an average; None where client k gets nothing."""
    begun_faults: Callable[[Run, int, AuditPlan, Models, Models, Flat], Iterator[tuple[str, str]]] | None = None
    """(client, fault) of the models that clients chose to begin the round with."""
    initial: Callable[[Run, Models], dict[str, np.ndarray]] | None = None
    """Entries of the state by the models that clients begin with."""
    frozen: Callable[[AuditPlan, Flat, str], dict[str, Tensor]] | None = None
    """Part of a server state that this client holds frozen, by parameter."""
    correction: Callable[[Run, str, Values], Values] | None = None
    """Correction of a client's gradients that it is to be sent, by the state before the round."""

    def row(self, step: Step, k: int, key: str) -> list[float]:
        """The weight of each client's value in the next value of client k, at this parameter; its own by default."""
        del key
        return step.own_row(k)

    def arrival_row(self, step: Step, k: int, key: str) -> list[float]:
        """The weights of the values that client k begins with, who joins: those of an average of the others."""
        return self.row(step, k, key)

    def expected(self, step: Step) -> dict[str, np.ndarray]:
        """The state after the step, by path."""
        return arrays(step.state)

    def state_fault(self, step: Step) -> tuple[str, float | None] | None:
        """(the fault of the state after the step, the largest error); None where there is no state."""
        return compare_states(step.once("expected", lambda: self.expected(step)), step.told, before=step.state)


def weights(formula: Formula, step: Step, key: str, *, joins: bool = False) -> np.ndarray:
    """(n, n): row k holds the weight that each client's value has in the next one of client k, at this parameter.

    With `joins` those of clients that join; the others keep theirs.
    """
    clients = range(step.num_clients)
    if joins:
        new = [not step.present[k] and formula.mixes for k in clients]
        return np.array([formula.arrival_row(step, k, key) if new[k] else step.own_row(k) for k in clients])
    return np.array([formula.row(step, k, key) for k in clients])


def compare_states(expected: Values, state: Flat, *, before: Flat) -> tuple[str, float | None] | None:
    """(the fault of a server state, the largest error); None where there is no state."""
    if not expected and not state:
        return None
    is_lost = any(np.abs(values).max(initial=0.0) > FLOAT32 for values in expected.values())
    return compare_values(arrays(before) if is_lost else expected, arrays(state), "the server state")


def compare_values(
    expected: Values,
    got: Values,
    what: str,
    *,
    tolerance: tuple[float, float] = TOLERANCE,
    sizes: Mapping[str, float] = NO_SIZES,
) -> tuple[str, float | None]:
    """(the first entry that is not as computed again, the largest error of a value over the largest of its tensor).

    `sizes` are those of the largest values that went into an entry.
    """
    if lacking := sorted(expected.keys() - got.keys()):
        return f"{what} lacks {lacking[0]}", None
    if unknown := sorted(got.keys() - expected.keys()):
        return f"{what} has {unknown[0]}, which the rule does not make", None
    worst, fault = 0.0, ""
    for path, wanted in expected.items():
        found = got[path]
        if found.shape != wanted.shape or not np.isfinite(found).all():
            return f"{path} of {what} has shape {found.shape} or a value that is no number", None
        largest = max(float(np.abs(wanted).max(initial=0.0)), sizes.get(path, 0.0))
        error = float(np.abs(found - wanted).max(initial=0.0)) / (largest or 1.0)
        worst = max(worst, error)
        if not fault and not np.allclose(found, wanted, rtol=tolerance[0], atol=tolerance[1] * largest):
            fault = f"{path} of {what} is {error:.2g} away from the recomputation"
    return fault, worst
