import pytest
import torch

from atlas_fl.errors import ConfigError, ModelError
from atlas_fl.sparse.masks import MASKS, make_mask

WEIGHTS = {"w": torch.tensor([[0.1, -3.0], [2.0, -0.5]]), "b": torch.tensor([1.0, -0.2])}
SCORES = {"w": torch.tensor([[9.0, 1.0], [2.0, 8.0]]), "b": torch.tensor([3.0, 4.0])}


def test_the_five_strategies_are_those_that_were_promised() -> None:
    assert set(MASKS) == {"least_sensitive", "most_sensitive", "lowest_magnitude", "highest_magnitude", "random"}


@pytest.mark.parametrize(
    ("strategy", "w", "b"),
    [
        ("least_sensitive", [[0, 1], [1, 0]], [0, 0]),
        ("most_sensitive", [[1, 0], [0, 1]], [0, 0]),
        ("lowest_magnitude", [[1, 0], [0, 0]], [0, 1]),
        ("highest_magnitude", [[0, 1], [1, 0]], [0, 0]),
    ],
)
def test_two_of_six_by_hand(strategy: str, w: list[list[int]], b: list[int]) -> None:
    mask = make_mask(strategy, WEIGHTS, sparsity=2 / 3, scores=SCORES)
    assert mask["w"].int().tolist() == w
    assert mask["b"].int().tolist() == b


def test_by_layer_every_parameter_keeps_its_share() -> None:
    mask = make_mask("highest_magnitude", WEIGHTS, sparsity=0.5, scope="layer")
    assert mask["w"].int().tolist() == [[0, 1], [1, 0]]
    assert mask["b"].int().tolist() == [1, 0]


def test_a_random_mask_follows_the_seed_and_the_names_alone() -> None:
    params = {"a": torch.zeros(40, 5), "b": torch.zeros(30)}
    first, again, other = (make_mask("random", params, sparsity=0.7, seed=seed) for seed in (1, 1, 2))
    turned = make_mask("random", {"b": torch.ones(30), "a": torch.ones(40, 5)}, sparsity=0.7, seed=1)
    assert all(torch.equal(first[name], again[name]) and torch.equal(first[name], turned[name]) for name in params)
    assert any(not torch.equal(first[name], other[name]) for name in params)


def test_what_is_missing_or_out_of_range_is_said_in_one_line() -> None:
    for sparsity in (0.0, 1.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="above 0 and below 1"):
            make_mask("random", WEIGHTS, sparsity=sparsity, seed=0)
    with pytest.raises(ConfigError, match="did you mean 'random'"):
        make_mask("randon", WEIGHTS, sparsity=0.5)
    with pytest.raises(ConfigError, match="unknown mask scope 'block'"):
        make_mask("random", WEIGHTS, sparsity=0.5, seed=0, scope="block")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'random' needs a seed"):
        make_mask("random", WEIGHTS, sparsity=0.5)
    with pytest.raises(ConfigError, match="has no scores"):
        make_mask("least_sensitive", WEIGHTS, sparsity=0.5)
    with pytest.raises(ModelError, match=r"scores of 'b' have the shape none, its weights \(2,\)"):
        make_mask("least_sensitive", WEIGHTS, sparsity=0.5, scores={"w": SCORES["w"]})
    with pytest.raises(ModelError, match=r"scores of 'w' have the shape \(4,\)"):
        make_mask("most_sensitive", WEIGHTS, sparsity=0.5, scores={"w": torch.ones(4), "b": SCORES["b"]})
