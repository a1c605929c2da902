"""Server optimizers FedAvgM, FedAdagrad, FedYogi, FedAdam: the average change of the clients is the gradient of a step.

    Delta_t = sum_k p_k (w'_k - w_k)                     w_k as sent, w'_k as trained; -Delta_t is the pseudo-gradient
    m_t = beta_1 m_{t-1} + (1 - beta_1) Delta_t          FedAvgM: m_t = beta_1 m_{t-1} + Delta_t
    v_t = v_{t-1} + Delta_t^2                                          FedAdagrad
    v_t = v_{t-1} - (1 - beta_2) Delta_t^2 sign(v_{t-1} - Delta_t^2)   FedYogi
    v_t = beta_2 v_{t-1} + (1 - beta_2) Delta_t^2                      FedAdam
    x_{t+1} = x_t + eta m_t / (sqrt(v_t) + tau)          x_t = sum_k p_k w_k; FedAvgM: x_t + eta m_t

with m_{-1} = 0 and v_{-1} = tau^2, element by element, and no correction of the moments' bias. The sums are over the
clients of a cohort that took part, p_k their shares of the examples. FedAdagrad, FedYogi, FedAdam: Reddi et al.,
"Adaptive Federated Optimization", 2021, algorithm 2. FedAvgM: Hsu, Qi and Brown, 2019.

A cohort has one model: all clients or a cluster, for heads its clients of one task. In product space x, m and v are
those of the dense updates s B A, and each client gets the best approximation of its rank of x_{t+1}; in factor space
they are those of A and B, which then need equal ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from atlas_fl.aggregation import lora_product, rules
from atlas_fl.aggregation.matrices import Federation, Rows, average, cluster_labels
from atlas_fl.errors import ProtocolError
from atlas_fl.frozen import Frozen
from atlas_fl.methods.knobs import Tried
from atlas_fl.methods.method import Aggregated, Method, StepInputs
from atlas_fl.params import HEAD, LORA_A, LORA_B, ByClient, Params, lora_modules, params_by_client, shared_params
from atlas_fl.ranges import Range

SECOND_MOMENTS: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "fedadagrad": lambda v, square, _: v + square,
    "fedyogi": lambda v, square, beta2: v - (1 - beta2) * square * (v - square).sign(),
    "fedadam": lambda v, square, beta2: beta2 * v + (1 - beta2) * square,
}
"""v_t from v_{t-1}, Delta_t^2 and beta_2 by method; a method without one does not damp its momentum either."""
MOMENTS = ("first", "second")
"""Entries of the server state: m and v by cohort and name."""


class Cohort(Frozen):
    """Clients that have one model, or one head."""

    name: str
    """Its name in the server state: `all`, `cluster-2`, `task-movie` or `cluster-2-task-movie`."""
    is_head: bool
    """True if it is the head that they have in common."""
    members: tuple[int, ...]
    """Their indices."""
    weights: Mapping[int, float]
    """p_k of those that took part, by index."""


def cohorts(federation: Federation, present: Sequence[bool], options: rules.StrategyOptions) -> Iterator[Cohort]:
    """Every cohort of two or more clients of which somebody took part; a client by itself has no server step."""
    by_cluster = cluster_labels(federation.clusters)
    body = ["-".join(map(str, label)) if options.within == rules.CLUSTERS else "all" for label in by_cluster]
    prefix = [f"{name}-" if options.within == rules.CLUSTERS else "" for name in body]
    heads = [f"{start}task-{task}" for start, task in zip(prefix, federation.head_groups)]
    for is_head, names in ((False, body), (True, heads)):
        groups = np.array([names.index(name) for name in names], np.int64)
        rows = average(federation.weights, groups, np.asarray(present, bool), max_share=options.max_share)
        for name in dict.fromkeys(names):
            members = tuple(k for k, other in enumerate(names) if other == name)
            shares = rows[members[0]]
            weights = {k: float(shares[k]) for k in members if present[k]}
            if len(members) > 1 and weights:
                yield Cohort(name=name, is_head=is_head, members=members, weights=weights)


def body_cohort(inputs: StepInputs, options: rules.StrategyOptions) -> Cohort | None:
    """The first cohort of what is no head; None where a client is alone, or nobody took part."""
    return next((one for one in cohorts(inputs.federation, inputs.present, options) if not one.is_head), None)


def cohort_keys(params: Params, cohort: Cohort, options: rules.StrategyOptions) -> list[str]:
    """The shared tensors of a member's model that the cohort has in common."""
    shared = shared_params(params, options.share)
    return [key for key, tensor in shared.items() if key.startswith(HEAD) == cohort.is_head and tensor.numel()]


class Values(Frozen):
    """Weighted sums of one value over clients, by their indices: a tensor, or a module's dense update; float64."""

    sent: Callable[[Mapping[int, float]], Tensor]
    """Sum over the models that the clients were sent."""
    trained: Callable[[Mapping[int, float]], Tensor]
    """Sum over the models that they have trained."""


NextValue: TypeAlias = Callable[[Cohort, str, Values], Tensor]
"""The next value of a cohort, float64, from the name of the tensor or module and its values."""


class CohortStep:
    """One step of the server over cohorts, value by value; what it makes is collected, its inputs stay as they are."""

    def __init__(
        self, next_value: NextValue, options: rules.StrategyOptions, before: ByClient, after: ByClient
    ) -> None:
        self._next, self._options, self._clients = next_value, options, tuple(after)
        self._before, self._after = tuple(before.values()), tuple(after.values())
        self.models: dict[int, dict[str, Tensor]] = {}
        self.thrown, self.total = dict.fromkeys(after, 0.0), dict.fromkeys(after, 0.0)

    def run(self, cohort: Cohort) -> None:
        """The step of one cohort."""
        keys = cohort_keys(self._after[cohort.members[0]], cohort, self._options)
        modules = lora_modules(dict.fromkeys(keys, torch.empty(0))) if self._options.space == "product" else []
        pairs = {module + end for module in modules for end in (LORA_A, LORA_B)}
        for key in keys:
            if key not in pairs:
                self._step_tensor(cohort, key)
        for module in modules:
            self._step_module(cohort, module)

    def _step_tensor(self, cohort: Cohort, key: str) -> None:
        like = self._after[cohort.members[0]][key]
        if differing := [k for k in cohort.members if self._after[k][key].shape != like.shape]:
            raise ProtocolError(
                f"{key} of {self._clients[differing[0]]} and {self._clients[cohort.members[0]]} has several shapes;"
                " clients with one model need equal ones: name their tasks apart or do not share the head"
            )
        total = partial(_weighted_sum, key)
        values = Values(sent=partial(total, self._before), trained=partial(total, self._after))
        model = self._next(cohort, key, values).to(like.dtype)
        for k in cohort.members:
            self._model(k)[key] = model

    def _step_module(self, cohort: Cohort, module: str) -> None:
        total = partial(self._dense, module)
        values = Values(sent=partial(total, self._before), trained=partial(total, self._after))
        model = self._next(cohort, module, values)
        a, b = ({k: self._after[k][module + end] for k in cohort.members} for end in (LORA_A, LORA_B))
        best = lora_product.leading_dense(model, rank=max(len(rows) for rows in a.values()))
        for k, new_a, new_b, lost, whole in lora_product.fit_clients(
            best, cohort.members, a, b, scale=self._options.scale
        ):
            self._model(k).update({module + LORA_A: new_a, module + LORA_B: new_b})
            self.thrown[self._clients[k]] += lost
            self.total[self._clients[k]] += whole

    def _model(self, k: int) -> dict[str, Tensor]:
        return self.models.setdefault(k, dict(self._after[k]))

    def _dense(self, module: str, models: Sequence[Params], weights: Mapping[int, float]) -> Tensor:
        """sum_k p_k s_k B_k A_k, (d_out, d_in) float64."""
        a, b = ([models[k][module + end] for k in weights] for end in (LORA_A, LORA_B))
        scales = [weight * self._options.scale(len(rows)) for weight, rows in zip(weights.values(), a)]
        stack_a, stack_b = lora_product.stack_factors(a, b, scales)
        return stack_b @ stack_a


def _weighted_sum(key: str, models: Sequence[Params], weights: Mapping[int, float]) -> Tensor:
    """sum_k p_k w_k in float64.

    Summed client by client even where clients share a tensor: which ones do is not the same after a resume.
    """
    first, *others = weights.items()
    total = first[1] * models[first[0]][key].double()
    for k, weight in others:
        total += weight * models[k][key].double()
    return total


class ByCohort(Method):
    """A step of the server for each cohort, value by value."""

    needs = "equal ranks with --space factors"

    reads_within = True

    def check(self, models: ByClient, federation: Federation) -> None:
        """Raise ConfigError where clients of one cohort cannot have one A and B, because their ranks differ."""
        everyone = [True] * len(federation.clients)
        for cohort in cohorts(federation, everyone, self.options) if self.options.space == "factors" else ():
            self._check_one_shape(models, [federation.clients[k] for k in cohort.members])

    def rule(self, step: rules.MixingContext) -> np.ndarray | Rows:
        """The shares of the examples inside each cohort."""
        return rules.weighted_average(self.options, step, within=self.options.within)

    def next_values(self, _inputs: StepInputs) -> NextValue:
        """The step of a value in this round; by default to the average of what was trained."""
        return lambda cohort, _name, values: values.trained(cohort.weights)

    def aggregate(self, inputs: StepInputs) -> Aggregated:
        """One step of every cohort of which somebody took part."""
        return self.step(self.next_values(inputs), inputs)

    def step(self, next_value: NextValue, inputs: StepInputs) -> Aggregated:
        """The models after one step of every cohort of which somebody took part."""
        clients, everyone = inputs.federation.clients, inputs.after
        before = {client: inputs.client_models[client] for client in clients}
        after = {client: everyone[client] for client in clients}
        step = CohortStep(next_value, self.options, before, after)
        for cohort in cohorts(inputs.federation, inputs.present, self.options):
            step.run(cohort)
        models = {client: step.models.get(k, after[client]) for k, client in enumerate(after)}
        discarded = lora_product.energy_share(step.thrown, step.total)
        return Aggregated(server_state={}, client_models=models, discarded=discarded)


class ServerStep(ByCohort):
    """The average change of each cohort is the gradient of a step of the server."""

    server_lr: Annotated[
        float | None,
        Range(above=0),
        Tried("fedadam", "fedyogi", "fedadagrad", values=(0.01, 0.003, 0.03, 0.1)),
        Tried("fedavgm", values=(1.0, 0.5, 0.25, 2.0)),
    ] = None
    """Learning rate of the server; by default 1 for `fedavgm` and 0.01 for `fedadagrad`, `fedyogi` and `fedadam`."""
    server_beta1: Annotated[float | None, Range(least=0, below=1)] = None
    """Share of the server's first moment that stays, its momentum; by default 0.9, and 0 for `fedadagrad`."""
    server_beta2: Annotated[float, Range(least=0, below=1)] = 0.99
    """Share of the server's second moment that stays, for `fedadam` and `fedyogi`."""
    server_tau: Annotated[float, Range(above=0)] = 1e-3
    """Constant added to the root of the second moment: the larger, the less adaptive the server's step."""

    differs = "whole models"
    not_a_sum = ""
    usual_lr: ClassVar[float] = 0.01
    """Learning rate where the settings give none."""
    usual_beta1: ClassVar[float] = 0.9

    def aggregate(self, inputs: StepInputs) -> Aggregated:
        """One step of every cohort of which somebody took part; the moments go on with every value that it steps."""
        moments: dict[str, dict[str, dict[str, Tensor]]] = {
            kind: {cohort: dict(known) for cohort, known in params_by_client(inputs.server_state, kind).items()}
            for kind in MOMENTS
        }

        def next_value(cohort: Cohort, name: str, values: Values) -> Tensor:
            own = {kind: by_cohort.get(cohort.name, {}) for kind, by_cohort in moments.items()}
            known = {kind: tensors[name] for kind, tensors in own.items() if name in tensors}
            current = values.sent(cohort.weights)
            model, new = self.move(current, values.trained(cohort.weights) - current, known)
            for kind, tensor in new.items():
                moments[kind].setdefault(cohort.name, {})[name] = tensor.contiguous().cpu()
            return model

        done = self.step(next_value, inputs)
        return replace(done, server_state={kind: by_cohort for kind, by_cohort in moments.items() if by_cohort})

    def move(self, current: Tensor, change: Tensor, known: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """(x_{t+1} in float64, m_t and v_t) from x_t, Delta_t and the moments before; none before the first step."""
        lr = self.usual_lr if self.server_lr is None else self.server_lr
        beta1 = self.usual_beta1 if self.server_beta1 is None else self.server_beta1
        second_moment = SECOND_MOMENTS.get(self.name)
        first = beta1 * known["first"].to(change) if known else torch.zeros_like(change)
        first = first + (change if second_moment is None else (1 - beta1) * change)
        if second_moment is None:
            return current + lr * first, {"first": first.float()}
        second = known["second"].to(change) if known else torch.full_like(change, self.server_tau**2)
        second = second_moment(second, change.square(), self.server_beta2)
        step = lr * first / (second.sqrt() + self.server_tau)
        return current + step, {"first": first.float(), "second": second.float()}


class FedAvgM(ServerStep):
    """Server momentum on the average change (`--server-lr`, `--server-beta1`)."""

    name = "fedavgm"
    usual_lr = 1.0


class FedAdagrad(ServerStep):
    """Adagrad of the server on the average change (`--server-lr`, `--server-tau`)."""

    name = "fedadagrad"
    usual_beta1 = 0.0


class FedYogi(ServerStep):
    """Yogi of the server on the average change (`--server-lr`, `--server-beta1`, `--server-beta2`, `--server-tau`)."""

    name = "fedyogi"


class FedAdam(ServerStep):
    """Adam of the server on the average change (`--server-lr`, `--server-beta1`, `--server-beta2`, `--server-tau`)."""

    name = "fedadam"
