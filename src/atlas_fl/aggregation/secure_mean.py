"""Means through secure sums (`--secure`): the groups of clients that a rule averages, and the mean of each.

    mean = sum_k q_k w_k / sum_k q_k      q_k = p_k / max_l p_l, over the clients k of a group that are in the sum

A rule whose rows are averages needs nothing of single clients: with the mean of its group in the place of every update
its step is what it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from atlas_fl.aggregation.matrices import Federation, bounded_weights
from atlas_fl.aggregation.mixing import groups_of
from atlas_fl.aggregation.rules import Matrices
from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.params import HEAD, ByClient, Params, shared_params
from atlas_fl.secure_sums import LEAST, Terms, sum_in_process


@dataclass(frozen=True, kw_only=True)
class SumGroup:
    """Clients whose tensors of these names are summed."""

    clients: tuple[str, ...]
    weights: tuple[float, ...]
    """q of each, 1 of the largest."""
    keys: tuple[str, ...]
    what: str
    """`the adapters` or `the head of TASK`."""

    def terms(self, *, about: str, bound: float) -> Terms:
        """The terms of the sum in one round of a run."""
        return Terms(clients=self.clients, about=f"{about}, {self.what}: {' '.join(self.keys)}", bound=bound)

    def vector(self, client: str, params: Params) -> np.ndarray:
        """q_k w_k, (d,) float64."""
        flat = torch.cat([params[key].reshape(-1).double() for key in self.keys])
        return np.asarray(flat.cpu().numpy() * self.weights[self.clients.index(client)])

    def read_mean(self, total: np.ndarray, survivors: Sequence[str], like: Params) -> dict[str, Tensor]:
        """The mean of those who are in this sum, as tensors."""
        share = sum(self.weights[self.clients.index(name)] for name in survivors)
        parts = torch.split(torch.from_numpy(total / share), [like[key].numel() for key in self.keys])
        return {key: part.to(like[key]).view_as(like[key]) for key, part in zip(self.keys, parts, strict=True)}


def sum_groups(
    matrices: Matrices, federation: Federation, models: ByClient, share: Sequence[str]
) -> tuple[SumGroup, ...]:
    """The groups that these matrices average, those of a round in which all clients take part.

    Raises ConfigError where a client would be summed with fewer than two others.
    """
    clients, found = federation.clients, dict[tuple[tuple[int, ...], bytes, str], list[str]]()
    for key in sorted({key for params in models.values() for key in shared_params(params, share)}):
        holders = {k for k, client in enumerate(clients) if key in models[client]}
        for group in groups_of(matrices(key)):
            if group.sources[0] in holders:
                assert len(group.rows) == 1 and {*group.targets[0]} == {*group.sources}, "such a rule is no average"
                task = federation.head_groups[group.sources[0]]
                what = f"the head of {task}" if key.startswith(HEAD) else "the adapters"
                found.setdefault((group.sources, group.rows[0].tobytes(), what), []).append(key)
                holders -= {*group.sources}
        for k in sorted(holders):
            found.setdefault(((k,), b"", f"{key} of {clients[k]}"), []).append(key)
    groups = []
    for (sources, row, what), keys in found.items():
        names = tuple(clients[k] for k in sources)
        if len(names) < LEAST:
            raise ConfigError(
                f"--secure shows sums of at least {LEAST} clients, and {what} would be of {' and '.join(names)};"
                f" bring more of them (--clients-per-task {LEAST}, --min-cluster-size {LEAST}), or leave heads at the"
                " clients (--share A B)"
            )
        weights = np.frombuffer(row)
        groups.append(
            SumGroup(clients=names, weights=tuple((weights / weights.max()).tolist()), keys=tuple(keys), what=what)
        )
    return tuple(groups)


def weights_by_examples(group: SumGroup, examples: Mapping[str, int], *, max_share: float) -> SumGroup:
    """The group with q of the clients that have said how many examples they have, and 0 of the others."""
    counts = np.array([examples.get(client, 0) for client in group.clients], np.float64)
    here = counts > 0
    counts[here] = bounded_weights(counts[here], max_share)
    return replace(group, weights=tuple((counts / counts.max()).tolist()))


@dataclass(frozen=True, kw_only=True)
class SecureMeans:
    """Updates of one round as the server may know them."""

    updates: dict[str, Params]
    """The updates with the mean of its group in the place of what a client sends."""
    lost: tuple[str, ...]
    """Sums that were lost, and why; the tensors of these are those of before."""
    sent_bytes: Mapping[str, tuple[int, int]]
    """By client the bytes up and down beside what is summed."""


def secure_means(
    groups: Sequence[SumGroup], before: ByClient, updates: ByClient, *, about: str, bound: float
) -> SecureMeans:
    """The means of these groups, by the protocol in this process; who has no update leaves before it is masked."""
    means = {client: dict(params) for client, params in updates.items()}
    lost, sizes = [], dict.fromkeys(before, (0, 0))
    for group in groups:
        here = [client for client in group.clients if client in updates]
        vectors = {client: group.vector(client, updates[client]) for client in here}
        gone = {client: "mask" for client in group.clients if client not in updates}
        try:
            done = sum_in_process(group.terms(about=about, bound=bound), vectors, gone=gone)
        except ProtocolError as error:
            lost.append(f"the sum of {group.what} is lost: {error}")
            for client in here:
                means[client] |= {key: before[client][key] for key in group.keys}
            continue
        for client, (up, down) in done.sent_bytes.items():
            sizes[client] = (sizes[client][0] + up, sizes[client][1] + down)
        mean = group.read_mean(done.total, done.survivors, updates[here[0]])
        for client in here:
            means[client] |= mean
    return SecureMeans(updates={**means}, lost=tuple(lost), sent_bytes=sizes)


def check_range(params: Params, share: Sequence[str], *, bound: float) -> None:
    """Raise ProtocolError where a value that would be summed is beyond the range."""
    for key, tensor in shared_params(params, share).items():
        if tensor.numel() and (largest := float(tensor.abs().max())) > bound:
            raise ProtocolError(f"{key} has a value of {largest:.4g}, beyond --secure-range {bound:g}; raise it")


def secure_notes(groups: Sequence[SumGroup], *, bound: float) -> tuple[str, ...]:
    """One line on what the server sees of the clients' models."""
    sums = ", ".join(f"{group.what} over {len(group.clients)} clients" for group in groups)
    errors = [bound * len(one.clients) / one.terms(about="", bound=bound).levels / sum(one.weights) for one in groups]
    return (
        f"secure sums: of models the server sees the mean of {sums}, right to {max(errors):.1g}, and nothing of a"
        " single client, whose update it cannot bound (--norm-bound); of each it sees examples, losses and scores",
    )
