"""1,000 random configs, from files and from Python: each is valid or one line of an AtlasError, never anything else."""

import random
from typing import Any

import pytest
import tomlkit

from atlas_fl.config import Config, load_config, settings, validate
from atlas_fl.config.presets import find_preset, presets
from atlas_fl.config.settings import replace_settings
from atlas_fl.errors import AtlasError

WORDS = ["", "none", "auto", "oracle", "atlas", "local", "budget", "greedy", "4", "8", "08", "movie", "trec", "A", "B"]
WORDS += ["head", "product", "factors", "iid", "a\nb", "ä", "../..", "/", "x" * 200, "name=x.csv", "\x1b[31m", "٣"]
NUMBERS: list[Any] = [0, 1, 2, 3, 5, 16, 100, -1, 2**31, 2**62, 0.0, 0.1, 0.5, 1.0, 1.5, -0.0, 1e-300, 1e300]
NUMBERS += [float("inf"), float("-inf"), float("nan")]
FILE_VALUES = [True, False, *WORDS, *NUMBERS]
PYTHON_VALUES = [*FILE_VALUES, None, 10**5000, (), {}, object(), b"x", 1j, "\udcff"]


def any_value(draw: random.Random, values: list[Any], depth: int = 0) -> Any:
    if depth < 2 and draw.random() < 0.25:
        return [any_value(draw, values, depth + 1) for _ in range(draw.randrange(4))]
    return draw.choice(values)


def near_value(draw: random.Random, name: str) -> Any:
    """A value of the right type more often than not, so that not every config fails at its first setting."""
    preset = find_preset(draw.choice(list(presets())))
    value = getattr(getattr(preset, settings()[name].group), name)
    if type(value) in (int, float) and draw.random() < 0.5:
        return type(value)(draw.choice([value * 2, value / 2, value + 1]))
    return list(value) if isinstance(value, tuple) else value


def random_file(draw: random.Random) -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {}
    for name in draw.sample(list(settings()), draw.randrange(1, 5)):
        group = settings()[name].group if draw.random() < 0.98 else draw.choice(WORDS)
        value = near_value(draw, name) if draw.random() < 0.7 else any_value(draw, FILE_VALUES)
        if value is not None:
            tables.setdefault(group, {})[name if draw.random() < 0.98 else draw.choice(WORDS)] = value
    return tables


def outcome(make: Any) -> bool:
    try:
        validate(make())
    except AtlasError as error:
        assert "\n" not in str(error)
        assert 10 < len(str(error)) < 1400
        return False
    return True


@pytest.mark.slow
def test_random_files(tmp_path) -> None:
    draw, path = random.Random(1), tmp_path / "random.toml"
    valid = 0
    for _ in range(500):
        path.write_text(tomlkit.dumps(random_file(draw)), encoding="utf-8")
        valid += outcome(lambda: load_config(path))
    assert 50 < valid < 450


def test_random_values_from_python() -> None:
    draw = random.Random(2)
    valid = 0
    for _ in range(500):
        names = draw.sample(list(settings()), draw.randrange(1, 3))
        values = {name: any_value(draw, PYTHON_VALUES) for name in names}
        valid += outcome(lambda values=values: replace_settings(values, base=Config()))
    assert 5 < valid < 450


@pytest.mark.parametrize("junk", ["\x00", "[[", "a.b.c = {", "\ufeff[run]\nseed=1", "= 1", "[run]\nseed = 1\nseed = 2"])
def test_files_that_are_no_toml(junk: str, tmp_path) -> None:
    path = tmp_path / "junk.toml"
    path.write_text(junk, encoding="utf-8")
    assert not outcome(lambda: load_config(path))
