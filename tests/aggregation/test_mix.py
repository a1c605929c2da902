import numpy as np
import pytest
import torch

from atlas_fl.aggregation.mixing import components_of, groups_of, resize_ranks
from atlas_fl.aggregation.rules import StrategyOptions, mix
from atlas_fl.errors import ProtocolError

CLIENTS = ("a", "b", "c")
MATRIX = np.array([[0.7, 0.2, 0.1], [0.3, 0.4, 0.3], [0.0, 0.5, 0.5]])


def two(_rank):
    return 2.0


def by_root(rank):
    return 16 / rank**0.5


def model(seed, rank, *, d_in=20, d_out=14, labels=2):
    draw = torch.Generator().manual_seed(seed)
    return {
        "q.lora_A": torch.randn(rank, d_in, generator=draw),
        "q.lora_B": torch.randn(d_out, rank, generator=draw),
        "head.weight": torch.randn(labels, d_in, generator=draw),
        "head.bias": torch.randn(labels, generator=draw),
    }


def models(ranks=(2, 5, 3), **sizes):
    return {client: model(seed, rank, **sizes) for seed, (client, rank) in enumerate(zip(CLIENTS, ranks))}


def run(by_client, matrix=MATRIX, *, share=("A", "B", "head"), space="product", align="pad", scale=two):
    options = StrategyOptions(share=share, space=space, align=align, scale=scale)
    return mix(by_client, lambda _: matrix, tuple(by_client), options)


def update(params, scale=two):
    a, b = params["q.lora_A"].double().numpy(), params["q.lora_B"].double().numpy()
    return scale(len(a)) * b @ a


def truncated(matrix, rank):
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return (left[:, :rank] * values[:rank]) @ right[:rank]


# (d_in, d_out): taller, wider and square; ranks that together stay below the sides, and that reach them
@pytest.mark.parametrize("sizes", [(20, 14), (14, 20), (16, 16), (9, 7), (7, 9), (5, 40), (40, 5)])
@pytest.mark.parametrize("scale", [two, by_root])
def test_product_space_is_the_best_approximation_of_the_dense_sum(sizes, scale):
    held = models(d_in=sizes[0], d_out=sizes[1])
    mixed = run(held, scale=scale)
    dense = [update(params, scale) for params in held.values()]
    for k, client in enumerate(CLIENTS):
        exact = sum(weight * one for weight, one in zip(MATRIX[k], dense))
        best = truncated(exact, len(held[client]["q.lora_A"]))
        got = update(mixed.by_client[client], scale)
        assert np.linalg.norm(got - best) <= 1e-6 * np.linalg.norm(exact)
        lost = np.linalg.norm(exact - best) ** 2 / np.linalg.norm(exact) ** 2
        assert mixed.discarded[client] == pytest.approx(lost, abs=1e-12)


def test_product_of_rank_one_updates_by_hand():
    # client a holds 2 e1 e1^T, client b holds 8 e2 e2^T; half of each, and rank one keeps the larger
    held = {
        "a": {"q.lora_A": torch.tensor([[1.0, 0]]), "q.lora_B": torch.tensor([[1.0], [0]])},
        "b": {"q.lora_A": torch.tensor([[0, 2.0]]), "q.lora_B": torch.tensor([[0], [2.0]])},
    }
    mixed = run(held, np.full((2, 2), 0.5))
    # 0.5 * 8 = 4 = 2 * B A with B = A / 2 in size: A = sqrt(4), B = sqrt(4) / 2
    assert mixed.by_client["a"]["q.lora_A"].tolist() == [[0.0, 2.0]]
    assert mixed.by_client["a"]["q.lora_B"].tolist() == [[0.0], [1.0]]
    assert mixed.discarded == {"a": pytest.approx(1 / 17), "b": pytest.approx(1 / 17)}


def test_factors_are_balanced_and_their_signs_fixed():
    params = run(models()).by_client["b"]
    a, b = params["q.lora_A"].double(), 2 * params["q.lora_B"].double()
    assert torch.allclose(a @ a.T, b.T @ b, atol=1e-5)
    assert torch.allclose(a @ a.T, torch.diag((a @ a.T).diagonal()), atol=1e-5)
    assert (a.gather(1, a.abs().argmax(1, keepdim=True)) > 0).all()


def test_rotating_the_factors_changes_nothing_in_product_space():
    held = {client: {key: tensor.double() for key, tensor in params.items()} for client, params in models().items()}
    turn = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64))[0]
    turned = {**held["b"], "q.lora_A": turn @ held["b"]["q.lora_A"], "q.lora_B": held["b"]["q.lora_B"] @ turn.T}
    first, second = run(held).by_client, run({**held, "b": turned}).by_client
    for client in CLIENTS:
        for key in ("q.lora_A", "q.lora_B"):
            assert torch.allclose(first[client][key], second[client][key], rtol=0, atol=1e-9)
    apart = [run(one, space="factors").by_client["a"] for one in (held, {**held, "b": turned})]
    assert np.abs(update(apart[0]) - update(apart[1])).max() > 0.1, "factor space is not invariant"


@pytest.mark.parametrize("sizes", [(20, 14), (7, 9), (9, 7)])
@pytest.mark.parametrize("ranks", [(2, 5, 3), (3, 3, 3)])
@pytest.mark.parametrize("matrix", [MATRIX, np.full((3, 3), 1 / 3)], ids=["personal", "average"])
def test_a_zero_product_stays_trainable(sizes, ranks, matrix):
    held = models(ranks=ranks, d_in=sizes[0], d_out=sizes[1])
    held = {client: {**params, "q.lora_B": torch.zeros_like(params["q.lora_B"])} for client, params in held.items()}
    mixed = run(held, matrix)
    for client, params in mixed.by_client.items():
        a, own = params["q.lora_A"].double(), held[client]["q.lora_A"].double()
        assert not params["q.lora_B"].any()
        gram = a @ a.T
        assert torch.allclose(gram, torch.eye(len(a), dtype=torch.float64) * gram[0, 0], atol=1e-5), "orthogonal"
        assert float(gram[0, 0]) == pytest.approx(float(own.square().sum(1).mean()), rel=1e-5)
        assert np.linalg.matrix_rank(torch.cat([a, own]).numpy(), tol=1e-4) == len(a), "in the span of its own A"
        assert mixed.discarded[client] == 0


def test_directions_beyond_the_products_rank_are_spare():
    # all B but one column of one client are zero: the sum has rank one
    held = {client: {**params, "q.lora_B": params["q.lora_B"] * 0} for client, params in models().items()}
    held["b"]["q.lora_B"][:, 0] = 1.0
    mixed = run(held)
    for client, params in mixed.by_client.items():
        a, b = params["q.lora_A"].double(), params["q.lora_B"].double()
        assert update(params) == pytest.approx(MATRIX[CLIENTS.index(client), 1] * update(held["b"]), abs=1e-5)
        assert (a.norm(dim=1) > 0).all()
        assert not b[:, 1:].any()
        off = (a @ a.T).fill_diagonal_(0)
        assert float(off.abs().max()) < 1e-4


def test_a_rank_above_the_width_is_filled_too():
    held = models(ranks=(6, 9, 7), d_in=4, d_out=5)
    params = run(held).by_client["b"]
    assert params["q.lora_A"].shape == (9, 4)
    assert (params["q.lora_A"].norm(dim=1) > 1e-3).all()
    dense = [update(one) for one in held.values()]
    assert update(params) == pytest.approx(sum(w * one for w, one in zip(MATRIX[1], dense)), abs=1e-4)


def test_opposite_updates_cancel_to_zero_and_stay_trainable():
    first = model(0, 3)
    held = {"a": first, "b": {**first, "q.lora_B": -first["q.lora_B"]}}
    mixed = run(held, np.full((2, 2), 0.5)).by_client["a"]
    assert not mixed["q.lora_B"].any()
    assert (mixed["q.lora_A"].norm(dim=1) > 0.1).all()


@pytest.mark.parametrize(
    ("align", "a_of_b", "b_of_b"),
    [("pad", [[2.5, 1.5], [6, 4.5]], [[2.5, 4.5]]), ("truncate", [[2.5, 1.5], [8, 6]], [[2.5, 6]])],
)
def test_padded_and_truncated_factors_by_hand(align, a_of_b, b_of_b):
    held = {
        "a": {"q.lora_A": torch.tensor([[1.0, 0]]), "q.lora_B": torch.tensor([[4.0]])},
        "b": {"q.lora_A": torch.tensor([[3.0, 2], [8, 6]]), "q.lora_B": torch.tensor([[2.0, 6]])},
    }
    mixed = run(held, np.array([[0.5, 0.5], [0.25, 0.75]]), space="factors", align=align).by_client
    assert mixed["a"]["q.lora_A"].tolist() == [[2, 1]]
    assert mixed["a"]["q.lora_B"].tolist() == [[3]]
    assert mixed["b"]["q.lora_A"].tolist() == a_of_b
    assert mixed["b"]["q.lora_B"].tolist() == b_of_b


def test_truncation_follows_who_is_connected_and_no_one_else():
    # c (rank 1) reaches a only through b; d mixes with e alone
    ranks = {"a": 4, "b": 4, "c": 1, "d": 3, "e": 3}
    held = {client: model(seed, rank) for seed, (client, rank) in enumerate(ranks.items())}
    matrix = np.eye(5)
    matrix[:3, :3] = [[0.5, 0.5, 0], [0.3, 0.4, 0.3], [0, 0.5, 0.5]]
    matrix[3:, 3:] = 0.5
    mixed = run(held, matrix, space="factors", align="truncate").by_client
    assert torch.equal(mixed["a"]["q.lora_A"][1:], held["a"]["q.lora_A"][1:])
    assert not torch.equal(mixed["a"]["q.lora_A"][:1], held["a"]["q.lora_A"][:1])
    assert torch.allclose(mixed["d"]["q.lora_A"], (held["d"]["q.lora_A"] + held["e"]["q.lora_A"]) / 2)


def test_factor_space_averages_s_times_b():
    held = models(ranks=(4, 16, 4))
    mixed = run(held, space="factors", scale=by_root).by_client
    b = [by_root(rank) * held[client]["q.lora_B"].double() for client, rank in zip(CLIENTS, (4, 16, 4))]
    expected = (0.7 * b[0] + 0.2 * b[1][:, :4] + 0.1 * b[2]) / by_root(4)
    assert torch.allclose(mixed["a"]["q.lora_B"].double(), expected, atol=1e-5)


def test_rows_that_no_source_supplies_stay_trainable_and_leave_the_function():
    # a is absent: it gets the average of b and c, whose rank is 2
    held = {"a": model(0, 4), "b": model(1, 2), "c": model(2, 2)}
    mixed = run(held, np.array([[0, 0.5, 0.5]] * 3), space="factors").by_client
    assert torch.equal(mixed["a"]["q.lora_A"][2:], held["a"]["q.lora_A"][2:])
    assert not mixed["a"]["q.lora_B"][:, 2:].any()
    assert update(mixed["a"]) == pytest.approx(update(mixed["b"]), abs=1e-5)


@pytest.mark.parametrize("share", [("A",), ("B",), ("head",), ("A", "B"), ("B", "head")])
def test_only_what_is_shared_moves(share):
    held = models()
    mixed = run(held, share=share, space="factors").by_client
    for client in CLIENTS:
        for key, tensor in held[client].items():
            word = "head" if key.startswith("head.") else key[-1]
            assert (mixed[client][key] is not tensor) == (word in share)
            assert torch.equal(mixed[client][key], tensor) == (word not in share)


def test_sharing_the_head_alone_is_the_same_in_both_spaces():
    held = models()
    first, second = (run(held, share=("head",), space=space).by_client for space in ("product", "factors"))
    for client in CLIENTS:
        assert torch.equal(first[client]["head.weight"], second[client]["head.weight"])
        assert first[client]["q.lora_A"] is held[client]["q.lora_A"]


@pytest.mark.parametrize("space", ["factors", "product"])
def test_plain_tensors_are_the_weighted_sum(space):
    held = {client: {**params, "norm.weight": params["head.bias"] * 3} for client, params in models().items()}
    mixed = run(held, space=space).by_client
    for key in ("head.weight", "head.bias", "norm.weight"):
        stack = np.stack([held[client][key].double().numpy() for client in CLIENTS])
        expected = np.tensordot(MATRIX, stack, 1)
        for k, client in enumerate(CLIENTS):
            assert mixed[client][key].numpy() == pytest.approx(expected[k], abs=1e-6)


@pytest.mark.parametrize("space", ["factors", "product"])
def test_the_identity_hands_back_the_very_same_models(space):
    held = models()
    mixed = run(held, np.eye(3), space=space).by_client
    assert all(mixed[client] is held[client] for client in CLIENTS)
    one_moves = np.eye(3)
    one_moves[0] = [0.5, 0.5, 0]
    partly = run(held, one_moves, space=space).by_client
    assert [partly[client] is held[client] for client in CLIENTS] == [False, True, True]


def test_a_swap_swaps_the_updates():
    held = {client: model(seed, 3) for seed, client in enumerate("ab")}
    swap = np.array([[0.0, 1.0], [1.0, 0.0]])
    for space in ("factors", "product"):
        mixed = run(held, swap, space=space).by_client
        assert update(mixed["a"]) == pytest.approx(update(held["b"]), abs=1e-5)
        assert update(mixed["b"]) == pytest.approx(update(held["a"]), abs=1e-5)
        assert torch.equal(mixed["a"]["head.weight"], held["b"]["head.weight"])


def test_equal_rows_and_ranks_share_their_tensors():
    held = {client: model(seed, 2) for seed, client in enumerate(CLIENTS)}
    for space in ("factors", "product"):
        mixed = run(held, np.full((3, 3), 1 / 3), space=space).by_client
        assert all(mixed["a"][key] is mixed["c"][key] for key in mixed["a"])


def test_every_tensor_owns_its_memory():
    held = {client: model(seed, 2) for seed, client in enumerate(CLIENTS)}
    for space in ("factors", "product"):
        for params in run(held, space=space).by_client.values():
            for tensor in params.values():
                assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
                assert tensor.is_contiguous()


@pytest.mark.parametrize("space", ["factors", "product"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_are_kept(space, dtype):
    held = {client: {key: tensor.to(dtype) for key, tensor in one.items()} for client, one in models().items()}
    mixed = run(held, space=space).by_client
    assert {tensor.dtype for params in mixed.values() for tensor in params.values()} == {dtype}
    wanted = run(models(), space=space).by_client["a"]["head.weight"]
    assert torch.allclose(mixed["a"]["head.weight"].float(), wanted, atol=2e-2)


def test_matrices_may_be_a_mapping_and_differ_by_name():
    held = models()
    matrices = {key: np.eye(3) if key.startswith("head.") else MATRIX for key in held["a"]}
    mixed = mix(held, matrices.__getitem__, CLIENTS, StrategyOptions(scale=two)).by_client
    assert mixed["a"]["head.weight"] is held["a"]["head.weight"]
    assert update(mixed["a"]) == pytest.approx(update(run(held).by_client["a"]), abs=1e-6)


def test_a_missing_tensor_and_a_wrong_shape_are_named():
    held = models()
    del held["c"]["head.bias"]
    with pytest.raises(ProtocolError, match=r"c has no head\.bias, but clients that it mixes with do"):
        run(held)
    wide = {**models(), "b": model(1, 5, labels=6)}
    with pytest.raises(ProtocolError, match=r"head.weight has the shapes \[\(2, 20\), \(6, 20\)\]; clients that mix"):
        run(wide)
    apart = np.eye(3)
    apart[0] = [0.5, 0, 0.5]
    assert run(wide, apart).by_client["b"] is wide["b"]


@pytest.mark.parametrize("rank", [3, 7])
def test_realign_up_keeps_the_function_and_adds_live_directions(rank):
    params = model(4, 3)
    grown = resize_ranks(params, {"q": rank}, by_root)
    assert grown["q.lora_A"].shape == (rank, 20)
    assert update(grown, by_root) == pytest.approx(update(params, by_root), abs=1e-4)
    a = grown["q.lora_A"].double()
    assert (a.norm(dim=1) > 0.1).all()
    assert not grown["q.lora_B"][:, 3:].any()
    if rank > 3:
        assert float((a @ a.T).fill_diagonal_(0).abs().max()) < 1e-4


def test_realign_down_is_the_best_approximation():
    params = model(4, 6)
    cut = resize_ranks(params, {"q": 2}, by_root)
    assert update(cut, by_root) == pytest.approx(truncated(update(params, by_root), 2), abs=1e-4)
    assert cut["head.weight"] is params["head.weight"]


def test_realign_to_the_same_rank_changes_nothing():
    params = model(4, 6)
    assert all(tensor is params[key] for key, tensor in resize_ranks(params, {"q": 6}, two).items())


def test_the_order_of_names_changes_no_bit():
    """A model that was read from a file has another order than one that was trained."""
    by_client = {
        client: {f"{block}.{key}": value for block in range(12) for key, value in model(10 * seed + block, 3).items()}
        for seed, client in enumerate(CLIENTS)
    }
    turned = {client: dict(reversed(params.items())) for client, params in by_client.items()}
    there, back = run(by_client), run(turned)
    assert there.discarded == back.discarded
    for client in CLIENTS:
        assert all(torch.equal(there.by_client[client][key], back.by_client[client][key]) for key in turned[client])


def test_equal_rows_are_found_once_and_identity_rows_not_at_all():
    matrix = np.array([[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.8, 0, 0], [0, 0, 0, 1]])
    (group,) = groups_of(matrix)
    assert group.sources == (0, 1)
    assert group.rows.tolist() == [[0.5, 0.5], [0.2, 0.8]]
    assert group.targets == ((0, 1), (2,))
    assert group.everyone == (0, 1, 2)


def test_rows_with_other_support_are_other_groups():
    matrix = np.array([[0.5, 0.5, 0], [0, 1, 0], [0, 0.5, 0.5]])
    assert [group.sources for group in groups_of(matrix)] == [(0, 1), (1, 2)]
    assert groups_of(np.eye(3)) == ()


def test_a_swap_is_not_the_identity():
    first, second = groups_of(np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert (first.sources, first.targets) == ((1,), ((0,),))
    assert (second.sources, second.targets) == ((0,), ((1,),))


def test_components_are_connected_clients():
    matrix = np.array([[1, 0, 0, 0], [0, 0.5, 0, 0.5], [0, 0, 1, 0], [0, 0, 0, 1]])
    assert components_of(matrix) == (0, 1, 2, 1)
