"""What a run has left behind, as tests compare it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from atlas_fl.audit.check import audit_run
from atlas_fl.audit.report import AuditReport

TIMES = ("seconds",)
"""Fields of the wall clock."""


def state(folder: Path, *, round: int | None = None) -> dict[str, torch.Tensor]:
    """Tensors of the checkpoint after this round, or of the newest one."""
    name = max(path.name for path in folder.glob("checkpoints/round-*")) if round is None else f"round-{round:04d}"
    return load_file(folder / f"checkpoints/{name}/state.safetensors")


def rows(folder: Path, name: str = "metrics") -> list[dict[str, object]]:
    found = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in found]


def same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def audited(folder: Path, round: int, *names: str) -> list[dict[str, torch.Tensor]]:
    """Tensors that were kept of a round for the audit, by the names of their files."""
    return [load_file(folder / f"audit/round-{round:04d}/{name}.safetensors") for name in names]


def passing_audit(folder: Path, *checks: str, **options: Any) -> AuditReport:
    """The audit of a run; raises AssertionError with what it found, or where it did not make all of these checks."""
    report = audit_run(folder, **options)
    assert report.ok, report.failures[:3]
    assert set(checks) <= {row.check for row in report.rows}
    return report


def alter_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change tensors of a file in place and leave its metadata as they are."""
    with safe_open(path, "pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)


def failed_checks(folder: Path, path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> set[str]:
    """The checks of round two that fail while this file of a run is changed."""
    kept = path.read_bytes()
    alter_tensors(path, change)
    checks = {row.check for row in audit_run(folder).failures if row.round == 2}
    path.write_bytes(kept)
    return checks
