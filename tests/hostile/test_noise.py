"""What a site draws is its own: the server has all that a simulation without secrets has, and not the site's."""

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atlas_fl.audit.check import audit_run
from atlas_fl.config import Config
from atlas_fl.experiment.run import run_config
from atlas_fl.params import digest
from atlas_fl.storage.tensors import read_tensors
from tests.hostile import federation
from tests.hostile.federation import SITES, federate, secrets_folder

VALUES = {"split": "movie-0=1,movie-1=2", "wire_noise": 0.5, "head": "client", "dropout": 0.1, "rounds": 1}
"""Two sites are cut, with noise, and one is whole."""


def bits(folder: Path) -> list[str]:
    return [digest(read_tensors(folder / "adapters" / name / "adapter_model.safetensors")) for name in SITES]


def bytes_of(head: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors.values()]
    return b"\n".join([json.dumps([head, list(tensors)]).encode(), *flat])


@pytest.mark.slow
def test_a_federation_in_threads_ends_in_the_bits_of_a_simulation(config: Callable[..., Config]) -> None:
    found = federate(config(name="served"))
    assert (found.error, found.faults, found.refused) == (None, [], {})
    assert found.models.keys() == set(SITES)
    simulated = run_config(config(name="simulated", secrets=secrets_folder())).folder
    assert bits(found.folder) == bits(simulated)


@pytest.mark.slow
def test_sites_draw_from_secrets_that_never_leave_them_and_end_in_the_bits_of_a_simulation_with_these(
    config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(federation, "keeps_files", lambda _: True)
    simulated = run_config(config(name="simulated", **VALUES)).folder
    sent = list[bytes]()

    def watch(head, tensors, _):
        sent.append(bytes_of(head, tensors))
        return head, tensors

    apart = config(name="apart", **VALUES)
    found = federate(apart, dict.fromkeys(SITES, watch))
    assert (found.error, found.faults, found.refused) == (None, [], {})
    files = {name: Path(apart.run.runs_dir) / f"{name}-secret" for name in SITES}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files.values())
    secrets = [bytes.fromhex(path.read_text()) for path in files.values()]
    assert len(set(secrets)) == len(SITES)
    written = [path.read_bytes() for path in found.folder.glob("**/*") if path.is_file()]
    for content in (*sent, *written):
        assert not any(secret in content or secret.hex().encode() in content for secret in secrets)
    assert any(b"activation" in content for content in sent)
    assert not set(bits(found.folder)) & set(bits(simulated))
    told = run_config(config(name="told", secrets=apart.run.runs_dir, **VALUES))
    assert bits(told.folder) == bits(found.folder)
    written = [path.read_bytes() for path in told.folder.glob("**/*") if path.is_file()]
    assert not any(secret in content or secret.hex().encode() in content for secret in secrets for content in written)
    assert audit_run(told.folder).ok and audit_run(found.folder).ok
