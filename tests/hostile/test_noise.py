"""The noise of a site is its own: the server has all that a simulation has, and not the site's secret."""

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atlas_fl.config import Config
from atlas_fl.errors import ProtocolError
from atlas_fl.experiment.run import run_config
from atlas_fl.params import digest
from atlas_fl.runtime.protocol.messages import CutInfo
from atlas_fl.split.channel import Cut
from atlas_fl.split.codec import simulated_secret
from atlas_fl.storage.tensors import read_tensors
from tests.hostile.federation import SITES, federate, home_of_site

NOISY = {"split": "movie-0=1,movie-1=2", "wire_noise": 0.5, "head": "client"}


def bits(folder: Path) -> list[str]:
    return [digest(read_tensors(folder / "adapters" / name / "adapter_model.safetensors")) for name in SITES]


def bytes_of(head: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors.values()]
    return b"\n".join([json.dumps([head, list(tensors)]).encode(), *flat])


@pytest.mark.slow
def test_sites_draw_from_secrets_that_never_leave_them_and_with_a_simulations_end_in_its_bits(
    config: Callable[..., Config],
) -> None:
    simulated = run_config(config(name="simulated", **NOISY)).folder
    sent = list[bytes]()

    def watch(head, tensors, _):
        sent.append(bytes_of(head, tensors))
        return head, tensors

    apart = config(name="apart", **NOISY)
    found = federate(apart, dict.fromkeys(SITES, watch))
    assert (found.error, found.faults, found.refused) == (None, [], {})
    files = {name: Path(apart.run.runs_dir) / f"{name}-noise-secret" for name in SITES}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files.values())
    secrets = [bytes.fromhex(path.read_text()) for path in files.values()]
    assert len(set(secrets)) == len(SITES)
    written = [path.read_bytes() for path in found.folder.glob("**/*") if path.is_file()]
    for content in (*sent, *written):
        assert not any(secret in content or secret.hex().encode() in content for secret in secrets)
    assert any(b"activation" in content for content in sent)
    assert not set(bits(found.folder)) & set(bits(simulated))

    told = config(name="told", **NOISY)
    for name, path in files.items():
        path.write_text(simulated_secret(told.run.seed, name).hex())
    assert bits(federate(told).folder) == bits(simulated)


@pytest.mark.parametrize("noise", [0.0, 0.4, float("nan")])
def test_a_site_sends_no_row_with_other_noise_than_the_settings_have(
    config: Callable[..., Config], noise: float
) -> None:
    home, told = home_of_site(config(**NOISY), "movie-0").home, CutInfo(places=(), tokens=100, part="")
    with pytest.raises(
        ProtocolError, match=r"noise of (0|0\.4|nan) at a cut, and its settings say 0\.5; nothing was sent"
    ):
        home(Cut(blocks=1, noise=noise), told)
