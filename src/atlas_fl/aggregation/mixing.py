"""Apply a mixing matrix to models: `w <- M w`, tensor by tensor, in factor space or in product space.

The rows of a matrix are sorted so that equal work is done once. In factor space A and B are averaged apart. Factors of
different ranks meet by `pad` (zeros up to the longest rank, as HetLoRA) or `truncate` (the leading rows that all of a
connected group have; the rest stays the client's own). The average of factors is not the factors of the average:
product space is exact, this is what most papers do.

A newcomer begins with the very tensors that all others hold equal (`reuse_equal_tensors`). A mean of equal numbers is
that number, but in floating point a weighted sum of them may end in another last bit: whole models would then be in
memory twice, and under a mask both ends of a connection would no longer agree on what is frozen.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float64
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from atlas_fl.aggregation import lora_product
from atlas_fl.aggregation.matrices import Federation, Rows, Square
from atlas_fl.errors import ProtocolError
from atlas_fl.frozen import Frozen
from atlas_fl.params import HEAD, LORA_A, LORA_B, ByClient, Params, is_full_model


def reuse_equal_tensors(newcomers: ByClient, models_by_client: ByClient, federation: Federation) -> dict[str, Params]:
    """The models that these newcomers begin with; `models_by_client` are the others', whose heads count inside a task.

    Adapters are left as they are: nobody needs them to be the very same.
    """
    tasks = dict(zip(federation.clients, federation.head_groups, strict=True))
    models = dict(newcomers)
    for name, params in newcomers.items():
        if is_full_model(params):
            # those of its own task first: who holds all that they hold shares their model as a whole
            peers = [one for client, one in models_by_client.items() if tasks[client] == tasks[name]]
            everyone = [*peers, *(one for client, one in models_by_client.items() if tasks[client] != tasks[name])]
            for key in params:
                tensors = [known_tensors[key] for known_tensors in (peers if key.startswith(HEAD) else everyone)]
                # bit for bit, as far as numbers show
                if tensors and all(one is tensors[0] or torch.equal(one, tensors[0]) for one in tensors):
                    models[name] = {**models[name], key: tensors[0]}
    return models


class Group(Frozen, eq=False):
    """Rows of M with the same support: their sources are stacked once."""

    sources: tuple[int, ...]
    """Clients with a weight in these rows."""
    rows: Float64[np.ndarray, "distinct sources"]
    """The distinct rows, on the sources alone."""
    targets: tuple[tuple[int, ...], ...]
    """For each distinct row the clients that receive it."""

    @cached_property
    def everyone(self) -> tuple[int, ...]:
        """Sources and targets, in order."""
        return tuple(sorted({*self.sources, *(k for targets in self.targets for k in targets)}))


def groups_of(matrix: Square | Rows) -> tuple[Group, ...]:
    """The rows that are not those of the identity, grouped by support; equal rows appear once."""
    rows = matrix if isinstance(matrix, Rows) else Rows(distinct=csr_array(matrix), of=np.arange(len(matrix)))
    ends, sources, weights = rows.distinct.indptr, rows.distinct.indices, rows.distinct.data
    by_support: dict[bytes, dict[bytes, list[int]]] = {}
    for k, index in enumerate(rows.of.tolist()):
        part = slice(ends[index], ends[index + 1])
        if sources[part].tolist() != [k] or weights[part][0] != 1.0:
            equal = by_support.setdefault(sources[part].tobytes(), {})
            equal.setdefault(weights[part].tobytes(), []).append(k)
    return tuple(
        Group(
            sources=tuple(np.frombuffer(support, sources.dtype).tolist()),
            rows=np.array([np.frombuffer(row) for row in equal], order="F"),
            targets=tuple(map(tuple, equal.values())),
        )
        for support, equal in by_support.items()
    )


def components_of(matrix: Square | Rows) -> tuple[int, ...]:
    """A number for each client: equal where models flow between the two, directly or through others."""
    return tuple(connected_components(np.asarray(matrix) != 0, directed=False)[1].tolist())


Moved: TypeAlias = tuple[tuple[int, ...], Tensor]
"""Clients, by position, and the new tensor that they all get."""


def _weights(rows: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(device=like.device, dtype=like.dtype)


def _flat(stack: Tensor) -> Tensor:
    """(clients, values) in at least float32."""
    return stack.flatten(1) if stack.dtype in (torch.float32, torch.float64) else stack.flatten(1).float()


def mix_plain(tensors: Mapping[int, Tensor], group: Group) -> Iterator[Moved]:
    """`sum_l m_kl w_l` for every target of the group, whose tensors have one shape; equal rows give one tensor."""
    first = tensors[group.sources[0]]
    stack = _flat(torch.stack([tensors[k].reshape(-1) for k in group.sources]))
    mixed = (_weights(group.rows, stack) @ stack).to(first.dtype).view(-1, *first.shape)
    # every row owns its memory: a client that stays away must not keep the stack of all alive
    rows = [mixed[0]] if len(mixed) == 1 else [row.clone() for row in mixed]
    return zip(group.targets, rows)


def _scale_rows(group: Group, scales: Mapping[int, float]) -> tuple[np.ndarray, tuple[tuple[int, ...], ...]]:
    """Rows with `m_kl s_l / s_k`, split where targets of one row have different scales."""
    rows, targets = [], []
    for row, clients in zip(group.rows, group.targets):
        for scale in dict.fromkeys(scales[k] for k in clients):
            rows.append(row * np.array([scales[source] for source in group.sources]) / scale)
            targets.append(tuple(k for k in clients if scales[k] == scale))
    return np.array(rows), tuple(targets)


def mix_factor(
    factors: Mapping[int, Tensor], group: Group, *, lead: Mapping[int, int] | None, scales: Mapping[int, float] | None
) -> Iterator[Moved]:
    """The mixed factor of every target, each with its own rank; the rank is the first axis (pass B transposed).

    `lead` gives the number of leading rows that mix (truncate), None pads with zeros to the longest rank. `scales`
    are those of B, None for A: the update is s B A, so s B is what is averaged. Rows that no source supplies are the
    client's own (of A, so that the direction can be trained) or zero (of B, so that the function is the mean's).
    """
    rows, targets = (group.rows, group.targets) if scales is None else _scale_rows(group, scales)
    first = factors[group.sources[0]]
    longest = max(factors[k].shape[0] for k in group.sources)
    stack = torch.zeros(len(group.sources), longest, first.shape[1], dtype=first.dtype, device=first.device)
    for position, k in enumerate(group.sources):
        stack[position, : factors[k].shape[0]] = factors[k]
    flat = _flat(stack)
    mixed = (_weights(rows, flat) @ flat).to(first.dtype).view(-1, longest, first.shape[1])
    for row, clients in zip(mixed, targets):
        for k in clients:
            client_factor = factors[k]
            length = min(longest, client_factor.shape[0]) if lead is None else lead[k]
            new = client_factor.clone() if scales is None or lead is not None else torch.zeros_like(client_factor)
            new[:length] = row[:length]
            yield (k,), new


class Mixed(Frozen):
    """Models after a server step."""

    by_client: dict[str, Params]
    """Every client's new parameters, in the old order of the keys. Who did not move has the same mapping as before,
    what did not move is the same tensor; clients with equal rows and ranks share one tensor, so read-only is meant."""
    discarded: dict[str, float]
    """Share of the squared norm of a client's update that its ranks could not hold; 0 for who did not move."""


def _leads(components: Sequence[int], ranks: Mapping[int, int]) -> dict[int, int]:
    """For each client with a rank the smallest among those that it is connected with."""
    smallest: dict[int, int] = {}
    for k, rank in ranks.items():
        smallest[components[k]] = min(rank, smallest.get(components[k], rank))
    return {k: smallest[components[k]] for k in ranks}


class Mixture(Frozen, eq=False):
    """Everyone's models, by position, and the matrices that they are mixed by."""

    params: tuple[Params, ...]
    clients: tuple[str, ...]
    matrices: Callable[[str], np.ndarray | Rows]
    align: str
    scale: Callable[[int], float]
    _found: dict[int, tuple[np.ndarray | Rows, tuple[Group, ...]]] = field(default_factory=dict)

    def groups(self, key: str) -> tuple[Group, ...]:
        """The groups of a tensor's matrix, which are found once for each distinct matrix."""
        matrix = self.matrices(key)
        if id(matrix) not in self._found:
            self._found[id(matrix)] = (matrix, groups_of(matrix))
        return self._found[id(matrix)][1]

    def holders(self, group: Group, key: str) -> dict[int, Tensor]:
        """The key's tensor of every client in the group; empty if nobody there holds it."""
        tensors = {k: self.params[k][key] for k in group.everyone if key in self.params[k]}
        if tensors and len(tensors) < len(group.everyone):
            lacking = ", ".join(self.clients[k] for k in group.everyone if k not in tensors)
            raise ProtocolError(f"{lacking} has no {key}, but clients that it mixes with do")
        return tensors

    def mix_tensor(self, key: str) -> Iterator[Moved]:
        """The mixed tensors of this name."""
        is_b = key.endswith(LORA_B)
        is_factor = is_b or key.endswith(LORA_A)
        axis = 1 if is_b else 0
        lead: dict[int, int] | None = None
        if self.align == "truncate" and is_factor:
            ranks = {k: one[key].shape[axis] for k, one in enumerate(self.params) if key in one}
            lead = _leads(components_of(self.matrices(key)), ranks)
        for group in self.groups(key):
            tensors = self.holders(group, key)
            shapes = {tensor.shape for tensor in tensors.values()}
            if len(shapes) == 1 and (lead is None or {lead[k] for k in tensors} == {next(iter(shapes))[axis]}):
                yield from mix_plain(tensors, group)
            elif shapes and not is_factor:
                raise ProtocolError(
                    f"{key} has the shapes {sorted(map(tuple, shapes))}; clients that mix it need equal ones: name"
                    " their tasks apart or do not share the head"
                )
            elif is_b:
                scales = {k: self.scale(tensor.shape[1]) for k, tensor in tensors.items()}
                turned = {k: tensor.T for k, tensor in tensors.items()}
                mixed = mix_factor(turned, group, lead=lead, scales=scales)
                yield from ((clients, tensor.T.contiguous()) for clients, tensor in mixed)
            elif shapes:
                yield from mix_factor(tensors, group, lead=lead, scales=None)

    def mix_product(self, group: Group, module: str) -> Iterator[tuple[int, Tensor, Tensor, float, float]]:
        """(client, A, B, energy thrown away, energy of the whole) for every target of the group."""
        a, b = self.holders(group, module + LORA_A), self.holders(group, module + LORA_B)
        if not a:
            return
        sources = group.sources
        counts = [a[k].shape[0] for k in sources]
        factors = [a[k] for k in sources], [b[k] for k in sources], [self.scale(r) for r in counts]
        longest = [max(a[k].shape[0] for k in targets) for targets in group.targets]
        stack_a, stack_b = lora_product.stack_factors(*factors)
        weights = torch.from_numpy(np.repeat(group.rows, counts, axis=1)).to(stack_a.device)
        components = lora_product.truncated_svd(stack_a, stack_b, weights, ranks=longest)
        for best, targets in zip(components, group.targets):
            yield from lora_product.fit_clients(best, targets, a, b, scale=self.scale)


def resize_ranks(params: Params, ranks: Mapping[str, int], scale: Callable[[int], float]) -> dict[str, Tensor]:
    """The same model with other ranks: `ranks` names the modules that change, `scale` gives s of a rank.

    Exact as long as the new rank holds the product, else the best approximation. New directions are orthogonal rows
    of A beside zero columns of B, so they can be trained.
    """
    new = dict(params)
    for module, rank in ranks.items():
        a, b = params[module + LORA_A], params[module + LORA_B]
        if rank != a.shape[0]:
            scales = {"old_scale": scale(a.shape[0]), "scale": scale(rank)}
            new[module + LORA_A], new[module + LORA_B] = lora_product.sum_as_pair([a], [b], [1.0], rank=rank, **scales)
    return new
