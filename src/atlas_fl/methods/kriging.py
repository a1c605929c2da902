"""`kriging`, `atlas`: each client's model predicted from those of all, by measured variances; clusters from each other.

    w_k = theta_k + e_k                                        what a client is after, and the noise of its estimate
    N_k  = || h_k^1 - h_k^2 ||^2 / 4                           E || e_k ||^2, from the halves of client k
    K_kl = (< h_k^1, h_l^2 > + < h_k^2, h_l^1 >) / 2           unbiased for < theta_k, theta_l >, also for k = l
    R_kl = K+_kl / sqrt(K+_kk K+_ll)                           how far two clients are after the same
    b_k  = K+_kk / (K+_kk + N_k n_k / mean n)                  reliability of a client with as many examples as the mean
    c_k  = sum_l R_kl^2 b_l / sum_l R_kl^2                     the same, of all that are after what client k is after
    m_k  = argmin over m >= 0 of  m^T (R + (1 / c_k - 1) diag(mean n / n)) m - 2 m^T R_k,      scaled to sum to 1

h_k^1 and h_k^2 are what client k's model has become since the run began when it is trained on either half of its
examples (`Kriging.measure`), in product space of s B A; K+ is the positive part of K, n are numbers of examples.
Lengths are left out: they say how fast a client learns, and in a task that is learnt slowly the client that has learnt
least has the least noise, too, and would weigh most. The adapters have one matrix, or with `--gram-by layer` each layer
its own; heads have one inside each task. There is no strength to choose: clients whose halves agree
as those of one do share a model, and who agrees with nobody keeps its own.

Of more than `MOST_PREDICTED` clients the rows are those inside blocks of one cluster, or of several small ones, among
those who are measured and take part.

Halves are taken once, in round `--measure-round`; before, everyone is given the average by examples, so that halves
begin with what all have in common. What they say then holds for the run. Who was not there is measured when it first
takes part; until then it is given the average, and is in nobody's prediction. Who is measured and takes no part keeps
its model.

`atlas`, or `kriging --within clusters`, predicts the averages of clusters before that, where most clients share one: a
cluster's members are as good as halves of it, so that this takes no training and no bytes. With w_i what client i's
model has become since the run began and mean w_c their average by examples p_i, in each round anew,

    K_cc = mean_{i != j in c} < w_i, w_j >,   K_cd = < mean w_c, mean w_d >
    N_c  = (mean_{i in c} || w_i ||^2 - K_cc) sum_{i in c} p_i^2

and the rows above are rows of clusters: a client of c is given sum_d m_cd mean w_d. From the round of the halves on
adapters are averaged over all where clients differ by less than their noise, to the bit; else inside a cluster whose
members do, and differ by less than the clusters do. What is not averaged is predicted.

    tau^2 = mean_k K_kk - mean_{k != l} K_kl,   N = mean_k N_k         over all or a cluster, of whom is measured
    risk of a member's own model N, of the average of n  N / n + (1 - 1 / n) tau^2:   the average is better if tau^2 < N
    and tau^2 < tau_all^2 - tau^2, over all that may mix:   else the cluster explains less than it leaves

Heads are averaged inside clusters alone: what tells clients apart lies in a few directions of a head, and is less than
its noise over all of them where a head of one's own pays.

With weights of any sign and without the scaling this is simple kriging, the posterior mean of a Gaussian field
(Rasmussen and Williams 2006, "Gaussian processes for machine learning", section 2.2).
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar

import numpy as np
from jaxtyping import Float64
from scipy.optimize import nnls

from atlas_fl.aggregation import rules
from atlas_fl.aggregation.distances import gram_of_changes
from atlas_fl.aggregation.matrices import Federation, HalfGram, Rows, Square, Vector, choose_rows, identity
from atlas_fl.clustering.blocks import MOST_EXACT, MOST_PREDICTED, blocks_of, from_blocks
from atlas_fl.errors import ConfigError
from atlas_fl.frozen import Frozen
from atlas_fl.methods.method import Method, Report, ReportTensor, RoundStart, tensors_of
from atlas_fl.methods.pfedgraph import INITIAL, FromStart
from atlas_fl.params import (
    ByClient,
    Params,
    ServerState,
    flatten_by_client,
    params_by_client,
    shared_params,
    subtree,
    unflatten_by_client,
)
from atlas_fl.ranges import Range

HALVES = "halves"
"""The entry of the server state: what each client has reported."""
LARGEST_WEIGHT = 1e6
"""Largest weight of a model that was trained on half of the examples; others are below one."""
RIDGE = 1e-9
"""Added to the noise, so that the program has one solution."""
TINY = 1e-6
"""Share of the longest below which a client's length is rounding."""


def measure(gram: HalfGram) -> tuple[Square, Vector]:
    """(K, N) from the inner products of all first halves, then all second halves, with each other."""
    n = len(gram) // 2
    cross, lengths = gram[:n, n:], np.diag(gram)
    noise = (lengths[:n] + lengths[n:] - 2 * np.diag(cross)) / 4
    return (cross + cross.T) / 2, np.maximum(noise, 0.0)


def positive_part(matrix: Square) -> Square:
    """The nearest positive semidefinite matrix: without the negative eigenvalues, which only noise can make."""
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * np.maximum(values, 0.0)) @ vectors.T)


def correlations(covariance: Square, noise: Vector, shares: Vector) -> tuple[Square, Vector]:
    """(R, c): zero, and without meaning, for clients in which nothing is after anything."""
    known = positive_part(covariance)
    lengths = np.sqrt(np.maximum(np.diag(known), 0.0))
    is_known = lengths > TINY * lengths.max(initial=0.0)
    scales = np.where(is_known, lengths, np.inf)
    correlation = known / np.outer(scales, scales)
    variance = np.where(is_known, lengths**2, 1.0)
    reliability = variance / (variance + noise * shares * len(shares))
    weights = correlation**2
    pooled = weights @ reliability / np.where(is_known, weights.sum(axis=1), 1.0)
    return correlation, np.where(is_known, pooled, 1.0)


def prediction_rows(covariance: Square, noise: Vector, shares: Vector) -> Square:
    """m_k of every client, a row each; `shares` of the examples, which sum to 1, where there is nothing to predict."""
    correlation, reliability = correlations(covariance, noise, shares)
    rows = []
    for target, reliable in zip(correlation, reliability, strict=True):
        noises = (1 / reliable - 1) / (shares * len(shares)) + RIDGE
        root = np.linalg.cholesky(correlation + np.diag(noises))
        weights, _ = nnls(root.T, np.linalg.solve(root, target), maxiter=100 * len(shares))
        rows.append(weights / weights.sum() if weights.sum() > 0 else shares)
    return np.stack(rows)


def bound_others(matrix: Square, max_share: float) -> Square:
    """The rows with no other client's share above `max_share`; what is taken off is the client's own."""
    others = np.minimum(matrix * (1 - np.eye(len(matrix))), max_share)
    return np.asarray(others + np.diag(1 - others.sum(axis=1)))


def measure_clusters(
    gram: Square, averages: Float64[np.ndarray, "c n"]
) -> tuple[Float64[np.ndarray, "c c"], Float64[np.ndarray, " c"]] | None:
    """(K, N) of clusters from the inner products of their members' changes; None where no cluster has two members.

    A cluster of one has the noise of a mean member of the others, which is taken off its length.

    Args:
        averages: of each cluster the weights of its members, which sum to 1.
    """
    covariance, lengths, inside = averages @ gram @ averages.T, np.diag(gram), averages > 0
    sizes = inside.sum(axis=1)
    squares, products = inside @ lengths, ((inside @ gram) * inside).sum(axis=1)
    pairs = np.where(sizes > 1, sizes * (sizes - 1), 1)
    noise = squares / sizes - (products - squares) / pairs
    if not (sizes > 1).any():
        return None
    noise = np.maximum(np.where(sizes > 1, noise, noise[sizes > 1].mean()), 0.0)
    np.fill_diagonal(covariance, np.maximum(squares / sizes - noise, 0.0))
    return covariance, noise * np.square(averages).sum(axis=1)


def shares_cluster(clusters: np.ndarray) -> np.ndarray:
    """Clients, (n,) bool, whose cluster is what is shared before they are measured.

    Of a federation in which most clients share a cluster with nobody the clusters say nothing: then nobody is.
    """
    _, of, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
    shared = np.asarray((clusters >= 0) & (sizes[of] > 1))
    return shared if 2 * shared.sum() > len(clusters) else np.zeros_like(shared)


def alike_in_cluster(gram: HalfGram, clusters: np.ndarray) -> np.ndarray:
    """Clients, (n,) bool, in a cluster whose measured members differ by less than their noise.

    Where there are others, the members must also differ by less than the clusters do: a cluster that explains no
    variance is none.
    """
    alike, total = np.zeros(len(clusters), bool), variance_between(gram)
    for members, part in _by_cluster(gram, clusters):
        ratio, inside = variance_over_noise(part), max(0.0, variance_between(part))
        explains = len(members) == len(clusters) or inside < total - inside
        alike[members] = ratio is not None and ratio < 1 and explains
    return alike


def _by_cluster(gram: HalfGram, clusters: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Places of the clients of each cluster, and the inner products of their halves."""
    for label in sorted(set(clusters[clusters >= 0].tolist())):
        members = np.flatnonzero(clusters == label)
        yield members, _of_members(gram, members)


def _of_members(gram: HalfGram, members: np.ndarray) -> HalfGram:
    """The inner products of the halves of these clients alone, by their places."""
    both = np.concatenate([members, members + len(gram) // 2])
    return gram[np.ix_(both, both)]


class MeasuredSharing(Frozen):
    """Share of its own that a client keeps of a group of parameters, and why."""

    client: str
    parameters: str
    """`head`, `adapters`, or with `--gram-by layer` the layer."""
    own_share: float
    """Its own model's weight in its row."""
    effective_clients: float
    """The exponential of the row's entropy: 1 for its own model alone, n for the plain average of n."""
    variance_over_noise: float | None
    """tau^2 / N of the cluster under `--within clusters`, unless all adapters are averaged, else of all that may mix:
    what differs between them over the noise of one; None without noise."""


class MeasuredOnce(Method):
    """A method that has clients train halves of their examples in one round."""

    measure_round: Annotated[int, Range(least=1)] = 4
    """The round in which `kriging`, `atlas`, `mta`, `james_stein`, `stb` and `shrinkage` measure halves, after a third
    of the run where it has fewer rounds; in those before everyone is given averages, or with `atlas` predictions of
    clusters."""

    @property
    def first_measured_round(self) -> int:
        """The round in which halves are first measured: `--measure-round`, or after a third of a shorter run."""
        last = max(1, self.options.last_aggregation)
        return self.measure_round if self.measure_round <= last else math.ceil(last / 3)


class FromHalves(FromStart, MeasuredOnce):
    """A method whose rows follow from split halves: `predict_rows`; averages until a client is measured."""

    reads_within = False
    extra_passes = "in one round each half of the examples, trained apart, and sent beside the model"
    report = "halves"
    asks_once = True
    report_words = "once, two models trained on either half of its examples"
    models_in_report = 2

    def reports_in(self, round: int) -> bool:
        """From the round on that measures halves."""
        return round >= self.first_measured_round

    def ask(self, round: RoundStart) -> Collection[str]:
        """The clients without halves; of one example there are none."""
        known = subtree(round.server_state, HALVES)
        return [name for name in super().ask(round) if name not in known and round.examples[name] > 1]

    @classmethod
    def examples_behind(cls, labels: np.ndarray, *, most: int | None) -> Mapping[str, int]:
        """Half of the examples."""
        half = len(labels) // 2
        return {"a model of half": half if most is None else min(half, most)}

    @classmethod
    def measure(cls, report: Report) -> Mapping[str, Params]:
        """The models of both halves, each tensor under the name of its half.

        Both begin with the model that the client begins the round with, and take as many steps as the round has.
        Halves are alternate examples, with a secret of an order that it draws.
        """
        # first halves together, then the second ones: a pack is no larger than that of the round
        first, second = (report.train_half(half) for half in (0, 1))
        halves = {client: {"first": first[client], "second": second[client]} for client in report.clients}
        return {client: flatten_by_client(models) for client, models in halves.items()}

    @classmethod
    def report_tensors(cls, model: Params, *, classes: int) -> Mapping[str, ReportTensor]:
        """Two models."""
        del classes
        bounds = {"least": -LARGEST_WEIGHT, "most": LARGEST_WEIGHT}
        models = flatten_by_client({"first": model, "second": model})
        return {name: ReportTensor(shape=tuple(one.shape), dtype=one.dtype, **bounds) for name, one in models.items()}

    def record_reports(self, server_state: ServerState, reports: ByClient) -> ServerState:
        """The state with these halves."""
        halves = {client: unflatten_by_client(report) for client, report in reports.items()}
        return {**server_state, HALVES: {**subtree(server_state, HALVES), **halves}}

    def arrival(self, step: rules.MixingContext) -> Square | Rows:
        """The average by examples."""
        return rules.weighted_average(self.options, step)

    def rule(self, step: rules.MixingContext) -> Square | Rows:
        """The rows of those who are measured, averages for others; who is measured and absent keeps its model."""
        reports = subtree(step.server_state, HALVES)
        is_measured = np.array([name in reports for name in step.federation.clients], bool)
        if len(is_measured) <= MOST_PREDICTED:
            return self._rows_together(step, is_measured)
        there, n, clusters = step.present & is_measured, len(is_measured), step.federation.clusters
        blocks = blocks_of(np.where(there, np.maximum(clusters, -1) + 1, -1))
        rows = [self._rows_together(step.of(places), is_measured[places]) for places in blocks]
        predicted = Rows(distinct=from_blocks(blocks, rows, n), of=np.arange(n))
        others = self._unmeasured_rows(step, is_measured) if n <= MOST_EXACT else self.arrival(step)
        matrix = choose_rows(there, predicted, others)
        return choose_rows(is_measured & ~there, identity(n), matrix)

    def _rows_together(self, step: rules.MixingContext, is_measured: np.ndarray) -> Square:
        """The same from the halves of all, in one block."""
        matrix = self._unmeasured_rows(step, is_measured)
        for label in set(step.groups.tolist()):
            known = np.flatnonzero((step.groups == label) & is_measured)
            matrix[known] = self._measured_rows(step, matrix, known)[known]
        keeps = ~step.present & is_measured
        return np.asarray(np.where(keeps[:, None], np.eye(len(matrix)), matrix))

    def predict_rows(self, gram: HalfGram, examples: Vector) -> Square:
        """The rows of clients with these inner products of halves and numbers of examples."""
        del gram, examples
        raise ConfigError(f"method {self.name!r} has no rows from halves; define predict_rows")

    def _unmeasured_rows(self, step: rules.MixingContext, _is_measured: np.ndarray) -> np.ndarray:
        """The rows of those who are not measured."""
        return np.asarray(self.arrival(step))

    def _measured_rows(self, step: rules.MixingContext, matrix: np.ndarray, known: np.ndarray) -> np.ndarray:
        """The matrix with the rows of the measured clients of one group, by their places."""
        result, there = matrix.copy(), known[step.present[known]]
        if len(there):
            names = [step.federation.clients[k] for k in there.tolist()]
            gram = self._half_gram(step.server_state, names, step.federation, step.parameters)
            result[there] = 0.0
            result[np.ix_(there, there)] = self.predict_rows(gram, step.federation.weights[there])
        return result

    def _half_gram(
        self, state: ServerState, names: Sequence[str], federation: Federation, group: rules.ParameterGroup
    ) -> HalfGram:
        """The inner products of the changes in both halves of these clients, over the shared parameters of a group."""
        initial, reports = params_by_client(state, INITIAL), subtree(state, HALVES)
        places = [(half, name) for half in ("first", "second") for name in names]
        after = {f"{half}/{name}": tensors_of(subtree(reports, name), half) for half, name in places}
        return self._gram(after, {f"{half}/{name}": initial[name] for half, name in places}, federation, group)

    def _gram(self, after: ByClient, before: ByClient, federation: Federation, group: rules.ParameterGroup) -> Square:
        """The inner products of the changes of these models with each other, over the shared parameters of a group."""
        roots = dict.fromkeys(after, "")
        return gram_of_changes(
            before, after, roots, self.options, selects=lambda key: self.group_of(key, federation) == group
        )


class Kriging(FromHalves):
    """Everyone gets the best linear prediction of its own model, by covariances and noise of split halves."""

    max_other_share: Annotated[float, Range(above=0, most=1)] = 0.5
    """Largest share that one other client's model may have in a prediction of `kriging` and `atlas`; 1 bounds none."""

    name = "kriging"
    reads_within = True

    def arrival(self, step: rules.MixingContext) -> Square | Rows:
        """The average by examples; inside clusters with `--within clusters`."""
        is_clustered = shares_cluster(step.federation.clusters) & self.clustered
        inside = rules.weighted_average(self.options, step, within=rules.CLUSTERS)
        return choose_rows(is_clustered, inside, rules.weighted_average(self.options, step))

    def predict_rows(self, gram: HalfGram, examples: Vector) -> Square:
        """The predictions, with no other's share above `--max-other-share`."""
        return self._bounded_rows(*measure(gram), examples)

    def _unmeasured_rows(self, step: rules.MixingContext, is_measured: np.ndarray) -> np.ndarray:
        """Averages, and with clusters their predictions."""
        matrix = np.asarray(self.arrival(step))
        if self.clustered and step.models is not None and (step.present & ~is_measured).any():
            predicted = self._predict_clusters(step, step.models, matrix)
            matrix = np.where(is_measured[:, None], matrix, predicted)
        return matrix

    def _measured_rows(self, step: rules.MixingContext, matrix: np.ndarray, known: np.ndarray) -> np.ndarray:
        """The matrix with the rows of the measured clients of one group, by their places."""
        names = [step.federation.clients[k] for k in known.tolist()]
        gram = self._half_gram(step.server_state, names, step.federation, step.parameters)
        result = matrix.copy()
        if self._is_alike(gram, step.parameters):
            result[known] = np.asarray(rules.weighted_average(self.options, step))[known]
            return result
        clusters = step.federation.clusters[known] if self.clustered else np.full(len(known), -1)
        alike = alike_in_cluster(gram, clusters)
        inside = np.asarray(rules.weighted_average(self.options, step, within=rules.CLUSTERS))
        result[known[alike]] = inside[known[alike]]
        there = np.flatnonzero(step.present[known])
        if not alike[there].all():
            inside, others = known[there], ~alike[there]
            rows = self.predict_rows(_of_members(gram, there), step.federation.weights[inside])
            result[inside[others]] = 0.0
            result[np.ix_(inside[others], inside)] = rows[others]
        return result

    def _predict_clusters(self, step: rules.MixingContext, models: rules.RoundModels, matrix: Square) -> Square:
        """The matrix with the rows of clusters for the averages of those who share one and took part."""
        result, names = matrix.copy(), step.federation.clients
        before = params_by_client(models.server_state, INITIAL)
        is_in = step.present & shares_cluster(step.federation.clusters)
        for label in set(step.groups.tolist()):
            places = np.flatnonzero((step.groups == label) & is_in)
            _, first, cluster = np.unique(step.federation.clusters[places], return_index=True, return_inverse=True)
            if len(first) < 2:
                continue
            after = {names[k]: models.after[names[k]] for k in places}
            averages = matrix[np.ix_(places[first], places)]
            measured = measure_clusters(self._gram(after, before, step.federation, step.parameters), averages)
            if measured is not None:
                sizes = np.bincount(cluster, weights=step.federation.weights[places])
                result[np.ix_(places, places)] = (self._bounded_rows(*measured, sizes) @ averages)[cluster]
        return result

    def _bounded_rows(self, covariance: Square, noise: Vector, examples: np.ndarray) -> Square:
        """The predictions by numbers of examples, with no other's share above `--max-share`."""
        weights = np.asarray(examples, np.float64)
        return bound_others(prediction_rows(covariance, noise, weights / weights.sum()), self.max_other_share)

    def _is_alike(self, gram: HalfGram, group: rules.ParameterGroup) -> bool:
        """Return whether clients with these halves get one average: adapters that differ by less than their noise."""
        ratio = variance_over_noise(gram)
        return self.clustered and not group.is_head and ratio is not None and ratio < 1

    def measured(
        self, before: ServerState, after: ServerState, federation: Federation, matrices: rules.Matrices
    ) -> tuple[MeasuredSharing, ...]:
        """A row for each measured client and group of parameters; empty in a round that measured nobody.

        tau^2 = mean_k K_kk - mean_{k != l} K_kl is the variance between clients without bias; heads are compared inside
        their task. It is of all of a group together, not of a single value. Very many clients have no rows.
        """
        reports = subtree(after, HALVES)
        if len(reports) == len(subtree(before, HALVES)) or len(federation.clients) > MOST_EXACT:
            return ()
        positions = {name: k for k, name in enumerate(federation.clients)}
        groups: dict[tuple[rules.ParameterGroup, str], dict[str, str]] = {}
        for name in reports:
            model = tensors_of(subtree(reports, name), "first")
            for key in sorted(shared_params(model, self.options.share)):
                group = self.group_of(key, federation)
                task = federation.head_groups[positions[name]] if group.is_head else ""
                groups.setdefault((group, task), {}).setdefault(name, key)
        rows: list[MeasuredSharing] = []
        for (group, _), keys in groups.items():
            gram = self._half_gram(after, list(keys), federation, group)
            places = [positions[name] for name in keys]
            ratios = dict.fromkeys(range(len(places)), variance_over_noise(gram))
            if self.clustered and not self._is_alike(gram, group):
                for members, part in _by_cluster(gram, federation.clusters[places]):
                    if len(members) > 1:
                        ratios |= dict.fromkeys(members.tolist(), variance_over_noise(part))
            matrix = np.asarray(matrices(next(iter(keys.values()))))
            for index, (name, place) in enumerate(zip(keys, places, strict=True)):
                weights = matrix[place][matrix[place] > 0]
                rows.append(
                    MeasuredSharing(
                        client=name,
                        parameters=group.words,
                        own_share=float(matrix[place, place]),
                        effective_clients=float(np.exp(-(weights * np.log(weights)).sum())),
                        variance_over_noise=ratios[index],
                    )
                )
        return tuple(rows)


class Atlas(Kriging):
    """Predictions of clusters; once halves are measured averages of all or a cluster, and `kriging` for all others."""

    name = "atlas"
    fixed: ClassVar = {"within": rules.CLUSTERS}


def variance_over_noise(gram: HalfGram) -> float | None:
    """tau^2 / N from the inner products of halves, 0 at least; None of one client and without noise."""
    noise = measure(gram)[1]
    if len(noise) < 2 or noise.mean() <= 0:
        return None
    return max(0.0, variance_between(gram)) / float(noise.mean())


def variance_between(gram: HalfGram) -> float:
    """tau^2 from the inner products of halves, without bias and so of either sign; 0 of one client."""
    covariance, n = measure(gram)[0], len(gram) // 2
    own = float(np.trace(covariance)) / max(1, n)
    return 0.0 if n < 2 else own - (float(covariance.sum()) - own * n) / (n * (n - 1))
