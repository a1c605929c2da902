"""The config of the small federations here, and the model that they train."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from atlas_fl.config import Config, with_values
from atlas_fl.config.presets import find_preset
from tests.hostile.servers import Recording, record
from tests.runs.conftest import configs
from tests.runs.conftest import finished as finished
from tests.runs.conftest import shared_config as shared_config
from tests.runs.conftest import shared_folder as shared_folder
from tests.runs.conftest import tiny_model as tiny_model
from tests.runs.conftest import tiny_vit as tiny_vit

TWO = ("movie-0", "movie-1")
RECORDED: Mapping[str, tuple[dict[str, object], dict[str, Any]]] = {
    "usual": ({"rounds": 2}, {}),
    "cut": ({"split": "movie-0=1"}, {"allow": ("cut", "labels")}),
    "cut, head here": ({"split": "movie-0=1", "head": "client"}, {"allow": ("cut",)}),
    "kept": ({"share": ("A",), "space": "factors"}, {}),
    "halves": ({"strategy": "kriging", "measure_round": 2, "rounds": 5}, {"least_examples": 12}),
    "class features": ({"strategy": "fedpac", "rounds": 2}, {"least_examples": 8, "allow": ("partial-training",)}),
}
"""The settings of federations that are recorded, and what their sites agree to."""


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> Callable[..., Config]:
    """A config of three clients of one task and two rounds; keywords set single settings by their flat names."""
    make = configs(tiny_model, tmp_path)
    usual = {"tasks": "movie", "clients_per_task": 3, "rounds": 2, "pack_tokens": 1}
    return lambda **values: make(**{**usual, **values})


@pytest.fixture(scope="session")
def recorded(tiny_model: Path, tiny_vit: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recording]:
    """A federation of two sites under these settings, with all that was said; each runs once."""
    folder, found = tmp_path_factory.mktemp("recorded"), dict[str, Recording]()
    texts = configs(tiny_model, folder)
    small = {"tasks": "movie", "clients_per_task": 2, "rounds": 1, "pack_tokens": 1}
    images = {
        **{"model": str(tiny_vit), "image_size": 16, "tasks": "digits", "clients_per_task": 2, "samples": 40},
        **{"validation_samples": 10, "test_samples": 20, "participation": 1.0, "rounds": 1, "lr": 0.02},
        **{"runs_dir": str(folder / "runs"), "mask": "least_sensitive", "calibration_examples": 16},
    }

    def get(name: str) -> Recording:
        if name not in found:
            if name == "images":
                config = with_values(find_preset("vision-quick"), {**images, "name": name})
                found[name] = record(config, folder / name, ("digits-0", "digits-1"), allow=("linear-steps",))
            else:
                values, words = RECORDED[name]
                found[name] = record(texts(**{**small, **values, "name": name}), folder / name, TWO, **words)
            assert (found[name].found.error, found[name].found.faults) == (None, [])
            assert found[name].found.refused == {}
        return found[name]

    return get
