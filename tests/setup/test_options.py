"""The learning rate that suits what trains, where the user gives none."""

import pytest

from atlas_fl.config import Config, with_values
from atlas_fl.setup.options import train_options, warmup_options


@pytest.mark.parametrize(
    ("changes", "with_images", "expected"),
    [
        ({}, False, 1e-3),  # MiniLM's adapters
        ({"model": "bert"}, False, 3e-4),
        ({"trainable": "full"}, False, 1e-4),
        ({"trainable": "full", "model": "bert"}, False, 3e-5),
        ({"trainable": "full", "lr": 0.02}, False, 0.02),
        ({"trainable": "full", "model": "dino-vits16"}, True, 1e-3),  # registered for SGD on all of it
    ],
)
def test_all_weights_of_a_text_model_train_at_a_tenth_of_the_rate_of_its_adapters(
    changes: dict[str, object], with_images: bool, expected: float
) -> None:
    config = with_values(Config(), changes)
    assert train_options(config, with_images=with_images).lr == pytest.approx(expected)


def test_the_warm_up_of_adapters_keeps_their_rate() -> None:
    assert warmup_options(with_values(Config(), {"trainable": "full"})).lr == 1e-3
