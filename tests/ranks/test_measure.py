"""Operations and memory of measuring, by hand; against what torch does in tests/runs/test_planning_effort.py."""

from dataclasses import replace

import pytest

from atlas_fl.ranks.cost_model import MeasurementCost, block_matrices, measuring_bytes, measuring_flops, training_flops
from tests.ranks.test_predict import SHAPE

LAST = MeasurementCost(
    lowest_block=1, products=(0, 200), resident_bytes=(0, 1600), inputs=(block_matrices(SHAPE),) * 2, head_bytes=56
)


def test_operations_by_hand() -> None:
    """A token takes 2 * 200 and attention 4 * 5 * 4 below; above 4 * 200, attention three times that, and 2 * 200."""
    assert measuring_flops(SHAPE, LAST, range(2), tokens=10, length=5.0) == 10 * (480 + 1040 + 400)
    assert measuring_flops(SHAPE, LAST, range(1), tokens=10, length=5.0) == 4800
    assert measuring_flops(SHAPE, LAST, range(1, 2), tokens=10, length=5.0, logits=150) == 14_400 + 4 * 4 * 150


def test_a_warm_up_of_which_both_factors_train_is_a_rounds_training() -> None:
    """Six operations for every number of an adapter, as `training_flops` has them."""
    products = tuple(3 * rank * sum(d_in + d_out for d_in, d_out in own) for rank, own in zip((2, 3), SHAPE.layers))
    probe = replace(LAST, lowest_block=0, products=products)
    found = measuring_flops(SHAPE, probe, range(2), tokens=10, length=5.0, logits=150)
    assert found == training_flops(SHAPE, [2, 3], tokens=10, length=5.0, logits=150)


def test_memory_by_hand() -> None:
    """A token of the block: 16 of attention, 2 log-sums, 12 of norms, 16 inside, inputs 3 * 4 + 16; 32 at work."""
    alive = (16 + 2 + 12 + 16 + 28 + 32) * 4
    assert measuring_bytes(SHAPE, LAST, range(1, 2), tokens=10) == 2 * 10 * alive + 1600 + 56
    assert measuring_bytes(SHAPE, LAST, range(1, 2), tokens=10, head=False) == 2 * 10 * alive + 1600
    # below nothing is recorded and one block works at a time; at the cut 80 numbers wait, twice for the heap
    assert measuring_bytes(SHAPE, LAST, range(1), tokens=10, crossing=80, head=False) == 2 * (10 * alive + 320)
    assert (
        measuring_bytes(SHAPE, LAST, range(2), tokens=10, logits=7) - measuring_bytes(SHAPE, LAST, range(2), tokens=10)
        == 4 * 4 * 7
    )


@pytest.mark.parametrize("tokens", [1, 10, 1000])
def test_two_sides_do_what_the_whole_does(tokens: int) -> None:
    whole, *sides = (
        measuring_flops(SHAPE, LAST, blocks, tokens=tokens, length=3.5) for blocks in (range(2), range(1), range(1, 2))
    )
    assert whole == sum(sides)
