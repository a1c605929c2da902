"""What a strategy remembers, in real runs: resumed to the bit, audited, carried to newcomers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from atlas_fl.audit.check import audit_run
from atlas_fl.config import Config, config_hash
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.run import run_config
from atlas_fl.storage.run_folder import RunFolder
from tests.runs.federation import Federation
from tests.runs.reading import passing_audit, rows, same_tensors, state
from tests.runs.sessions import in_sessions

Make = Callable[..., Config]
REMEMBERS = {
    "fedadam": {"strategy": "fedadam", "participation": 0.75, "server_lr": 0.02},
    "fedyogi inside clusters": {"strategy": "fedyogi", "within": "clusters"},
    "pfedgraph by layer": {"strategy": "pfedgraph", "gram_by": "layer", "participation": 0.75},
    "fedavgm in factor space": {
        "strategy": "fedavgm",
        "space": "factors",
        "ranks": 4,
        "aggregate_every": 2,
        "rounds": 3,
    },
}


def server_state(folder: Path, *, round: int | None = None) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state(folder, round=round).items() if name.startswith("server/")}


@pytest.mark.slow
@pytest.mark.parametrize("case", REMEMBERS)
def test_sessions_of_one_round_end_in_the_bits_of_the_whole_run_and_pass_the_audit(config: Make, case: str) -> None:
    whole = run_config(config(name="whole", **REMEMBERS[case]))
    parts = in_sessions(config(name="parts", max_rounds=1, **REMEMBERS[case]))
    assert server_state(whole.folder), "the moments are in the checkpoint"
    assert same_tensors(state(whole.folder), state(parts.folder))
    assert rows(whole.folder) == rows(parts.folder)
    files = [
        {path.relative_to(result.folder): path.read_bytes() for path in result.folder.glob("audit/*/*.safetensors")}
        for result in (whole, parts)
    ]
    assert files[0] == files[1]
    passing_audit(parts.folder, "server")


@pytest.mark.slow
def test_a_newcomer_joins_the_moments_of_its_cohort(config: Make) -> None:
    late = {"arrive": ("movie-1=2", "trec-0=3"), "rounds": 3, "strategy": "fedadam"}
    whole = run_config(config(name="whole", **late))
    parts = in_sessions(config(name="parts", max_rounds=1, **late))
    assert same_tensors(state(whole.folder), state(parts.folder))
    cohorts = [{path.split("/")[2] for path in server_state(whole.folder, round=round)} for round in (2, 3)]
    assert cohorts == [{"all", "task-movie"}, {"all", "task-movie", "task-trec"}], "who is alone has no head in common"
    report = passing_audit(parts.folder)
    assert sum(row.check == "joined" for row in report.rows) == 2


@pytest.mark.slow
def test_a_newcomer_of_pfedgraph_is_remembered_with_the_model_that_it_began_with(config: Make) -> None:
    late = {"arrive": ("movie-1=2", "trec-0=3"), "rounds": 3, "strategy": "pfedgraph", "space": "factors"}
    whole = run_config(config(name="whole", **late))
    parts = in_sessions(config(name="parts", max_rounds=1, **late))
    assert same_tensors(state(whole.folder), state(parts.folder))
    assert rows(whole.folder) == rows(parts.folder)
    assert {path.split("/")[2] for path in server_state(whole.folder)} == {"movie-0", "trec-1", "movie-1", "trec-0"}
    passing_audit(parts.folder)
    # it was remembered with another model than it began with
    file = parts.folder / "audit" / "joined-0002" / "server.safetensors"
    tensors = load_file(file)
    tensors["initial/movie-1/encoder.layer.0.attention.self.query.lora_B"] += 0.01
    save_file(tensors, file)
    failures = {(row.round, row.check) for row in audit_run(parts.folder).failures}
    assert (2, "server") in failures


def test_a_rule_that_remembers_nothing_leaves_no_file(config: Make) -> None:
    result = run_config(config(strategy="fedavg", rounds=1))
    assert server_state(result.folder, round=1) == {}
    assert not list(RunFolder(result.folder).path.glob("audit/*/server.safetensors"))


def test_whole_models_of_images_take_a_server_optimizer(image_config: Make) -> None:
    result = run_config(image_config(strategy="fedadam", mask="random", sparsity=0.5, server_lr=0.003))
    passing_audit(result.folder)
    assert {name.split("/")[2] for name in server_state(result.folder)} == {"all", "task-digits"}


def test_whole_models_of_images_take_pfedgraph_and_stand_once_in_its_state(image_config: Make) -> None:
    result = run_config(image_config(strategy="pfedgraph"))
    passing_audit(result.folder)
    one = result.folder / "audit" / "round-0000"
    sizes = [(one / f"{name}.safetensors").stat().st_size for name in ("server", "start")]
    assert sizes[0] < 2 * sizes[1], "eight clients begin with one body, which is there once"
    with pytest.raises(ConfigError, match=r"^.* is in no layer, and .*; take another --strategy, --gram-by all,"):
        run_config(image_config(strategy="pfedgraph", gram_by="layer", name="other"))


@pytest.mark.slow
def test_a_served_run_has_the_moments_of_a_simulation(federation: Callable[..., Federation]) -> None:
    served = federation(strategy="fedadam", rounds=2)
    served.complete()
    served.is_as_simulated()
    folder = served.served.path
    assert server_state(folder, round=2) and same_tensors(
        server_state(folder, round=2), server_state(served.simulated, round=2)
    )
    passing_audit(folder)


def test_settings_of_the_server_at_their_default_are_no_part_of_the_identity(config: Make) -> None:
    assert config_hash(config(server_tau=0.001)) == config_hash(config())
    assert config_hash(config(server_tau=0.01)) != config_hash(config())
