"""A control that every learner must pass: without a relation between text and label there is nothing to learn."""

from collections.abc import Callable

import pytest

from atlas_fl.config import Config
from atlas_fl.experiment.run import run_config


@pytest.mark.slow
def test_shuffled_labels_bring_accuracy_to_the_majority_class(config: Callable[..., Config]) -> None:
    def gain(name: str, *, shuffle: bool) -> float:
        """Accuracy on test examples over the share of their majority class, with the embedded model."""
        data = {"tasks": ("trec",), "clients_per_task": 1, "samples": 100, "validation_samples": 2, "test_samples": 200}
        training = {"model": "minilm", "lr": 2e-3, "rounds": 5, "eval_every": 5, "strategy": "local"}
        made = config(name=name, shuffle_labels=shuffle, audit=False, ranks=4, **data, **training)
        return float(run_config(made).summary["overall"]["final"]["test"]["gain_over_majority"])

    # 200 examples: one standard deviation of guessing is .03.
    assert (found := gain("true", shuffle=False)) > 0.2, found
    assert abs(found := gain("shuffled", shuffle=True)) < 0.1, found
