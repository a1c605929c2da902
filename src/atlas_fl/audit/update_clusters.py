"""Second formulas of clusters by updates: CFL's cuts in two, FedTreeLoRA's tree, IFCA's choices by losses.

Single linkage is Kruskal's algorithm over the pairs, average linkage the mean of all distances between two clusters,
and silhouettes are those of the clustering, where the method takes scikit-learn's. HiLoRA's distances are by principal
angles, its clusters scikit-learn's. Sattler et al., 2021; Ghosh et al., 2020.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np
import torch
from scipy.sparse.csgraph import laplacian
from torch import Tensor

from atlas_fl.audit.averages import CLUSTER_MEAN, Averaging, Mean
from atlas_fl.audit.dense import arrays, below, cosines, decompose, same_tensors
from atlas_fl.audit.run_files import AuditPlan, Flat, Models, Run
from atlas_fl.audit.server_steps import dense_updates, mean_of, weighted
from atlas_fl.audit.step import Step, Value, compare_values
from atlas_fl.clustering.k_search import silhouette
from atlas_fl.params import HEAD, LORA_A, LORA_B, LORA_GATE, ranks


class ByUpdates(Averaging):
    """An average inside clusters that the server state holds."""

    def row(self, step: Step, k: int, key: str) -> list[float]:
        """The average of the cluster of client k at this parameter."""
        state = step.once("expected", lambda: self.expected(step))
        labels = tuple(labels_in(state, step.plan, step.plan.layer(key)))
        return Mean(within="clusters", clusters=labels).row(step, k, key)


def labels_in(state: Mapping[str, np.ndarray | Tensor], plan: AuditPlan, layer: int | None) -> list[int]:
    """The cluster of every client for a parameter of this layer, by such a state; all alike where it says nothing.

    A tree has clusters of every layer; what is in none has those of the last.
    """
    prefix = "clusters/"
    if any(path.startswith("cuts/") for path in state):
        last = max(int(path.split("/")[1]) for path in state if path.startswith("cuts/"))
        prefix = f"cuts/{last if layer is None else layer}/"
    return [int(state.get(prefix + client, 0)) for client in plan.clients]


class Bipartition(ByUpdates):
    """CFL: algorithm 3 of Sattler et al. for every cluster all of whose clients took part."""

    def expected(self, step: Step) -> dict[str, np.ndarray]:
        """The clusters after the cuts of the round."""
        clients = range(step.num_clients)
        labels = labels_in(step.state, step.plan, None)
        keys = step.compared(step.trained, clients, lambda _: True)
        products = step.products(clients, keys, step.before, step.trained)
        result, settings = list(labels), step.run.settings
        server, last = settings.server, settings.training.rounds - settings.mixing.personal_rounds
        is_early = step.round <= server.bipartition_round and 4 * (step.round - 1) < last
        for label in () if is_early else sorted(set(labels)):
            inside = [k for k in clients if labels[k] == label]
            if len(inside) < 3 or step.there(inside) != inside:
                continue
            shares, among = np.array(step.shares(inside)), products[np.ix_(inside, inside)]
            mean = float(shares @ among @ shares)
            largest = np.sqrt(np.diag(among).max())
            least = server.bipartition_ratio * server.bipartition_norm
            if largest > server.bipartition_norm and np.sqrt(max(mean, 0.0)) < least:
                free = max(result) + 1
                for one in _part_without_first(cosines(among)):
                    result[inside[one]] = free
        return {
            f"clusters/{name}": np.array(float(label)) for name, label in zip(step.plan.clients, result, strict=True)
        }


def _part_without_first(similarities: np.ndarray) -> list[int]:
    """Kruskal: join the most similar pairs until two parts are left; the one that the first client is not in."""
    part = list(range(len(similarities)))
    pairs = sorted(combinations(part, 2), key=lambda pair: -similarities[pair])
    for i, j in pairs:
        if len(set(part)) == 2:
            break
        part = [part[i] if own == part[j] else own for own in part]
    return [k for k, own in enumerate(part) if own != part[0]]


class Tree(ByUpdates):
    """FedTreeLoRA: clusters of every layer, cut once, in the first round in which all took part."""

    def expected(self, step: Step) -> dict[str, np.ndarray]:
        """The clusters by layer."""
        state = arrays(step.state)
        if state or not all(step.present):
            return state
        plan, server, clients = step.plan, step.run.settings.server, range(step.num_clients)
        compared = step.compared(step.trained, clients, lambda _: True)
        layers = sorted(layer for layer in {plan.layer(key) for key in compared} if layer is not None)
        by_layer = {layer: [key for key in compared if plan.layer(key) == layer] for layer in layers}
        distances = [
            1.0 - cosines(step.products(clients, keys, step.before, step.trained)) for keys in by_layer.values()
        ]
        cuts = _cuts(distances, step=server.tree_step, threshold=server.tree_threshold)
        return {
            f"cuts/{layer}/{name}": np.array(float(label))
            for layer, cut in zip(by_layer, cuts, strict=True)
            for name, label in zip(plan.clients, cut, strict=True)
        }


class TreeWithOutside(Tree):
    """FedTreeLoRA whose clients hold the mean of everybody outside their cluster frozen."""

    def expected(self, step: Step) -> dict[str, np.ndarray]:
        """The clusters by layer, and the adapters of everybody outside."""
        state = super().expected(step)
        if step.is_undone or not any(step.present):
            return arrays(step.state)
        result = {path: label for path, label in state.items() if path.startswith("cuts/")}
        for k, client in enumerate(step.plan.clients if result else ()):
            for key in (key for key in step.before[client] if key.endswith((LORA_A, LORA_B))):
                labels = labels_in(state, step.plan, step.plan.layer(key))
                others = [one for one in step.there(range(step.num_clients)) if labels[one] != labels[k]]
                if others:
                    result[f"outside/{client}/{key}"] = mean_of(step, step.trained, others, key)[0]
        return result

    def frozen(self, _plan: AuditPlan, state: Flat, client: str) -> dict[str, Tensor]:
        """The adapter of everybody outside."""
        return below(state, f"outside/{client}/")


class Routed(Averaging):
    """FedLEASE: averages inside the clusters of the plan, beside the experts of the others."""

    average = CLUSTER_MEAN

    def initial(self, run: Run, models: Models) -> dict[str, np.ndarray]:
        """The cluster of every client, and experts of zeros for each, where there are several."""
        plan = run.plan("plan.json")
        model = models[plan.clients[0]]
        if not any(key.endswith(LORA_GATE) for key in model):
            return {}
        labels = [str(label) if label >= 0 else name for name, label in zip(plan.clients, plan.clusters, strict=True)]
        order = list(dict.fromkeys(labels))
        clusters = {f"clusters/{name}": np.array(float(order.index(one))) for name, one in zip(plan.clients, labels)}
        factors = {key: np.zeros(one.shape) for key, one in model.items() if key.endswith((LORA_A, LORA_B))}
        return clusters | {f"experts/{k}/{key}": zero for k in range(len(order)) for key, zero in factors.items()}

    def expected(self, step: Step) -> dict[str, np.ndarray]:
        """The experts of clusters of which someone took part are their averages."""
        state = arrays(step.state)
        for k in step.there(range(step.num_clients)) if state and not step.is_undone else ():
            there = [one for one, weight in enumerate(self.row(step, k, LORA_A)) if weight]
            for key in (key for key in step.before[step.plan.clients[k]] if key.endswith((LORA_A, LORA_B))):
                path = f"experts/{int(state['clusters/' + step.plan.clients[k]])}/{key}"
                state[path] = mean_of(step, step.trained, there, key)[0]
        return state

    def frozen(self, plan: AuditPlan, state: Flat, client: str) -> dict[str, Tensor]:
        """The experts of all other clusters, side by side."""
        own, parts = int(state.get(f"clusters/{client}", 0)), dict[str, list[Tensor]]()
        for other in (other for other in range(len(plan.clients)) if other != own):
            for key, factor in below(state, f"experts/{other}/").items():
                parts.setdefault(key, []).append(factor)
        return {key: torch.cat(factors, dim=int(key.endswith(LORA_B))) for key, factors in parts.items()}


class Levels(ByUpdates):
    """HiLoRA: an average of all, then those of clusters; at its end a level is frozen, and adapters begin again."""

    def row(self, step: Step, k: int, key: str) -> list[float]:
        """The average of the cluster of client k as the round begins."""
        return Mean(within="clusters", clusters=tuple(labels_in(step.state, step.plan, None))).row(step, k, key)

    def value(self, step: Step, k: int, key: str) -> Value:
        """The average; zero of adapters that begin again."""
        mean, size = self._mean(step, k, key)
        begins_again = key.endswith((LORA_A, LORA_B)) and any(step.present) and self._ends(step)
        return (np.zeros_like(mean) if begins_again else mean), size

    def _mean(self, step: Step, k: int, key: str) -> Value:
        shares = {one: share for one, share in enumerate(self.row(step, k, key)) if share}
        return weighted(list(shares.values()), [step.value(step.trained, one, key) for one in shares])

    def _ends(self, step: Step) -> bool:
        settings = step.run.settings
        last = settings.training.rounds - settings.mixing.personal_rounds
        is_root = not any(path.startswith("levels/") for path in step.state)
        return step.round >= (np.ceil(settings.server.root_share * last) if is_root else last)

    def frozen(self, _plan: AuditPlan, state: Flat, client: str) -> dict[str, Tensor]:
        """The levels of the client's cluster."""
        return below(state, f"levels/{int(state.get('clusters/' + client, 0))}/")

    def state_fault(self, step: Step) -> tuple[str, float | None]:
        """(the first entry that is not as computed again, the largest error of all)."""
        return compare_values(self.expected(step), _with_dense_levels(step, step.told), "the server state")

    def expected(self, step: Step) -> dict[str, np.ndarray]:
        """The bases of clients, or the clusters and their levels as dense updates."""
        state, clients = _with_dense_levels(step, step.state), step.plan.clients
        if step.is_undone or not any(step.present):
            return state
        has_levels = any(path.startswith("levels/") for path in state)
        for k in step.there(range(step.num_clients)) if not has_levels else ():
            decay = step.run.settings.server.basis_decay
            for key in (key for key in step.trained[clients[k]] if key.endswith(LORA_B)):
                b, path = step.value(step.trained, k, key), f"bases/{clients[k]}/{key}"
                unit = b / (np.linalg.norm(b) or 1.0)
                state[path] = decay * state.get(path, unit) + (1 - decay) * unit
        if not self._ends(step):
            return state
        labels = labels_in(step.state, step.plan, None) if has_levels else _clusters_of_bases(clients, state)
        new = {f"clusters/{client}": np.array(float(label)) for client, label in zip(clients, labels, strict=True)}
        for k, client in enumerate(clients):
            for module, rank in ((module, rank) for module, rank in ranks(step.before[client]).items() if rank):
                left, values, right = decompose(self._mean(step, k, module + LORA_A)[0])
                path = f"levels/{labels[k]}/{module}"
                new[path] = state.get(path, 0.0) + (left[:, :rank] * values[:rank]) @ right[:rank]
        return new


def _with_dense_levels(step: Step, state: Flat) -> dict[str, np.ndarray]:
    levels = {path: one for path, one in state.items() if path.startswith("levels/")}
    return arrays({path: one for path, one in state.items() if path not in levels}) | dense_updates(step, levels)


def _clusters_of_bases(clients: Sequence[str], state: Mapping[str, np.ndarray]) -> list[int]:
    """HiLoRA's clusters by principal angles; who has no basis is alone."""
    spans: dict[str, list[np.ndarray]] = {}
    for path in sorted(path for path in state if path.startswith("bases/") and state[path].size):
        spans.setdefault(path.split("/")[1], []).append(decompose(state[path])[0])
    known = [client for client in clients if client in spans]
    distances = np.zeros((len(known), len(known)))
    for i, j in combinations(range(len(known)), 2):
        pairs = zip(spans[known[i]], spans[known[j]], strict=True)
        distances[i, j] = distances[j, i] = np.mean([1 - np.mean(decompose(q.T @ p)[1] ** 2) for q, p in pairs])
    labels = dict(zip(known, _spectral(distances), strict=True))
    return [labels.get(client, k + len(known)) for k, client in enumerate(clients)]


def _spectral(distances: np.ndarray) -> list[int]:
    """scikit-learn's spectral clusters, of the number with the largest eigengap."""
    from sklearn.cluster import SpectralClustering

    n = len(distances)
    sigma = np.median([distances[pair] for pair in combinations(range(n), 2)]) if n > 2 else 0.0
    if sigma <= 0:
        return [0] * n
    affinity = np.exp(-np.square(distances / sigma) / 2)
    values = np.linalg.eigvalsh(laplacian(affinity, normed=True))
    count = max(range(2, min(10, n - 1) + 1), key=lambda k: values[k] - values[k - 1])
    by_pivots = SpectralClustering(count, affinity="precomputed", assign_labels="cluster_qr", random_state=0)
    return [int(label) for label in by_pivots.fit_predict(affinity)]


def _cuts(distances: Sequence[np.ndarray], *, step: int, threshold: float) -> list[list[int]]:
    """The clusters of every layer, lowest first."""
    if not distances:
        return []
    n, count, cuts = len(distances[0]), 1, []
    tree = _average_linkage(np.mean(np.stack(distances), axis=0))
    for own in distances:
        counts = range(count, min(n - 1, count + step) + 1) if n > 2 else (1,)
        scores = {one: silhouette(own, np.array(tree[one])) or 0.0 if one > 1 else threshold for one in counts}
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


class Choice(ByUpdates):
    """IFCA: every client takes the cluster whose model has the least loss on its examples."""

    def expected(self, step: Step) -> dict[str, np.ndarray]:
        """The recorded losses, and by them the cluster of each client.

        Who told no losses stays where it was. The clusters of round one are drawn, and taken as recorded.
        """
        recorded = arrays(step.told)
        expected = dict(recorded)
        for client, cluster in below(recorded, "clusters/").items():
            losses = {int(label): float(loss) for label, loss in below(recorded, f"losses/{client}/").items()}
            own = int(step.state.get(f"clusters/{client}", cluster))
            least = [label for label, loss in sorted(losses.items()) if loss == min(losses.values())] or [own]
            expected[f"clusters/{client}"] = np.array(float(own if own in least else least[0]))
        return expected

    def begun_faults(
        self, run: Run, round: int, plan: AuditPlan, held: Models, begun: Models, state: Flat
    ) -> Iterator[tuple[str, str]]:
        """Fault of who did not begin with its cluster's model: that of a member, the head of one of its task."""
        now = run.state_after(round, state)
        new = labels_in(now, plan, None)
        old = labels_in(state, plan, None) if state else new
        if state and not any(path.startswith("losses/") for path in now):
            yield "", "nobody has told a loss, and every client that takes part has to"
        for k, client in enumerate(plan.clients):
            wanted, what = held[client], "it stayed in its cluster"
            if old[k] != new[k]:
                what = f"it chose cluster {new[k]}"
                wanted = _model_of(plan, k, [one for one, label in enumerate(old) if label == new[k]], held)
            if not wanted:
                yield client, f"{what}, which nobody was in"
            else:
                is_same = same_tensors(wanted, begun.get(client, {}))
                yield client, "" if is_same else f"{what}, and began with another model"


def _model_of(plan: AuditPlan, k: int, members: Sequence[int], held: Models) -> dict[str, Tensor]:
    """The model of a cluster with these members as client k gets it; empty without any."""
    if not members:
        return {}
    of_task = [one for one in members if plan.tasks[one] == plan.tasks[k]]
    head = held[plan.clients[of_task[0]] if of_task else plan.clients[k]]
    body = held[plan.clients[(of_task or members)[0]]]
    return {key: (head if key.startswith(HEAD) else body)[key] for key in held[plan.clients[k]]}
