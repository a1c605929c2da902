"""What an audit says of adapters that clients of one cluster have in common above their cuts."""

import numpy as np
import pytest
import torch

from atlas_fl.audit.recompute import common_faults, with_common_tensors
from atlas_fl.audit.run_files import AuditPlan, Models

CLIENTS = ("a", "b", "c", "d", "e")
LOW, HIGH = "block.0.q.lora_B", "block.1.q.lora_B"


def plan(shared=(0, 1, 0, 0, None), clusters=(0, 0, 0, 1, 0)) -> AuditPlan:
    """a and c have both blocks in common, b the upper one with them; d is in another cluster, e is whole."""
    return AuditPlan(
        clients=CLIENTS,
        tasks=("t",) * 5,
        examples=(1.0,) * 5,
        clusters=clusters,
        ranks=((1, 1),) * 5,
        adjacency=np.zeros((5, 5)),
        importance=None,
        layer_of={"block.0.q": 0, "block.1.q": 1},
        alpha=None,
        rslora=False,
        shared=shared,
    )


def models(**changed: dict[str, float]) -> Models:
    """Everyone's block 0 is 0 and block 1 is 1 but for what is changed; heads are each one's own."""
    values = {name: {LOW: 0.0, HIGH: 1.0, "head.w": float(k)} for k, name in enumerate(CLIENTS)}
    return {
        name: {key: torch.full((2,), value) for key, value in {**own, **changed.get(name, {})}.items()}
        for name, own in values.items()
    }


def faults(trained: Models, after: Models, kept: tuple[str, ...] = ()) -> dict[str, str]:
    return dict(common_faults(plan(), trained, after, excluded=kept))


def test_who_has_something_in_common_is_asked_and_nobody_else() -> None:
    assert faults(models(), models()) == {"a": "", "b": "", "c": ""}
    alone = models(d={LOW: 5.0, HIGH: 5.0}, e={LOW: 6.0, HIGH: 6.0}, b={LOW: 7.0})
    assert faults(alone, alone) == {"a": "", "b": "", "c": ""}


@pytest.mark.parametrize(
    ("client", "key", "other"), [("b", HIGH, "a"), ("c", HIGH, "a"), ("c", LOW, "a")], ids=lambda value: str(value)
)
def test_a_set_that_differs_is_found_as_trained_and_as_begun_with(client: str, key: str, other: str) -> None:
    wrong = models(**{client: {key: 9.0}})
    for trained, after, what in ((wrong, models(), "trained"), (models(), wrong, "starts with")):
        assert faults(trained, after)[client] == f"{client} {what} another {key} than {other}"


def test_a_set_of_another_shape_is_another() -> None:
    wrong = models()
    wrong["c"][HIGH] = torch.ones(1)  # it would broadcast
    assert faults(models(), wrong)["c"] == f"c starts with another {HIGH} than a"


def test_who_took_no_part_or_kept_its_own_model_is_compared_with_nobody() -> None:
    trained = {name: own for name, own in models().items() if name != "a"}
    assert faults(trained, models()) == {"a": "", "b": "", "c": ""}
    wrong = models(c={HIGH: 9.0})
    assert faults(wrong, wrong, kept=("c",)) == {"a": "", "b": "", "c": ""}
    first = models(a={HIGH: 9.0})
    assert faults(first, first, kept=("a",)) == {"a": "", "b": "", "c": ""}


def test_before_the_step_who_took_no_part_has_what_the_first_trained_in_common() -> None:
    before = models()
    trained = {"b": models(b={LOW: 3.0, HIGH: 4.0})["b"], "d": models(d={LOW: 7.0, HIGH: 8.0})["d"]}
    held = with_common_tensors(plan(), {**before, **trained}, trained)
    assert {name: (float(own[LOW][0]), float(own[HIGH][0])) for name, own in held.items()} == {
        "a": (0.0, 4.0),
        "b": (3.0, 4.0),
        "c": (0.0, 4.0),
        "d": (7.0, 8.0),
        "e": (0.0, 1.0),
    }
    assert float(before["a"][HIGH][0]) == 1.0, "what was read is not changed"
    both = {"a": models(a={HIGH: 5.0})["a"], "b": models(b={HIGH: 6.0})["b"]}
    held = with_common_tensors(plan(), {**before, **both}, both)
    assert [float(held[name][HIGH][0]) for name in "abc"] == [5.0, 6.0, 5.0]
