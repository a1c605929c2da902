"""Strong clients that host the upper parts of weak ones, over streams, end with the bits of the simulation."""

import pytest

from atlas_fl.storage.jsonl import read_json, read_rows
from atlas_fl.storage.run_folder import RunFolder
from atlas_fl.storage.tensors import read_tensors
from tests.runs.federation import Federations, adapters
from tests.runs.reading import passing_audit

pytestmark = pytest.mark.slow

PAIRED = {"split": "cpu_2gb=1", "topology": "paired", "dropout": 0.1}
"""movie-0 and trec-0 are small, movie-1 and trec-1 are not."""


DEVICES = {"movie-0": "cpu_2gb", "movie-1": "laptop_8gb", "trec-0": "cpu_2gb", "trec-1": "laptop_8gb"}


def hosted(folder: RunFolder, *, work: str = "training") -> dict[tuple[int, str], str]:
    events = [row for row in read_rows(folder.metrics) if row.get("event") == "hosted" and row["work"] == work]
    return {(row["round"], row["client"]): row["host"] for row in events}


def test_deployed_pairs_are_the_simulated_ones_and_those_of_a_server_that_hosts(federation: Federations) -> None:
    paired = {**PAIRED, "rounds": 2, "devices": ("cpu_2gb", "laptop_8gb"), "head": "client"}
    fed = federation(DEVICES, **paired)
    fed.complete()
    fed.is_as_simulated()
    assert adapters(fed.served.path) == adapters(fed.simulate(topology="server", name="at-server"))
    simulated = RunFolder(fed.simulated)
    pairs = {"movie-0": "movie-1", "trec-0": "trec-1"}
    everywhere = {(round, guest): host for round in (1, 2) for guest, host in pairs.items()}
    for work in ("training", "evaluation"):
        assert hosted(fed.served, work=work) == hosted(simulated, work=work) == everywhere
    rows = [
        sorted(str({key: value for key, value in row.items() if key != "relayed"}) for row in read_rows(folder.ledger))
        for folder in (fed.served, simulated)
    ]
    assert rows[0] == rows[1]
    assert all(row.get("relayed", False) is ("peer" in row) for row in read_rows(fed.served.ledger))
    sent = read_json(fed.served.summary)["bytes"]
    assert sent["relayed"] == read_json(simulated.summary)["bytes"]["between_clients"]
    assert "between_clients" not in sent
    passing_audit(fed.served.path)


def test_deployed_pairs_share_in_part_what_simulated_ones_do(federation: Federations) -> None:
    """B stays at its site, but for the guest's above its cut, which its host moves and the server keeps."""
    devices = {name: DEVICES[name] for name in ("movie-0", "movie-1")}
    settings = {"share": ("A", "head"), "space": "factors", "rounds": 2, "devices": tuple(devices.values())}
    fed = federation(devices, **PAIRED, **settings)
    fed.complete()
    assert fed.own_adapters == adapters(fed.simulated)
    assert hosted(fed.served) == {(1, "movie-0"): "movie-1", (2, "movie-0"): "movie-1"}
    for path in sorted(fed.served.path.rglob("*.safetensors")):
        for key, tensor in read_tensors(path).items():
            above = "movie-0/" in key and ".layer.0." not in key
            assert above or not tensor.numel() or not key.endswith("lora_B"), (path, key)
    passing_audit(fed.served.path)


def test_a_host_that_is_killed_in_mid_round_changes_no_bit(federation: Federations) -> None:
    devices = {name: DEVICES[name] for name in ("movie-0", "movie-1")}
    long = {"local_epochs": 5, "batch_size": 2, "rounds": 2, "devices": tuple(devices.values())}
    fed = federation(devices, **PAIRED, **long)
    server, port = fed.serve()
    guest, host = (fed.join(name, port) for name in fed.sites)
    guest.wait_for("train, round 1")
    host.kill()
    server.wait_for("movie-0 begins its job again with the server, and not with movie-1: it is gone")
    again = fed.join("movie-1", port)
    for program in (guest, again, server):
        program.end()
    fed.is_as_simulated()
    assert hosted(fed.served) == {(1, "movie-0"): "server", (2, "movie-0"): "movie-1"}
    reasons = [row["reason"] for row in read_rows(fed.served.metrics) if row.get("event") == "hosted"]
    assert reasons[0] == "movie-1 was left: it is gone"
    assert not [row for row in read_rows(fed.served.metrics) if row.get("event") == "missing"]
    passing_audit(fed.served.path)
