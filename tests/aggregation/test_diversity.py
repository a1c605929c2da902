import numpy as np
import pytest
import torch

from atlas_fl.aggregation import distances
from atlas_fl.aggregation.distances import diversity, gram_distances, spread, update_gram

CLIENTS = ("a", "b", "c")


def scale(rank):
    return 8 / rank


def model(seed, rank):
    draw = torch.Generator().manual_seed(seed)
    return {
        f"{module}.lora_{factor}": torch.randn(*shape, generator=draw)
        for module in ("q", "v")
        for factor, shape in (("A", (rank, 11)), ("B", (9, rank)))
    }


@pytest.fixture
def held():
    return {client: model(seed, rank) for seed, (client, rank) in enumerate(zip(CLIENTS, (2, 5, 3)))}


def dense(params):
    rows = []
    for module in ("q", "v"):
        a, b = params[f"{module}.lora_A"].double().numpy(), params[f"{module}.lora_B"].double().numpy()
        rows.append((scale(len(a)) * b @ a).ravel())
    return np.concatenate(rows)


def test_the_gram_matrix_is_that_of_the_dense_updates(held):
    flat = np.stack([dense(params) for params in held.values()])
    gram = update_gram(held, CLIENTS, scale)
    assert gram == pytest.approx(flat @ flat.T)
    squares = ((flat[:, None] - flat[None, :]) ** 2).sum(-1)
    assert gram_distances(gram) == pytest.approx(squares)


def test_spread_is_zero_for_equal_models_and_one_for_opposite_ones():
    assert spread(np.ones(3), 1.0) == 0
    assert spread(np.ones(3), 1 - 1e-15) == 0, "rounding is no distance"
    assert spread(np.ones(2), 0.0) == pytest.approx(1.0)
    assert spread(np.zeros(2), 0.0) == 0
    # 1 and 3: mean 2, deviations 1, root mean square norm sqrt(5)
    assert spread(np.array([1.0, 9.0]), 4.0) == pytest.approx(1 / np.sqrt(5))


@pytest.mark.parametrize("clients", [CLIENTS, CLIENTS[:2]], ids=["more ranks than a module has", "fewer"])
def test_norms_and_spreads_are_those_of_the_dense_updates(held, clients):
    after = {client: model(seed + 10, 3) for seed, client in enumerate(CLIENTS)}
    report = diversity(held, after, clients=clients, scale=scale)
    for models, found in ((held, report.spread_before), (after, report.spread_after)):
        flat = np.stack([dense(models[client]) for client in clients])
        around = np.sqrt(np.square(flat - flat.mean(axis=0)).sum(axis=1).mean())
        assert found == pytest.approx(around / np.sqrt(np.square(flat).sum(axis=1).mean()))
    for client in clients:
        assert report.norms[client] == pytest.approx(np.linalg.norm(dense(held[client])))


def test_models_that_are_equal_have_no_spread(held):
    report = diversity(held, dict.fromkeys(CLIENTS, held["b"]), clients=CLIENTS, scale=scale)
    assert report.spread_after == 0


def test_rotating_the_factors_changes_nothing(held):
    turn = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(1)))[0]
    b = held["b"]
    turned = {**b, "q.lora_A": turn @ b["q.lora_A"], "q.lora_B": b["q.lora_B"] @ turn.T}
    report = diversity(held, {**held, "b": turned}, clients=CLIENTS, scale=scale)
    assert report.spread_after == pytest.approx(report.spread_before, rel=1e-5) and report.spread_before > 0


def test_clients_may_adapt_other_modules(held):
    del held["c"]["v.lora_A"], held["c"]["v.lora_B"]
    gram = update_gram(held, CLIENTS, scale)
    only_q = {client: {key: params[key] for key in ("q.lora_A", "q.lora_B")} for client, params in held.items()}
    assert gram[2] == pytest.approx(update_gram(only_q, CLIENTS, scale)[2])


def test_the_order_of_the_tensors_changes_no_bit(held):
    turned = {client: dict(reversed(params.items())) for client, params in held.items()}
    wide = {**held, "d": {f"{n}{key}": value for n in range(9) for key, value in model(n, 4).items()}}
    back = {**turned, "d": dict(reversed(wide["d"].items()))}
    names = (*CLIENTS, "d")
    assert np.array_equal(update_gram(wide, names, scale), update_gram(back, names, scale))


def test_rounding_between_equal_updates_is_no_distance():
    assert gram_distances(np.array([[1.0, 1 - 1e-15], [1 - 1e-15, 1.0]])).tolist() == [[0, 0], [0, 0]]


def test_the_mean_of_many_clients_is_formed_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"c-{k}" for k in range(7)]
    models = {name: {"m.lora_A": torch.randn(3, 4), "m.lora_B": torch.randn(5, 3)} for name in names}
    squares, mean = distances.squared_norms(models, names, lambda _: 2.0)
    monkeypatch.setattr(distances, "CLIENTS_AT_ONCE", 2)
    in_blocks, mean_in_blocks = distances.squared_norms(models, names, lambda _: 2.0)
    products = [2.0 * model["m.lora_B"].double() @ model["m.lora_A"].double() for model in models.values()]
    assert in_blocks.tolist() == squares.tolist()
    assert mean == pytest.approx(mean_in_blocks) == float((sum(products) / 7).square().sum())
