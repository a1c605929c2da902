import numpy as np
import pytest
import torch

from atlas_fl.clustering.sketch import CHUNK, _hashes, sketch
from atlas_fl.errors import DataError


def normals(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def test_hashes_are_splitmix64():
    # the published stream of seed 1234567, so that every machine and version draws the same
    assert [int(value) for value in _hashes(1234567, 0, 2)] == [6457827717110365317, 3203168211198807973]
    assert int(_hashes(1234567, 1, 1)[0]) == 3203168211198807973


def test_two_single_weights_by_hand():
    # each tensor over its own norm is +-1, in two buckets out of 4096; the whole over its norm is +-1 / sqrt 2
    row = sketch({"a": torch.tensor([3.0]), "b": torch.tensor([[-5.0]])}, dim=4096, seed=1)
    assert row.shape == (4096,) and row.dtype == np.float32
    assert sorted(np.abs(row[row != 0])) == pytest.approx([0.5**0.5, 0.5**0.5])


def test_is_the_linear_map_with_one_sign_in_each_column():
    dim, size = 16, 40
    columns = np.stack([sketch({"w": torch.eye(size)[i]}, dim=dim, seed=3) for i in range(size)], axis=1)
    assert (np.abs(columns).sum(axis=0) == 1).all() and (np.abs(columns).max(axis=0) == 1).all()
    assert len(np.unique(np.abs(columns).argmax(axis=0))) > 8 and 0 < (columns.sum(axis=0) > 0).mean() < 1
    values = normals(size).numpy()
    expected = columns @ values
    assert sketch({"w": torch.from_numpy(values)}, dim=dim, seed=3) == pytest.approx(
        expected / np.linalg.norm(expected), abs=1e-6
    )


@pytest.mark.parametrize("cosine", [0.0, 0.3, 0.9])
def test_cosines_are_kept_to_one_over_root_dim(cosine):
    dim, size, errors = 1024, 20_000, []
    for trial in range(40):
        left, other = normals(2, size, seed=trial)
        left, other = left / left.norm(), other - left * (other @ left) / left.square().sum()
        right = cosine * left + (1 - cosine**2) ** 0.5 * other / other.norm()
        pair = [sketch({"w": each}, dim=dim, seed=trial) for each in (left, right)]
        errors.append(float(pair[0] @ pair[1]) - cosine)
    assert np.sqrt(np.mean(np.square(errors))) < 1.3 / dim**0.5
    assert abs(np.mean(errors)) < 3 / dim**0.5 / 40**0.5


def test_scale_of_a_tensor_does_not_matter_its_sign_does():
    tensors = {"a": normals(30), "b": normals(50, seed=1)}
    row = sketch(tensors, dim=64, seed=0)
    assert sketch({"a": 1000 * tensors["a"], "b": tensors["b"]}, dim=64, seed=0) == pytest.approx(row, abs=1e-6)
    assert sketch({"a": -tensors["a"], "b": -tensors["b"]}, dim=64, seed=0) == pytest.approx(-row)
    assert sketch({"a": -tensors["a"], "b": tensors["b"]}, dim=64, seed=0) != pytest.approx(row, abs=0.1)


def test_is_a_function_of_seed_key_and_size():
    values = normals(500)
    row = sketch({"w": values}, dim=64, seed=0)
    assert (sketch({"w": values.reshape(50, 10)}, dim=64, seed=0) == row).all()
    others = [
        sketch({"w": values}, dim=64, seed=1),
        sketch({"v": values}, dim=64, seed=0),
        sketch({"w": torch.cat([values, torch.zeros(1)])}, dim=64, seed=0),
    ]
    assert all(abs(float(other @ row)) < 0.5 for other in others)


def test_coordinates_past_a_chunk_have_their_own_hashes():
    near, far = torch.zeros(2 * CHUNK), torch.zeros(2 * CHUNK)
    near[:64], far[CHUNK : CHUNK + 64] = 1.0, 1.0
    left, right = (sketch({"w": each}, dim=4096, seed=0) for each in (near, far))
    assert np.linalg.norm(left) == pytest.approx(1) and np.linalg.norm(right) == pytest.approx(1)
    assert abs(float(left @ right)) < 0.2
    assert (sketch({"w": far}, dim=4096, seed=0) == right).all()


def test_half_precision_and_strides_give_the_sketch_of_the_same_numbers():
    values = normals(40, 30).to(torch.bfloat16)
    row = sketch({"w": values.T.contiguous()}, dim=64, seed=0)
    assert sketch({"w": values.T}, dim=64, seed=0) == pytest.approx(row)
    assert sketch({"w": values.T.double()}, dim=64, seed=0) == pytest.approx(row)


def test_a_tensor_of_zeros_adds_nothing():
    values = {"a": normals(30)}
    assert (sketch({**values, "z": torch.zeros(9)}, dim=32, seed=0) == sketch(values, dim=32, seed=0)).all()


def test_bad_fingerprints_stop_the_run():
    with pytest.raises(DataError, match="zero in every tensor; use more batches"):
        sketch({"a": torch.zeros(3)}, dim=8, seed=0)
    with pytest.raises(DataError, match="zero in every tensor"):
        sketch({}, dim=8, seed=0)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(DataError, match="tensor 'b' holds NaN or infinity"):
            sketch({"a": torch.ones(3), "b": torch.tensor([1.0, bad])}, dim=8, seed=0)
