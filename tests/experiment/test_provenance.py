"""What a run may be resumed with after a new version has added a setting."""

from pathlib import Path

import pytest

from atlas_fl.config import Config
from atlas_fl.errors import CheckpointError
from atlas_fl.experiment.recorder import check_provenance, provenance_of


def _recorded(config: Config) -> dict[str, dict[str, object]]:
    return provenance_of(config, (), {}, {})


def test_a_setting_that_a_later_version_has_added_counts_as_recorded_at_its_default() -> None:
    config = Config()
    before, now = _recorded(config), _recorded(config)
    del before["settings"]["lr"]
    check_provenance(before, now, folder=Path("run"))
    now["settings"]["lr"] = 0.25
    line = f"run run was begun with lr = {config.training.lr}, and its config.toml now says 0.25; restore the file"
    with pytest.raises(CheckpointError, match=line):
        check_provenance(before, now, folder=Path("run"))
