"""Mini-batches of images beside adapters: what is drawn, and in how many steps."""

import math

import numpy as np
import pytest
import torch

from atlas_fl.client.batching import collate_packed
from atlas_fl.client.job import Job
from atlas_fl.client.local_training import batches, example_loss
from atlas_fl.client.options import TrainOptions
from atlas_fl.models.tokenization import EncodedExamples, encode_images
from atlas_fl.models.vision import augment
from atlas_fl.rng import torch_generator


def images(count: int = 9) -> EncodedExamples:
    """Image k shows k ones, two twos and nothing else, so that it is known again however it is moved."""
    pixels = np.zeros((count, 6, 6, 1), dtype=np.uint8)
    for k in range(count):
        pixels[k].reshape(-1)[:k] = 1
        pixels[k, 4, 3:5] = 2
    return encode_images(pixels, np.arange(count), length=5)


def drawn(round: int = 1, **options: object) -> list[EncodedExamples]:
    job = Job(client="a-0", params={}, round=round, options=TrainOptions(seed=3, batch_size=4, **options))
    return list(batches(images(), job, secret=None))


def test_images_are_examples_of_equal_length_by_hand() -> None:
    part = images().take(np.array([7, 2]))
    assert part.offsets.tolist() == [0, 5, 10] and part.labels.tolist() == [7, 2] and len(part) == 2
    assert part.lengths.tolist() == [5, 5] and part.num_targets.tolist() == [0, 0]
    assert [int((image == 1).sum()) for image in part.pixels] == [7, 2]


def test_a_row_holds_every_clients_images_and_counts_their_tokens() -> None:
    row = collate_packed([images().take(np.array([1, 2])), images().take(np.array([3]))], device=torch.device("cpu"))
    assert [(own.start, own.stop) for own in row.segments] == [(0, 10), (10, 15)]
    assert [(own.start, own.stop) for own in row.pooled] == [(0, 2), (2, 3)]
    assert [tuple(own.shape) for own in row.pixels] == [(2, 6, 6, 1), (1, 6, 6, 1)]
    assert row.counts == (2, 1) and [own.tolist() for own in row.labels] == [[1, 2], [3]]


def test_augmented_batches_hold_the_same_images_and_draw_anew_in_every_step_and_round() -> None:
    plain, moved = drawn(epochs=2), drawn(epochs=2, crop=1, flip=True)
    assert [own.labels.tolist() for own in plain] == [own.labels.tolist() for own in moved]
    for step, (left, right) in enumerate(zip(plain, moved, strict=True)):
        stream = torch_generator(3, "augment", "a-0", 1, step)
        wanted = augment(torch.from_numpy(left.pixels), padding=1, flip=True, generator=stream)
        assert np.array_equal(right.pixels, wanted.numpy())
        assert not np.array_equal(left.pixels, right.pixels)
    again, other = drawn(epochs=2, crop=1, flip=True), drawn(2, epochs=2, crop=1, flip=True)
    assert all(np.array_equal(left.pixels, right.pixels) for left, right in zip(moved, again, strict=True))
    assert [own.labels.tolist() for own in other] != [own.labels.tolist() for own in moved]


def test_counted_steps_go_on_through_as_many_passes_as_they_need() -> None:
    found = drawn(epochs=7, max_steps=7)
    assert [len(own) for own in found] == [4, 4, 1, 4, 4, 1, 4]
    assert sorted(label for own in found[:3] for label in own.labels) == list(range(9))


def test_label_smoothing_spreads_a_share_over_all_classes_by_hand() -> None:
    """Softmax of (0, ln 3) is (1/4, 3/4); with a share of 0.2 the label 1 is (0.1, 0.9)."""
    logits, label = torch.tensor([[0.0, math.log(3)]]), torch.tensor([1])
    wanted = -(0.1 * math.log(0.25) + 0.9 * math.log(0.75))
    assert float(example_loss(logits, label, smoothing=0.2)) == pytest.approx(wanted, abs=1e-6)
    assert float(example_loss(logits, label)) == pytest.approx(-math.log(0.75), abs=1e-6)
