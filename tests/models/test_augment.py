"""Crops and flips by hand; the draws themselves against their frequencies."""

import pytest
import torch

from atlas_fl.models.vision import augment
from atlas_fl.rng import torch_generator

ONE = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.uint8)[None, :, :, None]


def drawn(count: int = 2000, *, padding: int = 1, flip: bool = True, seed: int = 0) -> list[torch.Tensor]:
    source = torch_generator(seed, "augment", "digits-0", 3, 1)
    return list(augment(ONE.expand(count, -1, -1, -1), padding=padding, flip=flip, generator=source)[..., 0])


def test_every_crop_by_hand_comes_up_about_equally_often() -> None:
    by_hand = {
        (0, 0): [[0, 0, 0], [0, 1, 2], [0, 4, 5]],
        (1, 1): [[1, 2, 3], [4, 5, 6], [7, 8, 9]],
        (0, 2): [[0, 0, 0], [2, 3, 0], [5, 6, 0]],
        (2, 1): [[4, 5, 6], [7, 8, 9], [0, 0, 0]],
    }
    found = [image.tolist() for image in drawn(1800, flip=False)]
    assert len({str(image) for image in found}) == 9
    for expected in by_hand.values():
        assert 140 < found.count(expected) < 260  # 200 expected, a standard deviation of 13


def test_half_of_the_images_are_mirrored_left_to_right() -> None:
    found = [image.tolist() for image in drawn(2000, padding=0)]
    mirrored = [[3, 2, 1], [6, 5, 4], [9, 8, 7]]
    assert 900 < found.count(mirrored) < 1100
    assert found.count(mirrored) + found.count(ONE[0, :, :, 0].tolist()) == 2000


def test_a_mirrored_crop_is_the_crop_of_the_mirrored_image_at_the_same_place() -> None:
    plain, both = drawn(200, flip=False), drawn(200)
    for one, two in zip(plain, both):
        assert two.equal(one) or two.flip(1).equal(one)
    assert any(not two.equal(one) for one, two in zip(plain, both))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_size_type_and_the_given_images_stay_and_channels_move_together(dtype: torch.dtype) -> None:
    pixels = torch.arange(2 * 5 * 7 * 3).reshape(2, 5, 7, 3).to(dtype)
    before = pixels.clone()
    found = augment(pixels, padding=2, flip=True, generator=torch_generator(1))
    assert (found.shape, found.dtype) == (pixels.shape, dtype)
    assert pixels.equal(before)
    inside = found[..., 0] > 0
    assert (found[..., 2][inside] - found[..., 0][inside] == 2).all()


def test_the_generator_decides_and_nothing_else() -> None:
    before = torch.random.get_rng_state()
    first, same, other = (torch.stack(drawn(50, seed=seed)) for seed in (0, 0, 1))
    assert first.equal(same)
    assert not first.equal(other)
    assert torch.random.get_rng_state().equal(before)
