"""Run folders with names that would do harm where they are not treated as text."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES = {
    "movie-0": "<script>window.harmed = 1</script>",
    "movie-1": "\"quoted\" & 'single' = `back` \\ $x$",
    "movie-2": "</script><img src=x onerror='window.harmed = 1'>",
    "trec-0": "\u202e\u05e2\u05d1\u05e8\u05d9\u05ea",
    "trec-1": "\U0001f98a fox {{ 7 * 7 }} {% raw %}",
    "trec-2": "constructor",
    "pairs-0": "http://example.invalid/a.js",
    "pairs-1": "__proto__",
    "pairs-2": "=1+1,;" + "very-" * 20 + "long",
    "trec": "<b onmouseover=alert(1)>task</b>",
}


def rename(folder: Path, names: Mapping[str, str] = NAMES) -> Path:
    """The same run with other names, wherever they stand in its files."""
    for file in ("plan.json", "summary.json"):
        path = folder / file
        path.write_text(json.dumps(_renamed(json.loads(path.read_text("utf-8")), names)), encoding="utf-8")
    for file in ("metrics.jsonl", "ledger.jsonl"):
        path = folder / file
        rows = [json.dumps(_renamed(json.loads(line), names)) for line in path.read_text("utf-8").splitlines()]
        path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return folder


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {names.get(key, key): _renamed(entry, names) for key, entry in value.items()}
    if isinstance(value, list):
        return [_renamed(entry, names) for entry in value]
    return names.get(value, value) if isinstance(value, str) else value
