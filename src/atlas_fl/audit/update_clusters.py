"""Audit of clusters that follow from updates: CFL's cuts in two, FedTreeLoRA's tree, IFCA's choices by losses.

Single linkage is Kruskal's algorithm over the pairs, average linkage the mean of all distances between two clusters,
and a silhouette is taken client by client.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_fl.audit.recompute import is_mixed
from atlas_fl.audit.rule_weights import bound_weights, robust_of
from atlas_fl.audit.run_files import AuditPlan, Models, Run
from atlas_fl.params import HEAD, LORA_A, LORA_B


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundUpdates:
    """Input of the clusters of a round."""

    run: Run
    plan: AuditPlan
    present: Sequence[bool]
    before: Models
    """The models of the last aggregation."""
    trained: Models
    """The same with the updates."""

    def setting(self, name: str, default: float) -> float:
        """A number of this run's `[server]` settings."""
        given: Mapping[str, Any] = self.run.config.get("server", {})
        return float(given.get(name, default))

    def products(self, selects: Callable[[str], bool]) -> np.ndarray:
        """(n, n): inner products of the clients' updates, pair by pair, over the parameters that `selects` names."""
        plan, total = self.plan, np.zeros((len(self.plan.clients),) * 2)
        for key in dict.fromkeys(key for name in plan.clients for key in self.trained[name]):
            at_a = self.run.mixing.space == "product" and key.endswith(LORA_B)
            if at_a or not selects(key) or not is_mixed(key, self.run.mixing.share):
                continue
            changes = [self._change(name, key) for name in plan.clients]
            for i, left in enumerate(changes):
                for j, right in enumerate(changes):
                    shorter = min(len(left), len(right))
                    if not key.startswith(HEAD) or plan.tasks[i] == plan.tasks[j]:
                        total[i, j] += float(left[:shorter] @ right[:shorter])
        return total

    def _change(self, client: str, key: str) -> np.ndarray:
        if key not in self.trained[client]:
            return np.zeros(0)
        after, before = (self._vector(models[client], key) for models in (self.trained, self.before))
        return np.asarray(after - before)

    def _vector(self, params: Mapping[str, Tensor], key: str) -> np.ndarray:
        value = params[key].double().numpy()
        if self.run.mixing.space == "product" and key.endswith(LORA_A):
            other = params[key.removesuffix(LORA_A) + LORA_B].double().numpy()
            value = self.plan.scale(len(value)) * (other @ value)
        return np.asarray((value.T if key.endswith(LORA_B) else value).ravel())

    def layer(self, key: str) -> int | None:
        """The layer of a parameter; None of a head."""
        return self.plan.layer_of.get(key.removesuffix(LORA_A).removesuffix(LORA_B))

    def is_in(self, layer: int, key: str) -> bool:
        """Return whether this parameter is in this layer."""
        return self.layer(key) == layer


def state_after_updates(kind: str, updates: RoundUpdates, state: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Expected state of a rule after this round, by path; of rules other than these the same as before."""
    arrays = {path: np.asarray(tensor.double().numpy()) for path, tensor in state.items()}
    if kind == "cfl":
        return _cut_in_two(updates, arrays)
    is_due = kind == "fedtreelora" and not arrays and all(updates.present)
    return _cut_tree(updates) if is_due else arrays


def state_after_choice(before: Mapping[str, np.ndarray], recorded: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Expected state of `ifca`: the recorded losses, and by them the cluster of each client.

    Who told no losses stays where it was. The clusters of round one are drawn, and taken as recorded.
    """
    expected = dict(recorded)
    for path in [path for path in recorded if path.startswith("clusters/")]:
        client = path.removeprefix("clusters/")
        losses = {
            int(other.rsplit("/", 1)[1]): float(loss)
            for other, loss in recorded.items()
            if other.startswith(f"losses/{client}/")
        }
        own = int(before.get(path, recorded[path]))
        least = [label for label, loss in sorted(losses.items()) if loss == min(losses.values())]
        expected[path] = np.array(float(own if own in least or not least else least[0]))
    return expected


def begun_fault(plan: AuditPlan, k: int, before: Models, begun: Models, old: Sequence[int], new: Sequence[int]) -> str:
    """Return whether client k began with its cluster's model: that of a member, the head of one of its task."""
    client = plan.clients[k]
    if old[k] == new[k]:
        return "" if _same(before[client], begun[client]) else "it stayed in its cluster, and began with another model"
    members = [one for one, label in enumerate(old) if label == new[k]]
    of_task = [one for one in members if plan.tasks[one] == plan.tasks[k]]
    if not members:
        return f"it chose cluster {new[k]}, which nobody was in"
    head = before[plan.clients[of_task[0]] if of_task else client]
    body = before[plan.clients[(of_task or members)[0]]]
    wanted = {key: (head if key.startswith(HEAD) else body)[key] for key in before[client]}
    return "" if _same(wanted, begun[client]) else f"it chose cluster {new[k]}, and began with another model"


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def labels_in(state: Mapping[str, np.ndarray], plan: AuditPlan, *, head: bool, layer: int | None) -> list[int]:
    """The cluster of every client for a parameter of this layer, by such a state; all alike where it says nothing."""
    if any(path.startswith("cuts/") for path in state):
        layers = [int(path.split("/")[1]) for path in state]
        prefix = f"cuts/{max(layers) if head or layer is None else layer}/"
    else:
        prefix = "clusters/"
    return [int(state.get(prefix + client, np.zeros(()))) for client in plan.clients]


def _cut_in_two(updates: RoundUpdates, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Algorithm 3 of Sattler et al. for every cluster all of whose clients took part."""
    plan, ratio = updates.plan, updates.setting("bipartition_ratio", 0.4)
    labels, products = labels_in(arrays, plan, head=False, layer=None), updates.products(lambda _: True)
    result = list(labels)
    for label in sorted(set(labels)):
        inside = [k for k, own in enumerate(labels) if own == label]
        if len(inside) < 2 or not all(updates.present[k] for k in inside):
            continue
        examples = np.array(
            bound_weights([plan.examples[k] for k in inside], robust_of(updates.run).max_share), np.float64
        )
        among = products[np.ix_(inside, inside)]
        mean = float(examples @ among @ examples) / float(examples.sum()) ** 2
        if np.sqrt(max(mean, 0.0)) < ratio * np.sqrt(np.diag(among).max()):
            cut_off, free = _part_without_first(_cosines(among)), max(result) + 1
            for one in cut_off:
                result[inside[one]] = free
    return {f"clusters/{name}": np.array(float(label)) for name, label in zip(plan.clients, result, strict=True)}


def _part_without_first(similarities: np.ndarray) -> list[int]:
    """Kruskal: join the most similar pairs until two parts are left; the one that the first client is not in."""
    part = list(range(len(similarities)))
    pairs = sorted(combinations(part, 2), key=lambda pair: -similarities[pair])
    for i, j in pairs:
        if len(set(part)) == 2:
            break
        part = [part[i] if own == part[j] else own for own in part]
    return [k for k, own in enumerate(part) if own != part[0]]


def _cut_tree(updates: RoundUpdates) -> dict[str, np.ndarray]:
    plan = updates.plan
    keys = {key for params in updates.trained.values() for key in params if is_mixed(key, updates.run.mixing.share)}
    layers = sorted({layer for key in keys if (layer := updates.layer(key)) is not None})
    distances = [1.0 - _cosines(updates.products(partial(updates.is_in, layer))) for layer in layers]
    step, threshold = int(updates.setting("tree_step", 1)), updates.setting("tree_threshold", 0.1)
    return {
        f"cuts/{layer}/{name}": np.array(float(label))
        for layer, cut in zip(layers, _cuts(distances, step=step, threshold=threshold), strict=True)
        for name, label in zip(plan.clients, cut, strict=True)
    }


def _cuts(distances: Sequence[np.ndarray], *, step: int, threshold: float) -> list[list[int]]:
    """The clusters of every layer, lowest first."""
    if not distances:
        return []
    n, count, cuts = len(distances[0]), 1, []
    tree = _average_linkage(np.mean(np.stack(distances), axis=0))
    for own in distances:
        counts = range(count, min(n - 1, count + step) + 1) if n > 2 else (1,)
        scores = {one: _silhouette(own, tree[one]) if one > 1 else threshold for one in counts}
        count = next(one for one in counts if scores[one] == max(scores.values()))
        cuts.append(tree[count])
    return cuts


def _average_linkage(distances: np.ndarray) -> dict[int, list[int]]:
    """By how many clusters there are: the cluster of every client, numbered in the order of their first clients."""
    parts = [[k] for k in range(len(distances))]
    cuts = {}
    while True:
        order = sorted(parts)
        cuts[len(parts)] = [next(k for k, part in enumerate(order) if one in part) for one in range(len(distances))]
        if len(parts) == 1:
            return cuts
        between = {
            (i, j): float(distances[np.ix_(parts[i], parts[j])].mean()) for i, j in combinations(range(len(parts)), 2)
        }
        i, j = min(between, key=lambda pair: between[pair])
        parts = [part for k, part in enumerate(parts) if k not in (i, j)] + [sorted(parts[i] + parts[j])]


def _silhouette(distances: np.ndarray, labels: Sequence[int]) -> float:
    """The mean over clients of (b - a) / max(a, b): the nearest other cluster, and its own without itself."""
    values = []
    for k, own in enumerate(labels):
        means = {
            label: float(np.mean([distances[k, j] for j, one in enumerate(labels) if one == label and j != k] or [0.0]))
            for label in set(labels)
        }
        inside, outside = means[own], min(mean for label, mean in means.items() if label != own)
        alone = sum(one == own for one in labels) == 1
        values.append(0.0 if alone or max(inside, outside) == 0 else (outside - inside) / max(inside, outside))
    return float(np.mean(values))


def _cosines(products: np.ndarray) -> np.ndarray:
    sizes = np.sqrt(np.outer(np.diag(products), np.diag(products)))
    cosines = np.divide(products, sizes, out=np.zeros_like(products), where=sizes > 0)
    np.fill_diagonal(cosines, 1.0)
    return np.asarray(cosines)
