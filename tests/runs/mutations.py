"""Structured mutations of the JSON, rows and settings of a run's folder."""

import json
import random
from pathlib import Path
from typing import Any

from tests.runs.resealing import resealed

STRANGE: tuple[Any, ...] = (
    *(None, True, -1, 0, 3, 0.5, 1e308, -1e308, 10**30, 10**400, 2**63, "", "x", "../../..", "a\nb", "\ud800", "1"),
    *([], {}, [[]], [None], {"": 1}, [1, "x"], {"x": {"y": []}}, "trec-1", "plan.json", [0.0] * 3),
)
"""What stands in the place of a value."""
SEALED = ("state.json", "record.json", "digests.json")


def mutate(file: Path, draw: random.Random, *, sealed: bool = True) -> str:
    """Change one thing in this file, and say what; with `sealed` as whoever also makes its digest anew."""
    if file.suffix == ".toml":
        return _mutate_line(file, draw)
    if file.suffix == ".jsonl":
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        told = _mutate(rows, draw)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return told
    content = json.loads(file.read_text())
    told = _mutate(content, draw)
    if file.name in SEALED and "sha256" in content and sealed:
        resealed(file, content)
    else:
        file.write_text(json.dumps(content))
    return told


def _mutate(content: Any, draw: random.Random) -> str:
    """Change one entry anywhere in this value: shallow entries as often as deep ones."""
    place, at, path = content, None, ""
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        at = draw.choice(keys)
        path += f"[{at!r}]"
        if not (isinstance(place[at], dict | list) and place[at]) or draw.random() < 0.25:
            break
        place = place[at]
    if at is None:
        return "nothing"
    how = draw.randrange(6)
    if how == 0:
        del place[at]
        return f"removed {path}"
    if how == 1 and isinstance(place, list):
        place.append(place[at])
        return f"doubled {path}"
    if how == 2 and isinstance(place, dict):
        place[f"{at}x"] = place.pop(at)
        return f"renamed {path}"
    value = draw.choice(STRANGE)
    place[at] = value
    return f"{path} = {value!r:.40}"


def _mutate_line(file: Path, draw: random.Random) -> str:
    lines = file.read_text().splitlines()
    place = draw.choice([place for place, line in enumerate(lines) if " = " in line and not line.startswith("#")])
    name = lines[place].split(" = ")[0]
    value = draw.choice(['"x"', "-1", "0", "3", "1e308", "true", "[]", '"../.."', '"none"', "{", "nan", "10" * 300])
    lines[place] = f"{name} = {value}"
    file.write_text("\n".join(lines) + "\n")
    return lines[place][:60]
