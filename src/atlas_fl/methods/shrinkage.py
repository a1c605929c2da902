"""Shrinkage by sums: each client keeps a measured part of how far its adapters lie from the mean of all.

    w_k <- mean + b_k (w_k - mean)          b_k = tau^2 / (tau^2 + N_k)

the empirical best linear prediction of theta_k from w_k = theta_k + e_k, where the theta_k vary by tau^2 around a
common mean and the noise e_k has the variance N_k (Fay and Herriot, JASA 74, 1979). The server needs means over clients
alone, so that they may be secure sums: those of the models, and once those of three numbers,

    H_k = (|| h_k^1 - w_0 ||^2 + || h_k^2 - w_0 ||^2) / 2     h two models, each of one half of the examples
    S_k = < h_k^1 - w_0, h_k^2 - w_0 >                          w_0 the mean with which all clients begin that round
    L_k = || w_k - w_0 ||^2

With W = || mean - w_0 ||^2 after that round, p_k the shares of the examples, P = sum p_k^2, and H, S and L means by p,

    C = (W - P L) / (1 - P)             the mean inner product of what two clients have learned
    tau^2 = max(0, L S / H - C)         S / H the correlation of two models of one client
    N = L - C - tau^2,    N_k = N mean(n) / n_k

For example H = .5, S = .3, L = .5, W = .3 and two clients with as many examples: C = (.3 - .25) / .5 = .1, tau^2 = .3 -
.1, N = .2 and b = 1/2. Squares are means over the values of the adapters. A model of all examples is as reliable as one
of a half at least, so tau^2 is rather too small, and clients share rather too much. They mix by themselves and stay
with their models; heads are averaged inside their task. Until the numbers are known everyone goes on with the mean.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from atlas_fl.aggregation.matrices import Federation
from atlas_fl.aggregation.secure_mean import SumGroup
from atlas_fl.methods.averages import Averaging
from atlas_fl.methods.fedalt import PersonalAdapters, shares_in_mean
from atlas_fl.methods.kriging import MeasuredOnce
from atlas_fl.methods.method import Aggregated, Report, ReportTensor, StepInputs
from atlas_fl.params import HEAD, PRIVATE, REPORT, SHARE, ByClient, Params, ServerState

NUMBERS = ("half_length", "agreement", "length")
"""H_k, S_k and L_k by their names in a report."""
MEANS = "means"
"""The entry of the server state: the means of these numbers, and P as `squares`."""
LARGEST = 1e6
"""Largest mean square that a report may hold."""


def kept_parts(means: Mapping[str, float], moved: float, *, examples: Mapping[str, float]) -> dict[str, float]:
    """b_k of every client with these training examples, from H, S, L and P (`squares`), and from W.

    Where nothing has moved, or one client is all, b is 0.
    """
    squares, length = means["squares"], means["length"]
    if means["half_length"] <= 0 or squares >= 1:
        return dict.fromkeys(examples, 0.0)
    common = (moved - squares * length) / (1 - squares)
    variance = length * means["agreement"] / means["half_length"] - common
    noise, mean = max(0.0, length - common - variance), sum(examples.values()) / len(examples)
    return {
        client: variance / (variance + noise * mean / count) if variance > 0 else 0.0
        for client, count in examples.items()
    }


def mean_product(one: Params, other: Params) -> float:
    """The mean product of these tensors' values."""
    return sum(float((one[key] * other[key]).sum()) for key in one) / sum(tensor.numel() for tensor in one.values())


def change(before: Params, after: Params) -> dict[str, torch.Tensor]:
    """The change of the adapters, float64."""
    keys = [key for key in before if not key.startswith(HEAD) and key != PRIVATE]
    return {key: after[key].cpu().double() - before[key].cpu().double() for key in keys}


class FedAvgWithVariances(MeasuredOnce, Averaging):
    """The weighted mean of all, and the part of its own deviation that every client keeps; heads inside their task."""

    name = "fedavg_with_variances"
    not_a_sum = ""
    in_factors = True
    extra_passes = "in one round each half of the examples, trained apart"
    report = "variances"
    report_words = "once, three numbers on how far it has learned"

    def reports_in(self, round: int) -> bool:
        """In the one round that measures."""
        return round == self.first_measured_round

    @classmethod
    def measure(cls, report: Report) -> Mapping[str, Params]:
        """H_k and S_k of halves that begin with the mean of all; L_k follows from the training (`measure_trained`)."""
        first, second = (report.train_half(half) for half in (0, 1))
        measured = {}
        for client in report.clients:
            start = report.model(client)
            one, other = change(start, first[client]), change(start, second[client])
            lengths = (mean_product(one, one) + mean_product(other, other)) / 2
            numbers = (lengths, mean_product(one, other), 0.0)
            measured[client] = {name: torch.tensor(value) for name, value in zip(NUMBERS, numbers, strict=True)}
        return measured

    @classmethod
    def measure_trained(cls, measured: Params, before: Params, after: Params) -> Params:
        """The numbers with L_k."""
        moved = change(before, after)
        return {**measured, "length": torch.tensor(mean_product(moved, moved))}

    @classmethod
    def report_tensors(cls, model: Params, *, classes: int) -> Mapping[str, ReportTensor]:
        """The three numbers, of which S_k alone may be below 0."""
        del model, classes
        return {
            name: ReportTensor(shape=(), least=-LARGEST if name == "agreement" else 0.0, most=LARGEST)
            for name in NUMBERS
        }

    def sum_groups(self, federation: Federation, models: ByClient, *, round: int) -> tuple[SumGroup, ...]:
        """The groups of the models; the three numbers are summed with the adapters."""
        groups = super().sum_groups(federation, models, round=round)
        if not self.reports_in(round):
            return groups
        numbers = tuple(f"{REPORT}{self.report}/{name}" for name in NUMBERS)
        return tuple(
            replace(group, keys=(*group.keys, *numbers))
            if any(not key.startswith(HEAD) for key in group.keys)
            else group
            for group in groups
        )

    def complete(self, done: Aggregated, inputs: StepInputs) -> Aggregated:
        """The step with b_k of every client, once the numbers are known."""
        reports, federation = inputs.answers.reports.get(self.report, {}), inputs.federation
        shares = {
            client: share for client, share in shares_in_mean(done, inputs).items() if client in reports and share
        }
        if not shares:
            return done
        total, some = sum(shares.values()), next(iter(shares))
        means = {
            name: sum(share * float(reports[client][name]) for client, share in shares.items()) / total
            for name in NUMBERS
        }
        means["squares"] = sum(share**2 for share in shares.values()) / total**2
        moved = change(inputs.client_models[some], done.client_models[some])
        examples = dict(zip(federation.clients, federation.weights.tolist(), strict=True))
        kept = kept_parts(means, mean_product(moved, moved), examples=examples)
        state: ServerState = {
            MEANS: {name: torch.tensor(value, dtype=torch.float64) for name, value in means.items()},
            SHARE: {client: {SHARE: torch.tensor(part)} for client, part in kept.items()},
        }
        return replace(done, server_state=state)


class ShrunkModels(PersonalAdapters):
    """`--second-model shrunk`: a client goes on with the mean and a part of its own deviation, and predicts so."""

    kind = "shrunk"
    begins_there = True

    def companion(self, own: Params, shared: Params) -> Params:
        """The own model moved to the mean: mean + b (own - mean), with the mean's head."""
        part = float(shared.get(SHARE, 0.0))
        mean = {key: tensor for key, tensor in shared.items() if key != SHARE}
        return {
            key: one if key.startswith(HEAD) else (one.double() + part * (own[key].double() - one.double())).to(one)
            for key, one in mean.items()
        }

    def combine(self, own: Params, shared: Params, gate: Params) -> Params:
        """The moved model."""
        del gate
        return shared or own
