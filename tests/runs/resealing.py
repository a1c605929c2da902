"""Digests made anew, as whoever alters a run's folder can make them."""

import json
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from atlas_fl.audit.check import audit_run
from atlas_fl.storage.jsonl import content_sha256


def with_new_digests(folder: Path) -> Path:
    """This folder, with digests of its files as they are now; what is gone has none, what is no JSON stays."""
    for file in folder.glob("audit/*/record.json"):
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            content = json.loads(file.read_text())
            resealed(file, {**content, "files": _digests(file.parent, content["files"])})
    for file in folder.glob("checkpoints/*/state.json"):
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            content = json.loads(file.read_text())
            sizes = {f"{name}_bytes": (folder / f"{name}.jsonl").stat().st_size for name in ("metrics", "ledger")}
            digests = _digests(folder, content["state"]["digests"])
            resealed(file, {**content, "state": {**content["state"], **sizes, "digests": digests}})
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        content = json.loads((folder / "digests.json").read_text())
        resealed(folder / "digests.json", {**content, "files": _digests(folder, content["files"])})
    return folder


def _digests(folder: Path, names: Any) -> dict[str, str]:
    files = {name: folder / name for name in names}
    return {name: sha256(file.read_bytes()).hexdigest() for name, file in files.items() if file.is_file()}


def resealed(file: Path, content: Any) -> None:
    """Write a sealed file with this content, as whoever can write a folder can."""
    plain = {key: value for key, value in content.items() if key != "sha256"}
    file.write_text(json.dumps(plain | {"sha256": content_sha256(plain)}))


def check_altered_rows(folder: Path, altered: Sequence[tuple[str, float, str]]) -> None:
    """Assert that the audit finds these (field, factor, fault) in rows of round two that say other privacy than was."""
    whole = (folder / "metrics.jsonl").read_text()
    for name, factor, message in altered:
        changed = [json.loads(line) for line in whole.splitlines()]
        row = next(row for row in changed if row.get("round") == 2 and row.get("split") == "train")
        row[name] *= factor
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
        (failure,) = audit_run(with_new_digests(folder)).failures
        assert (failure.check, failure.client, failure.round) == ("epsilon", row["client"], 2)
        assert message in failure.detail
    (folder / "metrics.jsonl").write_text(whole)
    with_new_digests(folder)
