"""What a server keeps of its clients, and without whom a run can go on."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from atlas_fl.client.job import Job
from atlas_fl.config import Config, config_hash, parse_config, to_toml, with_values
from atlas_fl.config.schema import RunConfig
from atlas_fl.deployment.server import _expected_clients
from atlas_fl.deployment.service import (
    REST_BYTES,
    ServerOptions,
    read_sites,
    request_limit,
    without_places,
    write_sites,
)
from atlas_fl.errors import AtlasError, CheckpointError
from atlas_fl.runtime.coordinator.client_registry import ClientProxy
from atlas_fl.runtime.protocol.client_metadata import read_device, read_metadata
from atlas_fl.runtime.remote import RemoteEngine
from atlas_fl.runtime.transport.frames import FRAME_LIMIT
from atlas_fl.storage.run_folder import RunFolder
from atlas_fl.storage.tensors import encoded_size
from tests.runtime.coordinator.test_coordinator import CENSUS


def seat(name: str, device: str) -> ClientProxy:
    return ClientProxy(name, metadata=read_metadata(CENSUS), device=read_device(device))


def test_what_sites_said_of_themselves_is_read_as_it_was_and_later_ones_are_added(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_sites(folder, [seat("a", "cpu_2gb"), seat("b", "laptop_8gb")])
    write_sites(folder, [seat("c", "cpu_2gb")])
    devices = {"a": "cpu_2gb", "b": "laptop_8gb", "c": "cpu_2gb"}
    assert read_sites(folder) == {name: (read_metadata(CENSUS), read_device(text)) for name, text in devices.items()}


def test_what_was_altered_is_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert read_sites(folder) == {}
    write_sites(folder, [seat("a", "cpu_2gb")])
    folder.sites.write_bytes(folder.sites.read_bytes().replace(b"accuracy", b"accurate"))
    with pytest.raises(CheckpointError, match="damaged file"):
        read_sites(folder)


@pytest.mark.parametrize(
    ("without", "planned", "listed", "found"),
    [
        (["b"], ["a", "b"], ["a"], ("a",)),
        (["c"], ["a", "b"], ["a", "b", "c"], ("a", "b")),
        (["c"], [], ["a", "c"], ("a",)),
        (["d"], ["a", "b"], ["a", "b", "c"], "unknown client in --without 'd'"),
        (["a", "b"], ["a", "b"], ["a", "b", "c"], "--min-clients is 0, and 0 clients are waited for"),
        (["c"], [], ["c"], "0 clients are waited for; lower it, list more in .*, or leave fewer out"),
        ([], ["a", "b"], ["a"], "was planned with b, not listed here; list them again, go on with --without b"),
    ],
)
def test_a_run_goes_on_without_clients_that_it_has_and_not_without_all_of_them(
    tmp_path: Path, without: list[str], planned: list[str], listed: list[str], found: str | tuple[str, ...]
) -> None:
    service = ServerOptions(certs=tmp_path, without=tuple(without))
    how = {"planned": tuple(planned), "listed": tuple(listed)}
    if isinstance(found, tuple):
        assert _expected_clients(RunFolder(tmp_path), service, **how) == found
        return
    with pytest.raises(AtlasError, match=found):
        _expected_clients(RunFolder(tmp_path), service, **how)


def test_who_is_left_out_or_trains_on_is_asked_nothing() -> None:
    engine = RemoteEngine(
        manager=SimpleNamespace(open_jobs={"c": None}),  # type: ignore[arg-type]
        bridge=None,  # type: ignore[arg-type]
        deadline_seconds=1,
        split_server=None,
        min_clients=0,
        excluded=frozenset(["b"]),
    )
    assert engine.run("evaluate", [Job(client=name, round=1, params={}, options=None) for name in "bc"]) == []


def test_settings_that_a_site_gets_have_the_servers_hash_and_not_its_places() -> None:
    config = Config(run=RunConfig(runs_dir="/home/server", name="private", secrets="/home/all", keep_checkpoints=7))
    told = to_toml(without_places(config))
    assert "/home" not in told
    assert "private" not in told
    found = parse_config(told, origin="test")
    assert config_hash(found) == config_hash(config)
    assert found.run.keep_checkpoints == 7


def test_a_request_may_be_as_large_as_what_a_client_sends_and_not_much_larger() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(384, 1536), torch.nn.Linear(1536, 384))
    config = with_values(Config(), {"candidates": "2+64", "strategy": "fedavg"})
    largest = 4 * 64 * 2 * (384 + 1536)  # by hand: both factors of both layers at rank 64, in fp32
    assert 2 * largest + REST_BYTES == request_limit(config, model) < FRAME_LIMIT
    assert request_limit(with_values(config, {"split": "a=1"}), model) == FRAME_LIMIT
    assert 3 * 2 * largest + REST_BYTES == request_limit(with_values(config, {"strategy": "kriging"}), model)
    assert request_limit(with_values(config, {"ranks": "128"}), model) == 4 * largest + REST_BYTES
    body = {"weight": torch.empty(2**27, device="meta")}  # GPT-2 in fp32
    assert request_limit(config, model, body=body) == REST_BYTES + 2 * encoded_size(body) > 2 * 2**29
