"""The server's step where clients share what is above their cuts."""

import numpy as np
import pytest
import torch

from atlas_fl.aggregation.matrices import Federation
from atlas_fl.aggregation.mixing import average_initial, owners_of, sync_shared, tie_rows
from atlas_fl.aggregation.rules import RoundModels
from atlas_fl.methods.registry import RULES, find_method

CLIENTS = ("a", "b", "c", "d")
KEY = "layer.{}.q.lora_{}"


def federation(cuts=(1, 2, 1, None), clusters=(0, 0, 0, 0), seed: int = 0) -> Federation:
    graph = np.triu(np.random.default_rng(seed).random((4, 4)) + 0.1, 1)
    return Federation(
        clients=CLIENTS,
        weights=np.array([100.0, 200.0, 300.0, 400.0]),
        clusters=np.array(clusters),
        adjacency=graph + graph.T,
        head_groups=("x", "x", "y", "y"),
        layer_of={f"layer.{layer}.q": layer for layer in range(3)},
        cuts=cuts,
    )


def models(fed: Federation) -> dict[str, dict[str, torch.Tensor]]:
    """Everyone's own below its cut and everyone's alike above it."""
    source, found = torch.Generator().manual_seed(0), {}
    common = {KEY.format(n, x): torch.randn(2, 2, generator=source) for n in range(3) for x in "AB"}
    for name, cut in zip(fed.clients, fed.cuts):
        own = {key: torch.randn(2, 2, generator=source) for key in common}
        found[name] = {key: common[key] if cut is not None and int(key[6]) >= cut else own[key] for key in common}
        found[name]["head.w"] = torch.randn(2, generator=source)
    return found


def test_who_shares_a_block_is_cut_below_it_in_one_cluster() -> None:
    assert [owners_of(federation(), layer) for layer in range(3)] == [[], [[0, 2]], [[0, 1, 2]]]
    assert owners_of(federation(clusters=(0, 0, 1, 0)), 2) == [[0, 1]]


def test_the_row_of_a_set_by_hand() -> None:
    """Of 100 and 300 examples: a quarter of one row and three of the other; d has .1 / 4 + .2 * 3 / 4 = .175 in it."""
    matrix = np.array([[0.9, 0, 0, 0.1], [0, 1, 0, 0], [0.3, 0, 0.5, 0.2], [0.5, 0, 0, 0.5]])
    fed, present = federation(), np.ones(4, bool)
    expected = [[0.825, 0, 0, 0.175], [0, 1, 0, 0], [0.825, 0, 0, 0.175], [0.5, 0, 0, 0.5]]
    np.testing.assert_allclose(tie_rows(matrix, fed, 1, present=present), expected, atol=1e-15)
    only_c = tie_rows(matrix, fed, 1, present=np.array([False, True, True, True]))
    np.testing.assert_allclose(only_c[[0, 2]], [[0.8, 0, 0, 0.2]] * 2, atol=1e-15)
    assert tie_rows(matrix, fed, 0, present=present) is matrix
    assert np.array_equal(tie_rows(np.eye(4), fed, 2, present=present), np.eye(4))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("space", ["product", "factors"])
def test_after_every_rule_owners_hold_the_same_and_the_set_moves_as_its_definition_says(name: str, space: str) -> None:
    fed = federation()
    before, strategy = models(fed), find_method(name, space=space, eta=0.3)
    trained = {client: before[client] for client in ("a", "c", "d")}
    after = strategy.aggregate(strategy.init(before), before, trained, fed, round=1).client_models
    for key in before["a"]:
        for owners in owners_of(fed, int(key[6])) if "layer" in key else []:
            first, *others = (after[CLIENTS[k]][key] for k in owners)
            assert all(torch.equal(first, other) for other in others), key
    by_factors = ("fedavg_dynamic", "fedavg_stacked", "fedavg_with_residual")
    if name in ("median", "trimmed_mean") or (name in by_factors and space == "product"):
        return  # what is no weighted sum has no row, and these mix A and B apart
    seen = RoundModels(before=before, after={**before, **trained}, server_state=strategy.init(before))
    plain = strategy.matrices(federation(cuts=(None,) * 4), [True, False, True, True], round=1, models=seen)(
        KEY.format(2, "A")
    )
    rows, weights = plain[[0, 2]], np.array([100, 300]) / 400
    product = [before[n][KEY.format(2, "B")] @ before[n][KEY.format(2, "A")] for n in CLIENTS]
    wanted = sum(w * m * p for w, row in zip(weights, rows) for m, p in zip(row, product))
    if space == "product":
        found = after["b"][KEY.format(2, "B")] @ after["b"][KEY.format(2, "A")]
        torch.testing.assert_close(found, wanted.float(), atol=1e-5, rtol=1e-4)


def test_a_set_is_what_those_who_trained_have_of_it() -> None:
    fed = federation()
    before = models(fed)
    new = {**before["a"], KEY.format(1, "A"): torch.ones(2, 2), KEY.format(2, "A"): torch.zeros(2, 2)}
    found = sync_shared({**before, "a": new}, fed, ["a", "d"])
    assert found["a"] is new
    assert found["d"] is before["d"]
    assert torch.equal(found["c"][KEY.format(1, "A")], torch.ones(2, 2))
    assert torch.equal(found["b"][KEY.format(2, "A")], torch.zeros(2, 2))
    assert torch.equal(found["b"][KEY.format(1, "A")], before["b"][KEY.format(1, "A")])
    untouched = sync_shared(before, fed, ["d"])
    assert all(untouched[name] is before[name] for name in CLIENTS), "who is new is sent a model"
    key = KEY.format(2, "A")
    found = sync_shared({**before, "a": {**before["a"], key: torch.ones(2, 2)}}, fed, ["b", "a"])
    assert torch.equal(found["c"][key], torch.ones(2, 2)), "the first in the order of the run"


def test_who_is_drawn_to_nobody_outside_its_set_stays_to_the_bit() -> None:
    """Weights that sum to one only up to rounding would move a set by its last bits."""
    draws, fed, off = np.random.default_rng(0), federation(), 0
    for _ in range(20):
        matrix = np.eye(4)
        matrix[np.ix_([0, 2], [0, 2])] = draws.dirichlet([1.0, 1.0], size=2)
        off += np.average(matrix[[0, 2]], axis=0, weights=[100.0, 300.0]).sum() != 1.0
        assert np.array_equal(tie_rows(matrix, fed, 1, present=np.ones(4, bool)), np.eye(4))
    assert off, "none of these sums is off"


def test_a_set_begins_as_the_mean_over_its_owners_examples() -> None:
    fed = federation()
    before = {name: {KEY.format(2, "B"): torch.full((2, 2), float(k))} for k, name in enumerate(CLIENTS)}
    found = average_initial(before, fed)
    # (100 * 0 + 200 * 1 + 300 * 2) / 600
    for name in "abc":
        torch.testing.assert_close(found[name][KEY.format(2, "B")], torch.full((2, 2), 800 / 600))
    assert found["d"] is before["d"]
    alike = {
        name: {KEY.format(2, "B"): torch.randn(9, 9, generator=torch.Generator().manual_seed(0))} for name in CLIENTS
    }
    assert all(
        torch.equal(own[KEY.format(2, "B")], alike["a"][KEY.format(2, "B")])
        for own in average_initial(alike, fed).values()
    )
