"""What every registered strategy must hold: being listed is being tested."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from atlas_fl.aggregation.matrices import Federation
from atlas_fl.aggregation.rules import RoundModels, twice_the_rank
from atlas_fl.errors import ConfigError
from atlas_fl.methods.fedplora import FedAvgByRankOne
from atlas_fl.methods.frozen_part import WithFrozenPart
from atlas_fl.methods.registry import ALIASES, RULES, find_method
from atlas_fl.params import flatten_by_client, flatten_state, unflatten_by_client, unflatten_state
from tests.aggregation.federations import federation_of, server_step
from tests.second_model import combine

CLIENTS = ("movie-0", "movie-1", "movie-2", "trec-0", "trec-1")
TASKS = ("movie", "movie", "movie", "trec", "trec")
LABELS = {"movie": 2, "trec": 6}
RANKS, EQUAL_RANKS = (2, 6, 4, 3, 8), (4, 4, 4, 4, 4)
KEYS = ("layer.0.q.lora_A", "layer.1.q.lora_A", "head.weight")
"""A name of each of the `parts` of a model."""
BLOCKS = np.array([0, 0, 0, 1, 1])
INSIDE = {"within": "clusters"}
BEGIN_IN_CLUSTERS = {"atlas", "kriging"}
"""Rules that average inside clusters only until they have measured, over all clients, who belongs together."""
CLUSTERED = [name for name in RULES if find_method(name, **INSIDE).clustered and name not in BEGIN_IN_CLUSTERS]
COMMUNICATING = [name for name in RULES if name != "local"]
CUTS = {"bipartition_round": 0, "bipartition_norm": 48.0, "bipartition_ratio": 1.0}
OPTIONS = [
    # updates drawn at random are nearly orthogonal: with a small alpha, rows of pfedgraph would be those of local
    # and clients would not pull against each other enough for cfl and fedtreelora to part them
    # and no test would take any of them for neighbours
    # and the second of so many rounds is one of HiLoRA's adapter of all
    {"gram_alpha": 8.0, **CUTS, "tree_threshold": -1.0, "stb_zeta": 200.0, "stb_c": 0.0, "rounds": 6, **words}
    for words in (
        {"space": "product"},
        {"space": "factors", "align": "truncate", "bipartition_norm": 12.0},
        {"layer_weighting": "importance", "gram_by": "layer"},
    )
]
IDS = ["product", "truncate", "by-layer"]
OF_GRAPHS = ("atlas_laplacian", "atlas", "kriging", "pfedgraph", "mta")
"""Rules that read more of the options than space and alignment: the Laplacian's, or `gram_by`."""


def cases(names):
    """Each of these rules with all options that it reads, as `parametrize` takes them."""
    found = [
        pytest.param(name, options, id=f"{name}-{word}")
        for name, (word, options) in product(names, zip(IDS, OPTIONS, strict=True))
        if name in OF_GRAPHS or word in IDS[:2]
    ]
    return pytest.mark.parametrize(("name", "options"), found)


def model(seed, rank, labels):
    draw = torch.Generator().manual_seed(seed)
    return {
        "layer.0.q.lora_A": torch.randn(rank, 12, generator=draw),
        "layer.0.q.lora_B": torch.randn(10, rank, generator=draw),
        "layer.1.q.lora_A": torch.randn(rank, 12, generator=draw),
        "layer.1.q.lora_B": torch.randn(10, rank, generator=draw),
        "head.weight": torch.randn(labels, 12, generator=draw),
    }


def models(seed, ranks=RANKS):
    return {
        client: model(seed + k, rank, LABELS[task]) for k, (client, rank, task) in enumerate(zip(CLIENTS, ranks, TASKS))
    }


@pytest.fixture
def federation():
    rng = np.random.default_rng(3)
    graph = np.triu(rng.random((5, 5)) + 0.1, 1)
    graph = (graph + graph.T) * (BLOCKS[:, None] == BLOCKS[None, :])
    return Federation(
        clients=CLIENTS,
        weights=np.array([200.0, 100, 300, 50, 150]),
        clusters=BLOCKS,
        adjacency=graph,
        head_groups=TASKS,
        importance=rng.dirichlet(np.ones(2), 5),
        layer_of={"layer.0.q": 0, "layer.1.q": 1},
    )


COMMON = model(200, max(RANKS), max(LABELS.values()))


def class_means(params):
    """Class features of a client whose features of a class are its row of the head."""
    head = params["head.weight"]
    return {"counts": head.abs().sum(1).round().long() + 1, "means": head, "variances": head.square().mean(1)}


def halves(params):
    """What either half of the examples makes of a model: something that all have in common, its own, and less noise."""
    return {
        f"{half}/{key}": 2 * COMMON[key][: len(tensor), : tensor.shape[1]] + tensor / 2 + sign * tensor.roll(1, -1) / 4
        for half, sign in (("first", 1), ("second", -1))
        for key, tensor in params.items()
    }


REPORTS = {"class_features": class_means, "halves": halves}


def first_state(name, options, federation, before):
    """The server state after a first round in which everyone took part."""
    strategy = find_method(name, **options)
    updates = {client: {key: tensor.flip(-1) for key, tensor in params.items()} for client, params in before.items()}
    return server_step(strategy, strategy.init(before), before, updates, federation, round=1).server_state


def informed(name, options, state, updates):
    """The server state with all that a run tells the server before it aggregates: reports, and chosen clusters."""
    strategy = find_method(name, **options)
    chosen = {"clusters": {client: torch.tensor(k % 2) for k, client in enumerate(CLIENTS)}} if name == "ifca" else {}
    report = REPORTS.get(strategy.report)
    reports = {client: report(params) for client, params in updates.items()} if report else {}
    return strategy.record_reports({**state, **chosen}, reports) if reports else {**state, **chosen}


def step(name, options, federation, updates, *, before=None, state=None, round=2):
    """(server state, models) after the server step of a second round.

    `before` are the models of the last aggregation, `state` is that of a first round of everyone.
    """
    before = models(100, accepted_ranks(name, options, federation)) if before is None else before
    state = first_state(name, options, federation, before) if state is None else state
    state = informed(name, options, state, updates)
    done = server_step(find_method(name, **options), state, before, updates, federation, round=round)
    return done.server_state, done.client_models


def rows_of(name, options, federation, updates):
    """The matrices of the rows that `step` applies."""
    before = models(100, accepted_ranks(name, options, federation))
    state, _ = step(name, options, federation, updates)
    shown = RoundModels(before=before, after={**before, **updates}, server_state=state)
    present = [client in updates for client in CLIENTS]
    return find_method(name, **options).matrices(federation, present, round=2, models=shown)


def accepted_ranks(name, options, federation):
    """Ranks of the clients that the strategy takes: different ones where it can."""
    try:
        find_method(name, **options).check(models(0), federation)
    except ConfigError:
        return EQUAL_RANKS
    return RANKS


def function(params, module):
    return 2 * params[f"{module}.lora_B"].double() @ params[f"{module}.lora_A"].double()


def computed(state, start):
    """What clients compute with after a step: their models, stacked on what a strategy has them hold frozen."""
    held = FedAvgByRankOne() if "whole" in state else WithFrozenPart()
    frozen = {client: held.frozen_part(state, client) for client in start}
    return {
        client: combine(params, frozen[client], "frozen", weight=1.0, scale=twice_the_rank)
        if frozen[client]
        else params
        for client, params in start.items()
    }


def parts(params):
    """What a client computes with: both updates and the head."""
    return [function(params, "layer.0.q"), function(params, "layer.1.q"), params["head.weight"].double()]


def distance(one, other):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(parts(one), parts(other)))


MAY_BE_ALONE = frozenset({"krum", "cfl", "ifca", "fedtreelora", "fedavg_in_tree_and_outside"})
"""Rules that leave some models as they are: Krum the one that it hands to everyone, the others whoever has no other of
its task in a cluster that follows from updates or losses."""


@cases(COMMUNICATING)
def test_a_communicating_rule_changes_every_participating_client(name, options, federation):
    updates = models(0, accepted_ranks(name, options, federation))
    state, start = step(name, options, federation, updates)
    matrices = rows_of(name, options, federation, updates)
    still = np.array([np.diag(matrices(key)) == 1 for key in KEYS]).T
    assert not still.all() and (name in MAY_BE_ALONE or not still.any())
    for client, is_still in zip(CLIENTS, still):
        for part, before, own in zip(parts(computed(state, start)[client]), parts(updates[client]), is_still):
            assert own or float((part - before).norm() / before.norm()) > 1e-4, client
        assert {key: tensor.shape for key, tensor in start[client].items()} == {
            key: tensor.shape for key, tensor in updates[client].items()
        }


AS_FEDIT = ("fedavg_by_rank_one", "fedavg_of_cores", "fedavg_of_heads")
"""Rules that are FedIT for models of one rank without anything between the factors."""
AS_FEDAVG = {
    # ranks are equal here, and what is looked at are products
    **dict.fromkeys(("fedavg", "fedavg_by_rank", "fedavg_in_levels", "fedavg_orthonormal"), KEYS),
    # each client takes itself out of what it is sent, or moves its own model to it
    **dict.fromkeys(("fedavg_of_others", "fedavg_with_variances"), KEYS),
    "classifier_collaboration": KEYS[:2],
    # the frozen part is of adapters, and so are norms
    **dict.fromkeys(
        ("fedavg_stacked", "fedavg_with_residual", "fedavg_with_rest", "fedavg_by_qr", "fedavg_by_norm", *AS_FEDIT),
        KEYS[2:],
    ),
    "fedavg_rotated": KEYS[2:],
    # the clusters here are the tasks
    **dict.fromkeys(("fedavg_cluster", "fedavg_cluster_routed", "atlas_no_laplacian"), KEYS[2:]),
}
"""What some rules do as FedAvg does, by one of its names; all else must differ, or laws would be about FedAvg alone."""


@cases(RULES)
def test_a_rule_differs_from_fedavg_and_from_local_training(name, options, federation):
    updates = models(0, EQUAL_RANKS)
    options = {**options, "space": find_method(name, **options).options.space}  # where some rules mix alone
    as_fedavg = AS_FEDAVG.get(name, ())
    if name in AS_FEDIT and options.get("space") == "factors":
        as_fedavg = KEYS
    own, average, alone = (
        computed(*step(rule, options, federation, updates, before=models(100, EQUAL_RANKS)))
        for rule in (name, "fedavg", "local")
    )
    for part, key in enumerate(KEYS):
        from_average, from_alone = (
            max(float((parts(own[client])[part] - parts(other[client])[part]).norm()) for client in CLIENTS)
            for other in (average, alone)
        )
        assert (from_average < 1e-4) if key in as_fedavg else (from_average > 0.1), key
        assert (from_alone == 0) if name == "local" else (from_alone > 0.1), key


@cases(RULES)
def test_a_client_without_others_trains_locally(name, options):
    layers = {"layer.0.q": 0, "layer.1.q": 1}
    alone = federation_of(CLIENTS[:1], tasks=TASKS[:1], importance=np.ones((1, 2)) / 2, layer_of=layers)
    before, update = ({CLIENTS[0]: models(seed)[CLIENTS[0]]} for seed in (100, 0))
    start = computed(*step(name, options, alone, update, before=before))
    assert distance(start[CLIENTS[0]], update[CLIENTS[0]]) < 1e-5


def test_local_changes_none(federation):
    updates = models(0)
    _, start = step("local", {}, federation, updates)
    assert all(start[client] is updates[client] for client in CLIENTS)
    assert not find_method("local").communicates


@cases(RULES)
def test_permuting_clients_permutes_results(name, options, federation):
    ranks = accepted_ranks(name, options, federation)
    order = [3, 0, 4, 2, 1]
    shuffled = replace(
        federation,
        clients=tuple(CLIENTS[k] for k in order),
        weights=federation.weights[order],
        clusters=federation.clusters[order],
        adjacency=federation.adjacency[np.ix_(order, order)],
        head_groups=tuple(TASKS[k] for k in order),
        importance=federation.importance[order],
    )
    updates = models(0, ranks)
    straight = computed(*step(name, options, federation, updates))
    moved = {CLIENTS[k]: updates[CLIENTS[k]] for k in order}
    held = models(100, ranks)
    before = {CLIENTS[k]: held[CLIENTS[k]] for k in order}
    other = computed(*step(name, options, shuffled, moved, before=before))
    assert list(other) == [CLIENTS[k] for k in order]
    assert max(distance(other[client], straight[client]) for client in CLIENTS) < 1e-5


@cases(RULES)
def test_identical_clients_are_a_fixed_point(name, options, federation):
    same = dict.fromkeys(CLIENTS, model(7, 4, 2))
    strategy = find_method(name, **options)
    first = server_step(strategy, strategy.init(same), same, same, federation, round=1)
    # what a strategy has clients hold frozen is not in what they begin the next round with
    held = first.client_models
    start = computed(*step(name, options, federation, held, before=held, state=first.server_state))
    assert max(distance(start[client], same[client]) for client in CLIENTS) < 1e-6


@pytest.mark.parametrize("present", [(1, 1, 1, 1, 1), (1, 0, 1, 0, 1), (0, 0, 0, 0, 0)])
@cases(RULES)
def test_rows_of_every_matrix_sum_to_one(name, options, federation, present):
    ranks = accepted_ranks(name, options, federation)
    updates = {client: params for client, params in models(0, ranks).items() if present[CLIENTS.index(client)]}
    matrices = rows_of(name, options, federation, updates)
    for key in models(0, ranks)["movie-0"]:
        assert matrices(key).sum(axis=1) == pytest.approx(np.ones(5))
        assert matrices(key).dtype == np.float64


@cases(RULES)
def test_heads_never_cross_tasks(name, options, federation):
    ranks = accepted_ranks(name, options, federation)
    updates, tasks = models(0, ranks), np.array(TASKS)
    matrix = rows_of(name, options, federation, updates)("head.weight")
    assert not matrix[tasks[:, None] != tasks[None, :]].any()
    other = {**updates, "trec-0": {**updates["trec-0"], "head.weight": updates["trec-0"]["head.weight"] + 1}}
    state = first_state(name, options, federation, models(100, ranks))
    options = {**options, "bipartition_norm": 1e9}  # where CFL cuts once more follows from heads, too
    first, second = (step(name, options, federation, one, state=state)[1] for one in (updates, other))
    assert all(torch.equal(first[c]["head.weight"], second[c]["head.weight"]) for c in CLIENTS[:3])


@cases(CLUSTERED)
def test_nothing_flows_between_clusters(name, options, federation):
    ranks = accepted_ranks(name, options, federation)
    updates, options = models(0, ranks), {**options, **INSIDE}
    other = {**updates, "trec-1": model(77, ranks[4], 6)}
    first, second = (step(name, options, federation, one)[1] for one in (updates, other))
    for client in CLIENTS[:3]:
        assert all(torch.equal(first[client][key], second[client][key]) for key in first[client])
    assert distance(first["trec-0"], second["trec-0"]) > 1e-3


@cases(CLUSTERED)
def test_an_undecided_client_is_alone(name, options, federation):
    ranks = accepted_ranks(name, options, federation)
    options = {**options, **INSIDE}
    graph = federation.adjacency.copy()
    graph[1], graph[:, 1] = 0, 0
    alone = replace(federation, clusters=np.array([0, -1, 0, 1, -1]), adjacency=graph)
    updates = models(0, ranks)
    _, start = step(name, options, alone, updates)
    assert start["movie-1"] is updates["movie-1"]
    assert name == "krum" or start["movie-0"] is not updates["movie-0"]


@cases(RULES)
def test_who_took_no_part_gives_nothing_to_an_average_and_its_held_model_to_a_graph(name, options, federation):
    ranks = accepted_ranks(name, options, federation)
    held, updates = models(100, ranks), models(0, ranks)
    absent = {client: params for client, params in updates.items() if client != "movie-2"}
    state = first_state(name, options, federation, held)
    start = computed(*step(name, options, federation, absent, before=held, state=state))
    other = {**held, "movie-2": model(55, ranks[2], 2)}
    changed = computed(*step(name, options, federation, absent, before=other, state=state))
    if name in ("local", "atlas_laplacian", "pfedgraph", "fedavg_by_distance", "fedavg_by_arrival"):
        assert start["movie-2"] is held["movie-2"], "it keeps its model"
        assert (distance(start["movie-0"], changed["movie-0"]) > 1e-4) == (name == "atlas_laplacian"), (
            "still a neighbour"
        )
    else:
        assert distance(start["movie-0"], changed["movie-0"]) == 0
        assert distance(start["movie-2"], held["movie-2"]) > 1e-2, "it gets the average all the same"


@cases(RULES)
def test_a_round_without_updates_leaves_averages_as_they_were(name, options, federation):
    ranks = accepted_ranks(name, options, federation)
    held = models(100, ranks)
    _, start = step(name, options, federation, {}, before=held)
    assert all(start[client] is held[client] for client in CLIENTS)


@cases(RULES)
def test_a_state_that_went_through_a_checkpoint_continues_with_the_same_bits(name, options, federation):
    ranks = accepted_ranks(name, options, federation)
    state, after = step(name, options, federation, models(0, ranks))
    flat = flatten_state(state)
    # a file has its tensors in the order of their names
    loaded_state = unflatten_state({path: flat[path].clone() for path in sorted(flat)})
    loaded = unflatten_by_client({key: tensor.clone() for key, tensor in flatten_by_client(after).items()})
    partly = {client: params for client, params in models(20, ranks).items() if client != "movie-0"}
    (first_state, first), (second_state, second) = (
        step(name, options, federation, partly, before=one, state=of_it, round=3)
        for one, of_it in ((after, state), (loaded, loaded_state))
    )
    assert all(torch.equal(first[client][key], second[client][key]) for client in CLIENTS for key in first[client])
    left, right = flatten_state(first_state), flatten_state(second_state)
    assert left.keys() == right.keys() and all(torch.equal(left[path], right[path]) for path in left)


def test_eta_zero_is_local_training(federation):
    updates = models(0)
    _, start = step("atlas_laplacian", {"eta": 0.0}, federation, updates)
    assert all(start[client] is updates[client] for client in CLIENTS)


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_its_strategy(alias):
    assert find_method(alias).name == ALIASES[alias]


@pytest.mark.parametrize("name", RULES)
def test_every_strategy_is_called_by_its_name(name):
    assert find_method(name).name == name
