import pytest
import torch

from atlas_fl.errors import ConfigError, ModelError
from atlas_fl.sparse.masks import SHRINK, calibrate_mask, shrink_frozen

PARAMS = {"w": torch.tensor([4.0, 3.0, 2.0, 1.0]), "head": torch.tensor([5.0])}


def test_two_rounds_by_hand() -> None:
    """Half, then a quarter, of scores that the test makes up.

    Round 1, all there: -w = -4 -3 -2 -1; the lowest two, w_0 and w_1, stay. Round 2 sees 4 3 .2 .1 and the head as it
    was; w + head is 9 8 there, and w_1 stays. A single pass keeps w_0.
    """
    seen = []

    def score(params):
        seen.append(params)
        return {"w": -params["w"] if len(seen) == 1 else params["w"] + params["head"]}

    words = {"names": ["w"], "strategy": "least_sensitive", "sparsity": 0.75, "seed": 0}
    assert calibrate_mask(score, PARAMS, rounds=2, **words)["w"].tolist() == [False, True, False, False]
    assert torch.equal(seen[0]["w"], PARAMS["w"])
    assert torch.equal(seen[1]["w"], torch.tensor([4.0, 3.0, SHRINK * 2.0, SHRINK * 1.0]))
    assert torch.equal(seen[1]["head"], PARAMS["head"])
    seen.clear()
    assert calibrate_mask(score, PARAMS, **words)["w"].tolist() == [True, False, False, False]


def test_nothing_is_turned_down_where_nothing_is_frozen() -> None:
    ones = {"w": torch.ones(4, dtype=torch.bool)}
    assert torch.equal(shrink_frozen(PARAMS, ones)["w"], PARAMS["w"])


def test_bad_numbers_are_refused() -> None:
    words = {"names": ["w"], "strategy": "random", "seed": 0}
    with pytest.raises(ConfigError, match="calibration has 0 rounds"):
        calibrate_mask(dict, PARAMS, sparsity=0.5, rounds=0, **words)
    with pytest.raises(ConfigError, match=r"sparsity is 1\.0"):
        calibrate_mask(dict, PARAMS, sparsity=1.0, rounds=1, **words)
    with pytest.raises(ModelError, match="no parameter 'v'"):
        calibrate_mask(dict, PARAMS, sparsity=0.5, rounds=1, **(words | {"names": ["v"]}))
