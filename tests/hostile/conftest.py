"""The config of the small federations here, and the model that they train."""

from collections.abc import Callable
from pathlib import Path

import pytest

from atlas_fl.config import Config
from tests.runs.conftest import configs
from tests.runs.conftest import shared_config as shared_config
from tests.runs.conftest import tiny_model as tiny_model


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path) -> Callable[..., Config]:
    """A config of three clients of one task and two rounds; keywords set single settings by their flat names."""
    make = configs(tiny_model, tmp_path)
    usual = {"tasks": "movie", "clients_per_task": 3, "rounds": 2, "pack_tokens": 1}
    return lambda **values: make(**{**usual, **values})
