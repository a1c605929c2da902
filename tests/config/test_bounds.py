"""A file of settings and its keys are of bounded size: both are said in one line, at once."""

import pytest

from atlas_fl.config import Config, load_config, to_toml
from atlas_fl.config.files import MOST_BYTES
from atlas_fl.errors import ConfigError

BOUNDS = "allowed: 262,144 bytes, keys of 100 characters and 8 parts"


@pytest.mark.parametrize(
    "text",
    [
        "[" + ".".join("a" * 125_000) + "]\n",
        ".".join("a" * 125_000) + " = 1\n",
        '"a".' * 9 + "b = 1\n",
        "a" * 250_000 + " = 1\n",
        "# " + "x" * MOST_BYTES + "\n",
    ],
)
def test_long_keys_and_files_are_refused_at_once(tmp_path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=BOUNDS):
        load_config(path)


def test_texts_and_comments_are_no_keys(tmp_path) -> None:
    path = tmp_path / "config.toml"
    name = "a.b.c.d.e.f.g.h.i.j.k" * 20
    text = to_toml(Config()).replace('runs_dir = "runs"', f"runs_dir = '{name}'  # {name}")
    path.write_text(text)
    assert load_config(path).run.runs_dir == name
