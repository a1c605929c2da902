"""Without Flower, one line says what to install."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import atlas_fl.flower
from atlas_fl.errors import ConfigError
from atlas_fl.storage.extras import install_command


def test_without_the_extra_one_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "flwr"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    spec = importlib.util.spec_from_file_location("api_alone", Path(atlas_fl.flower.__file__).with_name("messages.py"))
    assert spec is not None and spec.loader is not None
    with pytest.raises(ConfigError, match=rf"it is an extra: {re.escape(install_command('flower'))}$"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
