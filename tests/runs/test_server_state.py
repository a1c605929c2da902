"""What a strategy remembers, in real runs: resumed to the bit, audited, carried to newcomers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from atlas_fl.audit.check import audit_run
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.run import run_config
from atlas_fl.storage.run_folder import RunFolder
from tests.runs.federation import Federations
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, same_tensors, state

LATE = {"arrive": ("movie-1=2", "trec-0=3"), "rounds": 3}


def server_state(folder: Path, *, round: int | None = None) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state(folder, round=round).items() if name.startswith("server/")}


@pytest.mark.slow
def test_a_newcomer_joins_the_moments_of_its_cohort(config: Make) -> None:
    folder = run_config(config(**LATE, strategy="fedadam")).folder
    cohorts = [{path.split("/")[2] for path in server_state(folder, round=round)} for round in (2, 3)]
    assert cohorts == [{"all", "task-movie"}, {"all", "task-movie", "task-trec"}], "who is alone has no head in common"
    report = passing_audit(folder)
    assert sum(row.check == "joined" for row in report.rows) == 2


@pytest.mark.slow
def test_a_newcomer_of_pfedgraph_is_remembered_with_the_model_that_it_began_with(config: Make) -> None:
    folder = run_config(config(**LATE, strategy="pfedgraph", space="factors")).folder
    assert {path.split("/")[2] for path in server_state(folder)} == {"movie-0", "trec-1", "movie-1", "trec-0"}
    passing_audit(folder)
    # it was remembered with another model than it began with
    file = folder / "audit" / "joined-0002" / "server.safetensors"
    tensors = load_file(file)
    tensors["initial/movie-1/encoder.layer.0.attention.self.query.lora_B"] += 0.01
    save_file(tensors, file)
    failures = {(row.round, row.check) for row in audit_run(folder).failures}
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
def test_a_served_run_has_the_moments_of_a_simulation(federation: Federations) -> None:
    served = federation(strategy="fedadam", rounds=2)
    served.complete()
    served.is_as_simulated()
    folder = served.served.path
    assert server_state(folder, round=2) and same_tensors(
        server_state(folder, round=2), server_state(served.simulated, round=2)
    )
    passing_audit(folder)
