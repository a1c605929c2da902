"""Whole models of image clients in workers: the run of one process, in any number of them."""

from collections.abc import Callable

import pytest

from atlas_fl.config import Config, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.experiment.run import run_config
from tests.models.tiny_vision import save_tiny
from tests.runs.workers import check_same_images, in_threads

Make = Callable[..., Config]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Six clients of the digits, half of them a round; keywords set single settings by their flat names."""
    folder = tmp_path_factory.mktemp("images")
    base = with_values(
        find_preset("vision-quick"),
        {
            **{"model": str(save_tiny(folder / "tiny-vit")), "image_size": 16, "tasks": "digits", "rounds": 2},
            **{"clients_per_task": 6, "samples": 40, "validation_samples": 10, "test_samples": 30, "eval_every": 1},
            **{"participation": 0.5, "lr": 0.02, "audit": True, "runs_dir": str(folder / "runs")},
        },
    )
    return lambda **values: with_values(base, values)


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"dropout": 0.1, "crop": 1, "flip": True, "frozen_blocks": 1},
        {"mask": "least_sensitive", "calibration_rounds": 2, "calibration_clients": 3, "calibration_examples": 8},
    ],
    ids=["dense", "mask"],
)
def test_any_number_of_workers_makes_the_same_run(make: Make, values: dict[str, object]) -> None:
    name = "-".join(map(str, values.values()))
    whole = run_config(make(name=f"whole-{name}", **values))
    found = run_config(make(name=f"workers-{name}", **values), backend=in_threads(3))
    check_same_images(whole.folder, found.folder)
