"""Means through sums (`--secure`, `--dp client`): the groups of clients that a rule averages, and the mean of each.

    mean = sum_k q_k w_k / sum_k q_k      q_k = p_k / max_l p_l, over the clients k of a group that are in the sum

A rule whose rows are averages needs nothing of single clients: with the mean of its group in the place of every update
its step is what it was.

With both settings clients add the noise themselves, in units h of the secure sum, by the Skellam mechanism (Agarwal,
Kairouz and Liu 2021, arXiv:2110.04995):

    y_k = round((w + c) / h) + trunc(u_k / h) + P - P',   P, P' ~ Poisson(v / 2),   v = (z S / h)^2 / (t - 1)

w is what the server gave out, u_k the change of norm S at most. Cutting toward zero makes no norm larger. Any t - 1
clients' noise has variance (z S)^2, and the sum is of t at least: who knows its own share sees no less than that.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import isfinite, sqrt
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float64

from atlas_fl.aggregation.matrices import Federation, bounded_weights
from atlas_fl.aggregation.mixing import groups_of
from atlas_fl.aggregation.rules import Matrices
from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.frozen import Frozen
from atlas_fl.params import HEAD, REPORT, ByClient, Params, select, shared_params
from atlas_fl.rng import generator, secret_skellam
from atlas_fl.secure_sums import LEAST, SLACK, Noise, SumResult, Terms, Vector, sum_in_process

TAIL = 12
"""Deviations of the noise of a sum that have room; beyond them is one number in 10^29 (Bernstein's inequality)."""
FINEST = 2000
"""Least variance of a client's noise, in units."""


class SumGroup(Frozen):
    """Clients whose tensors of these names are summed."""

    clients: tuple[str, ...]
    keys: tuple[str, ...]
    what: str
    """`the adapters`, `the head of TASK`, or both where the same clients share them."""


class SumSettings(Frozen):
    """Settings of all sums of a run, at the server as at its sites."""

    run: str
    """Hash of the settings."""
    bound: float
    max_share: float
    deviation: float = 0.0
    """Standard deviation of the noise in a sum; of t - 1 clients' where they add it."""
    clip: float = 0.0
    """S, the largest norm of a client's change, where clients add the noise; 0 where they add none."""
    share: tuple[str, ...] = ("A", "B", "head")
    """Parts of a model of which there are sums."""

    def terms(self, group: SumGroup, *, round: int = 0) -> Terms:
        """The terms of the sum of this group in one round."""
        about = f"{self.run}, round {round}, {group.what}: {' '.join(group.keys)}"
        return Terms(clients=group.clients, about=about, bound=self.bound, slack=SLACK if self.clip else 0)

    def weights(self, examples: Mapping[str, int]) -> dict[str, float]:
        """q of those who have said how many examples they have, 1 of the largest, and of all where they add noise."""
        if self.clip:
            return dict.fromkeys(examples, 1.0)
        bounded = bounded_weights(np.array([*examples.values()], np.float64), self.max_share)
        return dict(zip(examples, (bounded / bounded.max()).tolist(), strict=True))

    def vector(self, group: SumGroup, client: str, params: Params, change: Params) -> Vector:
        """q_k w_k, (d,) float64, given the examples of all; with `clip` w + u_k in whole units, of this change.

        Raises DataError where some change of S would be beyond the range.
        """
        flat = _flat(params, group)
        if not self.clip:
            return lambda examples: np.asarray(flat * self.weights(examples)[client])
        terms = self.terms(group)
        terms.quantise(np.abs(flat) + self.clip)  # whether it is refused does not follow from the change
        moved = _flat({key: change.get(key, torch.zeros_like(params[key])) for key in group.keys}, group)
        units = np.rint((flat + self.bound) / terms.unit) + np.trunc(moved / terms.unit)
        return lambda _: np.asarray(units * terms.unit - self.bound)

    def noise(self, group: SumGroup, size: int, secret: bytes) -> Noise:
        """A client's share of the noise in units mod 2^32, (d,); raises ConfigError where it is too coarse or fine."""
        terms = self.terms(group)
        variance = (self.deviation / terms.unit) ** 2 / (terms.threshold - 1)
        least = self.bound * TAIL * sqrt(variance * len(group.clients)) / SLACK
        if not (least <= self.bound and variance >= FINEST):
            most = self.bound * sqrt(variance / FINEST)
            raise ConfigError(
                f"--secure-range is {self.bound:g}; allowed with noise of {self.deviation:.3g} in the sum over"
                f" {len(group.clients)} clients: {least * 1.01:.3g} to {most * 0.99:.3g}; set it so, or change the clip"
            )
        return secret_skellam(secret, variance, size).astype(np.uint32)

    def deviation_of(self, group: SumGroup, survivors: float) -> float:
        """Standard deviation of the noise in the sum of so many clients."""
        return self.deviation * (sqrt(survivors / (self.terms(group).threshold - 1)) if self.clip else 1.0)

    def error(self, group: SumGroup, survivors: int, weight: float) -> str:
        """How far a mean of so many clients of this weight together is off."""
        if self.deviation:
            return f"with noise of {self.deviation_of(group, survivors) / weight:.2g}"
        return f"right to {self.bound * survivors / self.terms(group).levels / weight:.1g}"


def _flat(params: Params, group: SumGroup) -> Float64[np.ndarray, " d"]:
    """The numbers of a group's tensors, one after the other."""
    return np.asarray(torch.cat([params[key].reshape(-1).double() for key in group.keys]).cpu().numpy())


def norm_of(change: Params) -> float:
    """The L2 norm of all these numbers."""
    return float(torch.linalg.vector_norm(torch.stack([one.norm() for one in change.values()])))


def clipped_change(before: Params, params: Params, most: float) -> dict[str, torch.Tensor]:
    """The change of these tensors, float64, scaled down to an L2 norm of at most this; zeros where it is not finite."""
    change = {key: tensor.double() - before[key].double() for key, tensor in params.items()}
    norm = norm_of(change)
    factor = min(1.0, most / max(norm, 1e-300))
    return {key: one * factor if isfinite(norm) else torch.zeros_like(one) for key, one in change.items()}


def sum_groups(
    matrices: Matrices, federation: Federation, models: ByClient, share: Sequence[str]
) -> tuple[SumGroup, ...]:
    """The groups that these matrices average, those of a round in which all clients take part.

    Raises ConfigError where a client would be summed with fewer than two others, and for rows that are no averages.
    """
    clients, groups_by_source = federation.clients, dict[tuple[int, ...], dict[str, list[str]]]()
    for key in sorted({key for params in models.values() for key in shared_params(params, share)}):
        holders = {k for k, client in enumerate(clients) if key in models[client]}
        for group in groups_of(matrices(key)):
            if group.sources[0] in holders:
                if len(group.rows) != 1 or {*group.targets[0]} != {*group.sources}:
                    raise ConfigError(
                        f"--secure and --dp client are of averages over groups, and this strategy's rule is none for"
                        f" {key}; have it say so (Method.not_a_sum), or take --strategy fedit"
                    )
                task = federation.head_groups[group.sources[0]]
                what = f"the head of {task}" if key.startswith(HEAD) else "the adapters"
                groups_by_source.setdefault(group.sources, {}).setdefault(what, []).append(key)
                holders -= {*group.sources}
        for k in sorted(holders):
            groups_by_source.setdefault((k,), {}).setdefault(f"{key} of {clients[k]}", []).append(key)
    groups = []
    for sources, parts in groups_by_source.items():
        names, what = tuple(clients[k] for k in sources), " and ".join(parts)
        if len(names) < LEAST:
            raise ConfigError(
                f"--secure and --dp client are of sums over at least {LEAST} clients, and {what} would be of"
                f" {' and '.join(names)}; bring more of them (--clients-per-task {LEAST}, --min-cluster-size {LEAST}),"
                " or leave heads at the clients (--share A B)"
            )
        groups.append(SumGroup(clients=names, keys=tuple(chain(*parts.values())), what=what))
    return tuple(groups)


SumOf: TypeAlias = Callable[[SumSettings, SumGroup, int, int], SumResult]
"""(settings, group, numbers of a vector, round) -> the sum."""


class SecureMeans(Frozen):
    """Updates of one round as the server may know them."""

    updates: dict[str, Params]
    """The updates with the mean of its group in the place of what a client sends."""
    sums: tuple[str, ...]
    """How many clients each sum is of, and its error."""
    lost: tuple[str, ...]
    """Sums that were lost, and why; the tensors of these are those of before."""
    sent_bytes: Mapping[str, tuple[int, int]]
    """By client the bytes up and down beside what is summed."""
    shares: Mapping[str, float]
    """By client its share in the mean of the adapters, 0 of who is not in the sum; without sums that were lost."""
    reports: ByClient
    """By client the means of the numbers that all have reported in these sums, by their names there."""
    clip: float = 0.0
    """The clip of the next round where it follows the norms."""


NO_SUMS = SecureMeans(updates={}, sums=(), lost=(), sent_bytes={}, shares={}, reports={})


def secure_means(
    groups: Sequence[SumGroup], settings: SumSettings, before: ByClient, updates: ByClient, sum_of: SumOf, *, round: int
) -> SecureMeans:
    """The means of these groups; `sum_of` makes the sum of a group, given its terms and size."""
    # a client that goes on with a model of its own has named that, which the server's has no place for
    means = {
        client: {key: params[key] for key in params if key in before[client]} for client, params in updates.items()
    }
    sums, lost, sent = [], [], {client: np.zeros(2, int) for client in before}
    shares: dict[str, float] = {}
    for group in groups:
        here = [client for client in group.clients if client in updates]
        if not here:
            continue
        like = {key: before[here[0]].get(key, torch.zeros(())) for key in group.keys}  # a report has single numbers
        parts = [tensor.numel() for tensor in like.values()]
        try:
            done = sum_of(settings, group, sum(parts), round)
        except ProtocolError as fault:
            lost.append(f"the sum of {group.what} is lost: {fault}")
            for client in here:
                means[client] |= select(before[client], before[client].keys() & group.keys)
            continue
        q = settings.weights(done.examples)
        weight = sum(q[client] for client in done.survivors)
        error = settings.error(group, len(done.survivors), weight)
        if not all(key.startswith(HEAD) for key in group.keys):
            shares |= {client: q[client] / weight if client in done.survivors else 0.0 for client in group.clients}
        sums.append(f"{group.what} of {len(done.survivors)} of {len(group.clients)} clients, {error}")
        split = zip(like.items(), torch.split(torch.from_numpy(done.total / weight), parts), strict=True)
        shared = {key: part.to(tensor).view_as(tensor) for (key, tensor), part in split}
        for client in here:
            means[client] |= shared
            sent[client] += done.sent_bytes.get(client, (0, 0))
    sizes = {client: (int(up), int(down)) for client, (up, down) in sent.items() if up}
    reports = {
        client: {key: one for key, one in mean.items() if key.startswith(REPORT)} for client, mean in means.items()
    }
    return SecureMeans(
        updates={client: select(mean, mean.keys() - reports[client].keys()) for client, mean in means.items()},
        sums=tuple(sums),
        lost=tuple(lost),
        sent_bytes=sizes,
        shares=shares,
        reports={client: report for client, report in reports.items() if report},
    )


def sum_here(
    updates: ByClient,
    examples: Mapping[str, int],
    settings: SumSettings,
    group: SumGroup,
    size: int,
    round: int,
    *,
    changes: ByClient = MappingProxyType({}),
    seed: int = 0,
) -> SumResult:
    """The sum of a simulation, all messages included, of the clients that have updates.

    With `changes` of them it is of the clients that have these, which add shares of noise that follow from the seed.
    """
    here = [client for client in group.clients if client in (changes or updates)]
    vectors = {client: settings.vector(group, client, updates[client], changes.get(client, {})) for client in here}
    secrets = {client: generator(seed, "share of noise", round, group.what, client).bytes(32) for client in here}
    noise = {client: settings.noise(group, size, secret) for client, secret in secrets.items() if client in changes}
    return sum_in_process(settings.terms(group, round=round), vectors, size=size, examples=examples, noise=noise)


def noisy_sum(
    before: ByClient,
    changes: ByClient,
    normals: Callable[[SumGroup, int, int], np.ndarray],
    settings: SumSettings,
    group: SumGroup,
    size: int,
    round: int,
) -> SumResult:
    """The sum of the clients that have changes, each of weight one, with Gaussian noise, at a server that sees all."""
    here = {client: 1 for client in group.clients if client in changes}
    total = settings.deviation * normals(group, round, size)
    for client in here:
        total += _flat(before[client], group) + _flat(changes[client], group)
    return SumResult(total=total, survivors=tuple(here), examples=here, sent_bytes={})


def secure_notes(groups: Sequence[SumGroup]) -> tuple[str, ...]:
    """One line on what the server sees of the clients' models."""
    sums = ", ".join(f"{group.what} over {len(group.clients)} clients" for group in groups)
    return (
        f"secure sums: of models the server sees the mean of {sums}, and nothing of a"
        " single client, whose update it cannot bound (--norm-bound); of each it sees counts of examples, losses and"
        " scores",
    )
