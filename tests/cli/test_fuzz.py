"""Random command lines: each is understood, or one line on standard error and exit code 2; never a traceback."""

import random

import pytest

from atlas_fl.cli.main import COMMANDS
from atlas_fl.config import settings

VALUES = [
    "",
    "1",
    "-1",
    "0.5",
    "nan",
    "-inf",
    "none",
    "atlas",
    "movie",
    "A",
    "B",
    "x=y",
    "a\nb",
    "ä" * 50,
    "[red]",
    "-",
    "--",
]
VALUES += ["runs/none", "--etta", "-x", "=", "--=", "--eta=", "--no-eta", "1e400", "9" * 30, "eta=0,1"]


def random_line(draw: random.Random) -> list[str]:
    command = draw.choice([*COMMANDS, "run", "run", "sweep", "compare"])
    # whatever is understood must have nothing to do: no run of this name, no task of this name
    words = {"run": ["--tasks", "nothing"], "sweep": ["--tasks", "nothing"], "compare": ["--tasks", "nothing"]}
    words |= {"demo": ["--preset", "nothing"], "doctor": ["--preset", "nothing"]}
    words |= {"plan": ["--tasks", "nothing"], "attack": ["cuts", "--tasks", "nothing"]}
    line = [command, *words.get(command, [])]
    for _ in range(draw.randrange(5)):
        flag = draw.choice([setting.flag for setting in settings().values() if setting.name != "tasks"])
        if draw.random() < 0.2:
            flag = flag.replace("-", "_")[:2] + flag[3:]
        line += [flag] if draw.random() < 0.8 else []
        line += draw.choices(VALUES, k=draw.randrange(3))
    return line


@pytest.mark.parametrize("seed", range(8))
def test_random_command_lines(seed: int, atlas, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)  # away from the runs that somebody may have
    monkeypatch.setattr("atlas_fl.cli.run.fetch_assets", lambda *_, report: report("fetched"))
    draw = random.Random(seed)
    for _ in range(20):
        line = random_line(draw)
        said = atlas(*line)
        if said.code == 0:
            assert line[0] in ("list", "fetch"), line
            assert said.err == ""
        else:
            assert said.code == 2, line
            assert said.err.startswith("atlas: "), line
            assert said.err.count("\n") == 1, line
            assert len(said.err) < 2500, line
