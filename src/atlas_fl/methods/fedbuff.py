"""FedBuff: the server steps as soon as K updates have arrived, or when a time is over, and an old one counts less.

    x_{t+1} = x_t + eta sum_k p_k s(tau_k) (w'_k - w_k),     s(tau) = (1 + tau)^-1/2

p_k are shares of the examples of the K clients that have arrived, w_k is the model that client k began with, x of tau_k
steps ago, and w'_k what it has trained from it. The client then begins again from x_{t+1}; the others go on with what
they have. Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", 2022 (arXiv:2106.06639),
algorithm 1, with the staleness of their experiments.

In a simulation who arrives when follows from the seconds that the plan predicts for each client's round: a virtual
clock, by which a run can be resumed and computed again. With `--buffer` K updates make a step (`arrivals`); with
`--round-percentile` all steps take equally long, and whoever is late is in the step in which it arrives (`in_time`).
The server ends with a step in which it waits for all, so that everyone has the last model.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from atlas_fl.methods.knobs import Tried
from atlas_fl.methods.method import Aggregated, RoundStart, StepInputs, Wait
from atlas_fl.methods.server_optimizers import ByCohort, Cohort, Values
from atlas_fl.params import ServerState, params_by_client
from atlas_fl.ranges import Range

MODEL, BEGUN = "model", "begun"
"""Entries of the server state: x by cohort and tensor, and by client the step after which it began (`step`)."""


def arrivals(seconds: Mapping[str, float], *, buffer: int, steps: int) -> tuple[tuple[str, ...], float]:
    """(clients whose updates make the last of so many steps, seconds on the clock since the step before).

    All begin at 0; of two at once the first by name comes first.

    >>> arrivals({"fast": 1.0, "slow": 3.5}, buffer=1, steps=4)
    (('slow',), 0.5)
    """
    running = [(duration, name) for name, duration in seconds.items()]
    heapq.heapify(running)
    now = before = 0.0
    there: list[str] = []
    for _ in range(steps):
        before, there = now, []
        for _ in range(min(buffer, len(seconds))):
            now, name = heapq.heappop(running)
            there.append(name)
        for name in there:
            heapq.heappush(running, (now + seconds[name], name))
    return tuple(name for name in seconds if name in there), now - before


def in_time(seconds: Mapping[str, float], *, percentile: float, step: int) -> tuple[tuple[str, ...], float]:
    """(clients whose updates make this step, the seconds that every step takes: a percentile of the clients' seconds).

    A client waits for the end of the step in which it arrives. One of 2.5 steps is in every third, 2 steps late.

    >>> [in_time({"fast": 1.0, "slow": 2.5}, percentile=50, step=step) for step in (2, 3)]
    [(('fast',), 1.0), (('fast', 'slow'), 1.0)]
    """
    length = float(np.percentile([*seconds.values()], percentile, method="inverted_cdf"))
    return tuple(name for name, own in seconds.items() if step % math.ceil(own / length) == 0), length


class FedAvgByArrival(ByCohort):
    """Steps of the server by updates that arrive at their own time: `--buffer` of them, or all until a time is over."""

    buffer: Annotated[int, Range(least=1)] = 3
    """Updates of a step of the server; 10 in the paper, which has thousands of clients."""
    round_percentile: Annotated[float, Range(least=0, most=100)] = 0.0
    """Share of the clients, in percent, whose predicted seconds a step lasts, in the place of --buffer; 0: --buffer."""
    buffer_lr: Annotated[float, Range(above=0), Tried("fedbuff", values=(1.0, 0.5, 2.0))] = 1.0
    """Learning rate eta of the server."""

    name = "fedavg_by_arrival"
    equal_ranks = True
    in_factors = True
    takes_newcomers = False
    fixed: ClassVar = {"space": "factors", "within": "all"}

    def schedule(
        self, drawn: Sequence[str], *, round: int, rounds: int, seconds: Mapping[str, float]
    ) -> tuple[tuple[str, ...], float]:
        """The clients whose updates arrive in this round, and the seconds that it takes; all in the last."""
        running = {name: seconds[name] for name in drawn}
        if round >= rounds:
            return super().schedule(drawn, round=round, rounds=rounds, seconds=seconds)
        if self.round_percentile:
            return in_time(running, percentile=self.round_percentile, step=round)
        return arrivals(running, buffer=self.buffer, steps=round)

    def wait(self, *, round: int, rounds: int, seconds: Mapping[str, float]) -> Wait | None:
        """The updates that fill the buffer, or the seconds of a step on a real clock; all in the last."""
        if round >= rounds:
            return None if round > rounds else Wait(updates=len(seconds))
        if self.round_percentile:
            return Wait(updates=1, seconds=in_time(seconds, percentile=self.round_percentile, step=round)[1])
        return Wait(updates=self.buffer)

    def began(self, round: RoundStart, client: str) -> int:
        """The round after the step from whose model the client has trained."""
        late = 0.0 if round.is_personal else self.staleness(round.server_state, client, round.round)
        return round.round - int(late)

    def staleness(self, state: ServerState, client: str, round: int) -> float:
        """The steps of the server since this client began."""
        entry = params_by_client(state, BEGUN).get(client)
        return max(0.0, round - 1 - (float(entry["step"]) if entry else 0.0))

    def aggregate(self, inputs: StepInputs) -> Aggregated:
        """A step of every cohort from x, whose members that took part begin again from what it makes."""
        known = params_by_client(inputs.server_state, MODEL)
        newest: dict[str, dict[str, Tensor]] = {cohort: dict(tensors) for cohort, tensors in known.items()}
        late = [self.staleness(inputs.server_state, client, inputs.round) for client in inputs.federation.clients]

        def next_value(cohort: Cohort, name: str, values: Values) -> Tensor:
            scaled = {k: self.buffer_lr * weight * (1 + late[k]) ** -0.5 for k, weight in cohort.weights.items()}
            x = newest.get(cohort.name, {}).get(name)
            begin = values.sent(cohort.weights) if x is None else x.to(torch.float64)
            model = begin + values.trained(scaled) - values.sent(scaled)
            newest.setdefault(cohort.name, {})[name] = model.float().contiguous().cpu()
            return model

        done = self.step(next_value, inputs)
        begun = {client: {"step": torch.tensor(float(inputs.round))} for client in inputs.updates}
        models = {**inputs.client_models, **{client: done.client_models[client] for client in begun}}
        state: ServerState = {MODEL: newest, BEGUN: {**params_by_client(inputs.server_state, BEGUN), **begun}}
        return replace(done, server_state=state, client_models=models)
