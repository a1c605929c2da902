"""TIES and DARE against the papers' steps, PEFT's own merges and numbers worked out by hand."""

import numpy as np
import pytest
import torch
from peft.utils.merge_utils import dare_linear, ties

from atlas_fl.methods.merging import Ties, trim
from atlas_fl.methods.registry import find_method
from tests.aggregation.federations import adapters_of, dense_update, federation_of, server_step

RANKS = (3, 3, 3)


def step(name, before, updates, *, weights=None, round=1, tasks=(), **words):
    fed = federation_of(before, weights=weights, tasks=tasks)
    return server_step(find_method(name, **words), {}, before, updates, fed, round=round).client_models


def vectors(rows):
    return {client: {"w": torch.tensor(row)} for client, row in zip("abc", rows)}


def test_ties_by_hand():
    """Half is kept: (4, 0, -3, 0), (-1, 2, 0, 0), (-2, 0, 3, 0); shares 1/2, 1/4, 1/4.

    Sums 1/2 * 4 - 1/4 - 1/2 > 0, 1/2 > 0, -3/2 + 3/4 < 0, 0: means 4 of the first, 2 of the second, -3 of the first.
    """
    start = [[1.0, 1.0, 1.0, 1.0]] * 3
    changes = [[4.0, 1.0, -3.0, 0.5], [-1.0, 2.0, 0.5, 0.0], [-2.0, 1.0, 3.0, -1.0]]
    trained = (np.array(start) + changes).tolist()
    found = step("ties", vectors(start), vectors(trained), weights=[2, 1, 1], ties_density=0.5, merge_scale=2.0)
    assert found["a"]["w"].tolist() == found["c"]["w"].tolist() == [1 + 2 * 4, 1 + 2 * 2, 1 - 2 * 3, 1]


@pytest.mark.parametrize("density", [0.1, 0.34, 0.5, 1.0])
@pytest.mark.filterwarnings("ignore:The density 1.0:UserWarning")
def test_ties_of_clients_that_count_alike_is_pefts(density):
    """PEFT keeps int(density n) values, and here n density is whole."""
    draw = torch.Generator().manual_seed(1)
    changes = [torch.randn(10, 10, generator=draw, dtype=torch.float64) for _ in range(4)]
    wanted = ties(changes, torch.ones(4, dtype=torch.float64), density)
    found = Ties(ties_density=density).merge([("x", 0.25, change) for change in changes], round=1, name="w")
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("space", ["product", "factors"])
@pytest.mark.parametrize("density", [0.2, 0.6])
def test_ties_is_the_papers_three_steps_on_the_changes(space, density):
    before, updates = adapters_of("abc", RANKS, seed=1), adapters_of("abc", RANKS, seed=2)
    shares = np.array([0.5, 0.125, 0.375])
    found = step("ties", before, updates, weights=shares, space=space, ties_density=density)

    def merged(sent, trained):
        changes = np.stack(trained) - np.stack(sent)
        flat = np.abs(changes).reshape(3, -1)
        kept = int(np.ceil(density * flat.shape[1]))
        for change, sizes in zip(changes, flat):  # trim
            order = np.argsort(-sizes)
            change.ravel()[order[kept:]] = 0
        elected = np.sign(np.tensordot(shares, changes, 1))  # elect
        result = np.zeros_like(elected)
        for place in np.ndindex(*result.shape):  # disjoint mean
            agree = [k for k in range(3) if np.sign(changes[(k, *place)]) == elected[place] != 0]
            if agree:
                result[place] = np.average([changes[(k, *place)] for k in agree], weights=shares[agree])
        return np.tensordot(shares, np.stack(sent), 1) + result

    def values(models, read):
        return [read(params).double().numpy() for params in models.values()]

    reads = {key: (lambda params, key=key: params[key]) for key in ("head.weight", "q.lora_A", "q.lora_B")}
    for key in ("head.weight",) if space == "product" else reads:
        wanted = merged(values(before, reads[key]), values(updates, reads[key]))
        assert found["b"][key].numpy() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    if space == "product":
        left, sizes, right = np.linalg.svd(merged(values(before, dense_update), values(updates, dense_update)))
        best = (left[:, :3] * sizes[:3]) @ right[:3]
        assert dense_update(found["b"]).numpy() == pytest.approx(best, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("name", "words"), [("ties", {"ties_density": 1.0}), ("dare", {"dare_drop": 0.0})])
@pytest.mark.parametrize("space", ["product", "factors"])
def test_with_nothing_dropped_and_no_quarrel_both_are_fedavg(name, words, space):
    before = adapters_of("abc", RANKS, seed=1)
    alike = {key: tensor.abs() for key, tensor in adapters_of("a", RANKS, seed=3)["a"].items()}
    updates = {
        client: {key: params[key] + (k + 1) * alike[key] for key in params}
        for k, (client, params) in enumerate(before.items())
    }
    if space == "product":  # a change of one sign in the dense update, too
        before = {client: {**params, "q.lora_B": torch.zeros(10, 3)} for client, params in before.items()}
        updates = {client: {**params, **{k: v.abs() for k, v in params.items()}} for client, params in updates.items()}
    weights = [1, 2, 4]
    found, mean = (
        step(rule, before, updates, weights=weights, space=space, **own)
        for rule, own in ((name, words), ("fedavg", {}))
    )
    for client in "abc":
        torch.testing.assert_close(dense_update(found[client]), dense_update(mean[client]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[client]["head.weight"], mean[client]["head.weight"])


def test_dare_is_fedavg_on_average_and_pefts_with_its_draws(monkeypatch):
    before, updates = adapters_of("abc", RANKS, seed=1), adapters_of("abc", RANKS, seed=2)
    words = {"space": "factors", "dare_drop": 0.8}
    mean = step("fedavg", before, updates, space="factors")["a"]["head.weight"]
    found = [step("dare", before, updates, round=round, **words)["a"]["head.weight"] for round in range(1, 1501)]
    assert not torch.equal(found[0], found[1]), "every round draws anew"
    spread = torch.stack(found).std(0) / len(found) ** 0.5
    assert bool(((torch.stack(found).mean(0) - mean).abs() < 5 * spread).all())

    changes = [updates[client]["head.weight"] - before[client]["head.weight"] for client in "abc"]
    kept = [torch.rand(2, 12, generator=torch.Generator().manual_seed(k)) < 0.2 for k in range(3)]
    draws = iter([*kept, *kept])  # 1 is kept, of PEFT's and of ours
    for name in ("bernoulli", "rand"):
        monkeypatch.setattr(torch, name, lambda *_, **__: next(draws).double())
    wanted = dare_linear(changes, torch.full((3,), 1 / 3), 0.2)
    shared = [(client, 1 / 3, change.double()) for client, change in zip("abc", changes)]
    found = find_method("dare", **words).merge(shared, round=1, name="head.weight")
    torch.testing.assert_close(found, wanted.double(), rtol=1e-6, atol=1e-6)


def test_a_value_of_dare_by_hand():
    """A change of 6 and one of -2 of shares 3/4 and 1/4: each is there, doubled, or not."""
    before, trained = vectors([[0.0], [0.0]]), vectors([[6.0], [-2.0]])
    seen = {step("dare", before, trained, weights=[3, 1], round=k)["b"]["w"].item() for k in range(1, 40)}
    assert seen == {0.0, 9.0, -1.0, 8.0}


def test_values_at_the_limit_stay_all():
    assert trim(torch.tensor([1.0, -1.0, 0.5, 1.0]), 0.25).tolist() == [1.0, -1.0, 0.0, 1.0]
