"""Noise that nobody takes off who lacks the client's secret, whatever else is known."""

import numpy as np
import pytest
import torch
from torch import Tensor

from atlas_fl.rng import generator
from atlas_fl.split.channel import Cut, encode_up
from atlas_fl.split.codec import WIRES, add_noise, decode_rows, encode_rows, simulated_secret

SECRET = bytes(range(32))
SEEN = {"seed": 17, "client": "movie-0", "round": 3, "step": 5}
"""What the server says itself in a job, and so knows."""


def rows_of(count: int = 200, width: int = 384, seed: int = 0) -> Tensor:
    """Rows as a model has them: some numbers are larger than the others."""
    drawn = np.random.default_rng(seed).standard_normal((count, width), dtype=np.float32)
    drawn *= np.random.default_rng(1).uniform(0.3, 3.0, width).astype(np.float32)
    return torch.from_numpy(drawn)


def noise_of(rows: Tensor, **changes) -> Tensor:
    """The noise alone, in root mean squares of the rows."""
    told = {"noise": 1.0, "secret": SECRET, "kind": "activation"} | changes
    return (add_noise(rows, **told) - rows) / told["noise"] / rms(rows)


def rms(rows: Tensor) -> Tensor:
    return rows.square().mean(-1, keepdim=True).sqrt()


def seeded(shape: tuple[int, ...]) -> Tensor:
    """The noise as it once was: of a seed that the server sends, on a path that it names."""
    path = ("wire", SEEN["client"], SEEN["round"], "train", SEEN["step"], "activation")
    return torch.from_numpy(generator(SEEN["seed"], *path).standard_normal(shape, dtype=np.float32))


def taken_off(arrived: Tensor, drawn: Tensor, *, noise: float) -> Tensor:
    """The rows x of y = x + s c z with z known: their root mean square c solves a quadratic.

    |y - s c z|^2 = d c^2, and of two roots the right one leaves x without correlation with z.
    """
    y, z = arrived.double(), noise * drawn.double()
    a, b, c = (z * z).sum(-1) - y.shape[1], -2 * (y * z).sum(-1), (y * y).sum(-1)
    root = (b * b - 4 * a * c).clamp(min=0).sqrt()
    tried = torch.stack([y - ((-b + sign * root) / (2 * a))[:, None] * z for sign in (-1, 1)])
    likeness = torch.nn.functional.cosine_similarity(tried, z.expand_as(tried), dim=-1).abs()
    return tried[likeness.argmin(0), torch.arange(len(y))].float()


def error(found: Tensor, rows: Tensor) -> float:
    """The median error of a row, relative to the row."""
    return float(((found - rows).norm(dim=-1) / rows.norm(dim=-1)).median())


@pytest.mark.parametrize(("wire", "left"), [("fp32", 1e-6), ("bf16", 0.006), ("int8", 0.025)])
@pytest.mark.parametrize("noise", [1.0, 2.0])
def test_who_knows_all_but_the_secret_does_not_take_the_noise_off(wire, left: float, noise: float) -> None:
    """With the noise drawn from what the server sends, the same attack leaves next to nothing of it."""
    rows, cut = rows_of(), Cut(blocks=1, wire=wire, noise=noise)
    known = seeded(tuple(rows.shape))
    before = decode_rows(encode_rows(rows + noise * rms(rows) * known, wire=wire))[0]
    assert error(before, rows) == pytest.approx(noise, rel=0.1)
    assert error(taken_off(before, known, noise=noise), rows) < left

    arrived = decode_rows(encode_up(rows, "activation", cut=cut, secret=SECRET))[0]
    simulated = noise_of(rows, noise=noise, secret=simulated_secret(SEEN["seed"], SEEN["client"]))
    for guess in (known, simulated, noise_of(arrived, noise=noise, secret=bytes(32))):
        assert error(taken_off(arrived, guess, noise=noise), rows) > 0.9 * noise
    own = noise_of(rows, noise=noise)
    assert error(taken_off(arrived, own, noise=noise), rows) < left, "the attack must work for who has the noise"


def test_no_two_looks_share_their_noise_but_at_equal_rows() -> None:
    """What does not repeat to the bit gets noise that is independent, so that no difference cancels it."""
    rows = rows_of()
    one = noise_of(rows)
    assert torch.equal(noise_of(rows), one)
    nudged = rows.clone()
    nudged[:, 7] = nudged[:, 7].nextafter(torch.tensor(torch.inf))
    others = {
        "the next float": noise_of(nudged),
        "another model": noise_of(rows_of(seed=2)),
        "twice the rows": noise_of(2 * rows),
        "more noise": noise_of(rows, noise=2.0),
        "a gradient": noise_of(rows, kind="gradient"),
        "another client": noise_of(rows, secret=bytes(32)),
        "rows beside it": one.roll(1, 0),
    }
    for name, other in others.items():
        correlation = float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])
        assert abs(correlation) < 5 / one.numel() ** 0.5, name
    # the two levels at which a row is seen do not cancel: 2 (x + n) - (x + 2 n) would be x
    first, second = (noisy(rows, noise=level) for level in (1.0, 2.0))
    assert error(2 * first - second, rows) > 2


def test_noise_is_normal_and_of_the_stated_size() -> None:
    rows = torch.ones(400, 65)
    rows[:, 0] = torch.arange(400)
    rows[200:] *= 10
    drawn = noise_of(rows).double()
    assert float(drawn.mean()) == pytest.approx(0, abs=0.02)
    assert float(drawn.square().mean()) == pytest.approx(1, abs=0.02)
    assert float(drawn.pow(4).mean()) == pytest.approx(3, abs=0.2)
    quantiles = torch.tensor([0.05, 0.25, 0.75, 0.95], dtype=torch.float64)
    assert torch.quantile(drawn[:, :40], quantiles).tolist() == pytest.approx([-1.645, -0.674, 0.674, 1.645], abs=0.05)
    # neighbours and both halves of a row are made of other bits
    assert abs(float((drawn[:, 1:] * drawn[:, :-1]).mean())) < 0.02
    assert abs(float((drawn[:, :32] * drawn[:, 33:]).mean())) < 0.03
    assert noisy(torch.zeros(2, 3)).abs().max() == 0


def noisy(rows: Tensor, noise: float = 0.5) -> Tensor:
    return add_noise(rows, noise=noise, secret=SECRET, kind="activation")


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 1), (5, 7)])
def test_rows_of_any_shape_get_noise_of_theirs(shape: tuple[int, int]) -> None:
    assert noisy(torch.ones(shape)).shape == shape


def test_noise_does_not_depend_on_how_rows_are_dealt_to_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(9, 5)
    whole = noisy(rows)
    assert torch.equal(torch.cat([noisy(part) for part in rows.split([2, 3, 4])]), whole)
    monkeypatch.setattr("atlas_fl.split.codec.NUMBERS_AT_ONCE", 11)
    assert torch.equal(noisy(rows), whole)


def test_half_precision_gets_the_noise_of_the_same_numbers() -> None:
    rows = rows_of(20, 6).bfloat16()
    wide, found = noisy(rows.float()), noisy(rows)
    assert found.dtype is torch.bfloat16
    assert torch.allclose(found.float(), wide, atol=0.1)


def test_a_simulation_has_a_secret_of_its_own_for_each_client_and_seed() -> None:
    made = {simulated_secret(seed, client) for seed in (0, 1) for client in ("a-0", "a-1")}
    assert len(made) == 4
    assert all(len(secret) == 32 for secret in made)


@pytest.mark.parametrize("wire", WIRES)
def test_nothing_leaves_without_its_noise(wire) -> None:
    rows = torch.ones(1, 2)
    with pytest.raises(AssertionError):
        encode_up(rows, "activation", cut=Cut(blocks=1, wire=wire, noise=0.5), secret=None)
    assert encode_up(rows, "activation", cut=Cut(blocks=1, wire=wire), secret=None)
