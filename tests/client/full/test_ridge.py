"""The head that is fitted before anything else."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from atlas_fl.client.calibration import LOSSES, SCALES, ridge_head
from atlas_fl.client.job import Job
from atlas_fl.client.options import ScaleOptions
from atlas_fl.config import with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.models.vision import image_logits, preprocess
from atlas_fl.planning.masks import fit_heads_and_mask
from atlas_fl.runtime.local import LocalEngine
from atlas_fl.setup.assembly import assemble
from tests.models.tiny_vision import save_tiny


def sums(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
    return wide.T @ wide, wide.T @ y


def drawn(count: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=draw, dtype=torch.float64) * torch.tensor([1.0, 2.0, 0.5]) + 1
    label = torch.randint(0, 4, (count,), generator=draw)
    return x, torch.nn.functional.one_hot(label, 4).double() - 0.25


def test_the_head_of_the_clients_sums_is_that_of_all_images_in_one_place() -> None:
    """scikit-learn's ridge on all rows together is the reference; its intercept is not penalised either."""
    parts = [drawn(count, seed=seed) for seed, count in enumerate((20, 5, 11))]
    gram, cross = (sum(both) for both in zip(*(sums(x, y) for x, y in parts)))
    head = ridge_head(gram, cross, penalty=2.0)
    x, y = (torch.cat(both).numpy() for both in zip(*parts))
    wanted = Ridge(alpha=2.0 * float(np.square(x).mean()), solver="cholesky").fit(x, y)
    np.testing.assert_allclose(head["head.weight"].numpy(), wanted.coef_, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(head["head.bias"].numpy(), wanted.intercept_, rtol=1e-5, atol=1e-6)


def test_one_feature_and_two_images_by_hand() -> None:
    """x = (1, -1), y = (1, -1): the slope is 2 / (2 + penalty), since the mean square of x is 1; the bias is 0."""
    x, y = torch.tensor([[1.0], [-1.0]], dtype=torch.float64), torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    head = ridge_head(*sums(x, y), penalty=2.0)
    assert head["head.weight"].item() == 0.5
    assert head["head.bias"].item() == 0.0


def test_the_scale_is_that_of_the_least_cross_entropy(tmp_path: Path) -> None:
    """On two clients of the digits, against all scales tried on their images in one place."""
    small = {"samples": 40, "validation_samples": 16, "test_samples": 4, "tasks": "digits", "clients_per_task": 2}
    model = {"model": str(save_tiny(tmp_path / "vit")), "image_size": 16}
    assembly = assemble(with_values(find_preset("vision-quick"), {**small, **model}))
    engine = LocalEngine(site=assembly.site)
    start = fit_heads_and_mask(assembly, engine, assembly.full_models())[0]
    own = start[assembly.names[0]]
    jobs = [Job(client=name, params=own, round=0, options=ScaleOptions(examples=16)) for name in assembly.names]
    losses = sum(update.params[LOSSES] for update in engine.run("scale", jobs))
    assert int(losses.argmin()) == 0, "no other scale is better than the one that was taken"
    pixels = np.concatenate([client.validation.pixels for client in assembly.clients])
    labels = torch.from_numpy(np.concatenate([client.validation.label for client in assembly.clients]))
    logits = image_logits(assembly.site.vision, own, preprocess(assembly.site.vision, pixels)).double()
    wanted = torch.nn.functional.cross_entropy(4 * logits, labels, reduction="sum")
    assert losses[SCALES.index(4.0)].item() == pytest.approx(wanted.item(), rel=1e-6)
