import pytest
import torch

from atlas_fl.errors import ConfigError, ModelError
from atlas_fl.sparse.masks import MASKS, calibrate_mask

WEIGHTS = {"w": torch.tensor([[0.1, -3.0], [2.0, -0.5]]), "b": torch.tensor([1.0, -0.2])}
SCORES = {"w": torch.tensor([[9.0, 1.0], [2.0, 8.0]]), "b": torch.tensor([3.0, 4.0])}
WORDS = {"names": ["w", "b"], "seed": 0}


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
    mask = calibrate_mask(lambda _: SCORES, WEIGHTS, strategy=strategy, sparsity=2 / 3, **WORDS)
    assert mask["w"].int().tolist() == w
    assert mask["b"].int().tolist() == b


def test_by_layer_every_parameter_keeps_its_share() -> None:
    mask = calibrate_mask(dict, WEIGHTS, strategy="highest_magnitude", sparsity=0.5, scope="layer", **WORDS)
    assert mask["w"].int().tolist() == [[0, 1], [1, 0]]
    assert mask["b"].int().tolist() == [1, 0]


def test_a_random_mask_follows_the_seed_and_the_names_alone() -> None:
    params = {"a": torch.zeros(40, 5), "b": torch.zeros(30)}
    words = {"names": params, "strategy": "random", "sparsity": 0.7}
    first, again, other = (calibrate_mask(dict, params, seed=seed, **words) for seed in (1, 1, 2))
    turned = calibrate_mask(dict, {"b": torch.ones(30), "a": torch.ones(40, 5)}, seed=1, **words)
    assert all(torch.equal(first[name], again[name]) and torch.equal(first[name], turned[name]) for name in params)
    assert any(not torch.equal(first[name], other[name]) for name in params)


def test_what_is_missing_or_out_of_range_is_said_in_one_line() -> None:
    for sparsity in (0.0, 1.0, -0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="above 0 and below 1"):
            calibrate_mask(dict, WEIGHTS, strategy="random", sparsity=sparsity, **WORDS)
    with pytest.raises(ConfigError, match="did you mean 'random'"):
        calibrate_mask(dict, WEIGHTS, strategy="randon", sparsity=0.5, **WORDS)
    with pytest.raises(ConfigError, match="unknown mask scope 'block'"):
        calibrate_mask(dict, WEIGHTS, strategy="random", sparsity=0.5, scope="block", **WORDS)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"scores of 'b' have the shape none, its weights \(2,\)"):
        calibrate_mask(lambda _: {"w": SCORES["w"]}, WEIGHTS, strategy="least_sensitive", sparsity=0.5, **WORDS)
    bent = {"w": torch.ones(4), "b": SCORES["b"]}
    with pytest.raises(ModelError, match=r"scores of 'w' have the shape \(4,\)"):
        calibrate_mask(lambda _: bent, WEIGHTS, strategy="most_sensitive", sparsity=0.5, **WORDS)
