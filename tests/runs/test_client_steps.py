"""The optimizer steps of all clients, as tables compare them: second models and halves are counted with the rest."""

import pytest

from atlas_fl.experiment.run import run_config
from tests.runs.finished import Make


@pytest.mark.slow
def test_steps_by_hand(config: Make) -> None:
    """Two clients of 16 examples in batches of 8 and two rounds: 2 x 2 x 2 steps of one model a client."""
    sizes = {"samples": 16, "validation_samples": 4, "test_samples": 4, "batch_size": 8, "rounds": 2}
    small = {**sizes, "tasks": "movie", "ranks": 4, "space": "factors"}

    def steps(strategy: str, **settings: object) -> int:
        run = run_config(config(name=strategy, strategy=strategy, **small, **settings, audit=False, alone="none"))
        return int(run.summary["steps"])

    assert steps("fedavg") == 8
    assert steps("ditto") == 16, "a second model takes as many"
    assert steps("kriging", measure_round=1) == 16, "two halves once, each of as many steps as a round"
