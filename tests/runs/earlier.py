"""A run folder as earlier versions wrote it, without digests of its files."""

import json
from pathlib import Path
from typing import Any

from atlas_fl.storage.jsonl import content_sha256


def without_digests(folder: Path) -> Path:
    """This folder, once nothing in it knows what its files were."""
    for file in folder.glob("checkpoints/*/state.json"):
        content = json.loads(file.read_text())
        del content["state"]["digests"], content["sha256"]
        file.write_text(json.dumps(content | {"sha256": content_sha256(content)}))
    for file in folder.glob("audit/*/record.json"):
        content = json.loads(file.read_text())
        kept = {key: value for key, value in content.items() if key not in ("files", "sha256")}
        file.write_text(json.dumps(kept)) if "participants" in kept else file.unlink()
    (folder / "digests.json").unlink(missing_ok=True)
    return folder


def resealed(file: Path, content: Any) -> None:
    """Write a sealed file with this content, as whoever can write a folder can."""
    plain = {key: value for key, value in content.items() if key != "sha256"}
    file.write_text(json.dumps(plain | {"sha256": content_sha256(plain)}))
