"""Findings of an audit on the adapter that tasks have in common (`--multitask`)."""

from types import SimpleNamespace

import pytest
import torch

from atlas_fl.audit.recompute import common_faults, with_common_adapter
from atlas_fl.audit.run_files import Models

TASKS = ("a", "b", "c")
KEY = "block.1.q.lora_B"


def models(**changed: float) -> Models:
    """Everyone's adapter is 1 but for what is changed; heads are each one's own."""
    return {
        name: {KEY: torch.full((2,), changed.get(name, 1.0)), "head.w": torch.full((2,), float(k))}
        for k, name in enumerate(TASKS)
    }


def faults(trained: Models, after: Models, kept: tuple[str, ...] = ()) -> dict[str, str]:
    return dict(common_faults(SimpleNamespace(clients=TASKS), trained, after, excluded=kept))


@pytest.mark.parametrize("client", ["b", "c"])
def test_an_adapter_that_differs_is_found_as_trained_and_as_begun_with(client: str) -> None:
    assert faults(models(), models()) == {"a": "", "b": "", "c": ""}
    wrong = models(**{client: 9.0})
    for trained, after, what in ((wrong, models(), "trained"), (models(), wrong, "starts with")):
        assert faults(trained, after)[client] == f"{client} {what} another {KEY} than a"


def test_an_adapter_of_another_shape_is_another() -> None:
    wrong = models()
    wrong["c"][KEY] = torch.ones(1)  # it would broadcast
    assert faults(models(), wrong)["c"] == f"c starts with another {KEY} than a"


def test_who_took_no_part_or_kept_its_own_model_is_compared_with_nobody() -> None:
    trained = {name: own for name, own in models().items() if name != "a"}
    assert not any(faults(trained, models()).values())
    wrong = models(c=9.0)
    assert not any(faults(wrong, wrong, kept=("c",)).values())


def test_before_the_step_who_took_no_part_has_the_adapter_that_was_trained() -> None:
    before, trained = models(), {"b": models(b=4.0)["b"]}
    held = with_common_adapter({**before, **trained}, trained)
    assert [float(own[KEY][0]) for own in held.values()] == [4.0, 4.0, 4.0]
    assert [float(own["head.w"][0]) for own in held.values()] == [0.0, 1.0, 2.0]
    assert float(before["a"][KEY][0]) == 1.0, "what was read is not changed"
