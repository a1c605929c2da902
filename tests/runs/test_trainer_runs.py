"""Runs whose clients train by a stock `transformers.Trainer`: audited, same bits with workers and after a resume."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from atlas_fl.cli.main import main
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.plugins import load_plugins
from tests.runs.federation import Federations
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows, same_tensors, state
from tests.runs.workers import check_same, check_workers

EXAMPLE = Path(__file__).parents[2] / "examples/plugins/hf_trainer.py"
SETTINGS: Mapping[str, Any] = {
    **{"plugin": (str(EXAMPLE),), "trainer": "hf_trainer", "pack_tokens": 1, "tasks": "movie"},
    **{"samples": 8, "validation_samples": 4, "test_samples": 4},
}


@pytest.fixture(autouse=True)
def _no_plugins() -> Iterator[None]:
    yield
    load_plugins(())


@pytest.mark.product
@pytest.mark.slow
def test_a_run_by_the_example_has_the_same_bits_with_workers_and_after_a_resume(config: Make) -> None:
    """`atlas` mixes by what clients train on either half of their examples, which the example does too."""
    settings = {**SETTINGS, "strategy": "atlas", "ranks": "4"}
    whole = check_workers(config, **settings)
    stopped = run_config(config(name="stopped", max_rounds=1, **settings))
    load_plugins(())
    check_same(whole, resume_run(stopped.folder).folder)
    load_plugins(())
    passing_audit(whole, "loaded", "mixed", "moved")
    own = run_config(config(name="ours", **{**settings, "trainer": "atlas"}))
    assert not same_tensors(state(whole), state(own.folder))
    assert [set(row) for row in rows(whole)] == [set(row) for row in rows(own.folder)]


@pytest.mark.slow
def test_sites_train_by_the_example_as_the_simulation_does(federation: Federations) -> None:
    fed = federation(plugin=(str(EXAMPLE),), trainer="hf_trainer", rounds=1)
    fed.complete("--plugin", str(EXAMPLE))
    fed.is_as_simulated()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"trainable": "full", "lr": 1e-3, "candidates": (4, 8, 16, 32, 64), "strategy": "fedavg_cluster"},
        pytest.param(
            {"strategy": "fedavg", "trained_parts": "alternate", "participation": 0.5}, marks=pytest.mark.product
        ),
        pytest.param({"strategy": "ifca", "ranks": "4"}, marks=pytest.mark.product),
        {"adapted_blocks": 1, "precision": "bf16", "optimizer": "sgd"},
        {"strategy": "hetlora", "prior_correction": True, "personal_rounds": 1},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_the_example_goes_with_what_is_not_refused(config: Make, changes: dict[str, object]) -> None:
    run = run_config(config(**{**SETTINGS, **changes}))
    assert run.complete
    passing_audit(run.folder)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer", "hf_trainers"], "unknown name in --trainer 'hf_trainers'; did you mean 'hf_trainer'"),
        (["--split", "2"], "--split 2 cuts models in two, and --trainer hf_trainer trains whole clients; leave one"),
        (["--strategy", "scaffold"], "leave --trainer hf_trainer out, or take another strategy than scaffold, which"),
        (["--strategy", "fedprox"], "--proximal-mu "),
        (["--strategy", "ditto"], "--second-model proximal is combined with the shared model in ATLAS's own steps"),
        (["--strategy", "flora"], "--strategy flora sends what stands frozen beside the adapters, and --trainer hf_tr"),
        (["--strategy", "fedrep"], "leave --trainer hf_trainer out, or take another strategy than fedrep, which sets"),
        (["--dropout", "0.1"], "--dropout 0.1 is drawn in ATLAS's own steps, and --trainer hf_trainer takes steps of"),
        (["--precision", "fp16"], "take --precision bf16 or fp32, or leave --trainer out"),
        (["--gradient-checkpointing"], "--gradient-checkpointing needs adapters in place while gradients are"),
        (["--preset", "vision-lora"], "(images); leave the others out, or take --trainer atlas"),
        (["--tasks", "squad"], "there is squad (text to write); leave the others out, or take --trainer atlas"),
        (["--plugin", "examples/plugins/client_term.py"], "in which the term small_adapters of a plug-in would not"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_a_loop_of_ones_own_cannot_do_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    usual = ["--plugin", str(EXAMPLE), "--trainer", "hf_trainer", "--preset", "smoke", "--runs-dir", str(runs)]
    assert main(["run", *usual, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not runs.exists()
