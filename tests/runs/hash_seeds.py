"""Runs of some settings in this process, whose order of sets PYTHONHASHSEED decides; started by test_hash_seeds.py.

    python -m tests.runs.hash_seeds SETTINGS.toml ...

Writes a line of JSON for each: the SHA-256 of every file of the run by its name, without what time and machine decide.
"""

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from atlas_fl.config.files import load_config
from atlas_fl.experiment.run import run_config

MEASURED = {"seconds", "round_seconds", "utilisation", "metrics_bytes", "digests", "sha256", "memory", "peak"}
"""Keys of what a clock, or a machine says, and of digests and sizes of files that hold it."""
TEXTS = {".json", ".jsonl"}


def without_measured(value: Any) -> Any:
    """The value without what differs between two runs of the same bits; the order of keys and lists stays."""
    if isinstance(value, dict):
        return {key: without_measured(one) for key, one in value.items() if key not in MEASURED}
    return [without_measured(one) for one in value] if isinstance(value, list) else value


def content(path: Path) -> bytes:
    if path.suffix not in TEXTS:
        return path.read_bytes()
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    return "\n".join(json.dumps(without_measured(json.loads(line))) for line in lines).encode()


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file by its path in the folder, but for logs, digests of files and the run's own settings."""
    left_out = {"log.txt", "digests.json", "config.toml", ".lock"}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in left_out)
    return {str(path.relative_to(folder)): sha256(content(path)).hexdigest() for path in files}


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        result = run_config(load_config(file))
        print(json.dumps({file.name: digests(result.folder)}), flush=True)
