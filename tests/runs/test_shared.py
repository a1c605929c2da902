"""Runs with `--server-adapters per_cluster`: one set above the cuts of a cluster, audited and gone on with."""

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from atlas_fl.audit.check import audit_run
from atlas_fl.config import Config, validate
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.run import RunResult, run_config
from atlas_fl.params import HEAD
from tests.runs.reading import same_tensors, state
from tests.runs.sessions import check_same_runs, in_sessions

Make = Callable[..., Config]
CUTS = "movie=1,trec-0=1,trec-1=2"
SHARED = {"split": CUTS, "server_adapters": "per_cluster", "eta": 0.3}


def models(result: RunResult) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state(result.folder).items():
        kind, client, name = key.split("/", 2)
        if kind == "strategy":
            found.setdefault(client, {})[name] = tensor
    return found


def above(params: dict[str, torch.Tensor], block: int) -> dict[str, torch.Tensor]:
    layers = tuple(f"layer.{k}." for k in range(block, 3))
    return {key: value for key, value in params.items() if not key.startswith(HEAD) and any(n in key for n in layers)}


@pytest.mark.slow
def test_a_cluster_ends_with_one_set_and_sessions_make_the_same_run(config: Make) -> None:
    settings = {**SHARED, "participation": 0.75, "dropout": 0.1, "ranks": "budget", "aggregate_every": 2}
    once = run_config(config(name="once", **settings))
    parts = in_sessions(config(name="parts", max_rounds=1, **settings))
    check_same_runs(once.folder, parts.folder)
    for result in (once, parts):
        report = audit_run(result.folder)
        assert report.ok
        assert any(row.check == "common" for row in report.rows)
    found = models(once)
    for first, second, block in (("movie-0", "movie-1", 1), ("trec-0", "trec-1", 2)):
        assert same_tensors(above(found[first], block), above(found[second], block))
        assert len(above(found[first], block)) == 4 * (3 - block)
        assert not same_tensors(above(found[first], 0), above(found[second], 0))
    assert not same_tensors(above(found["movie-0"], 1), above(found["trec-0"], 1))


def test_clusters_of_one_make_the_run_of_clients_of_their_own(config: Make) -> None:
    settings = {"split": "movie=1,trec=2", "eta": 0.3, "dropout": 0.1, "clients_per_task": 1}
    own = run_config(config(name="own", **settings))
    shared = run_config(config(name="shared", server_adapters="per_cluster", **settings))
    check_same_runs(own.folder, shared.folder)


def test_an_audit_finds_a_client_with_a_set_of_its_own(config: Make) -> None:
    result = run_config(config(name="run", rounds=1, **SHARED))
    assert audit_run(result.folder).ok
    path = result.folder / "audit/round-0001/trained.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if key.startswith("movie-1/") and "layer.2." in key)
    save_file({**tensors, key: tensors[key] + 1}, path)
    wrong = [row for row in audit_run(result.folder).rows if not row.ok and row.check == "common"]
    assert [row.client for row in wrong] == ["movie-1"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "none"}, "--server-adapters per_cluster is about the parts above cuts, and --split none cuts none"),
        ({"topology": "paired"}, "--topology paired puts its clients on several hosts"),
        ({"recluster_every": 1}, "--recluster-every 1 may change who that is"),
        ({"strategy": "local_only"}, "--strategy local_only shares nothing"),
    ],
)
def test_what_no_set_can_be_shared_with_is_told_in_a_line(config: Make, settings, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        validate(config(**{"split": "1", "server_adapters": "per_cluster", **settings}))
    assert "\n" not in str(caught.value)
