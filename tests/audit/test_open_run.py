"""A run is audited by the settings that it has, and not without them."""

from pathlib import Path

import pytest

from atlas_fl.audit.check import audit_run
from atlas_fl.errors import CheckpointError
from tests.audit.written import write_run


@pytest.mark.parametrize("text", ["", "[run]\n", "[training]\n[mixing]\n", "[training]\nrounds = 2\n"])
def test_settings_that_are_missing_are_one_line(tmp_path: Path, text: str) -> None:
    run = write_run(tmp_path / "run")
    (run / "config.toml").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.toml lacks the settings of its run \(\[training\] rounds"):
        audit_run(run)
