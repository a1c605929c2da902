"""Simulated hostile clients: what each kind sends, and that it is the same whenever it is asked for."""

from dataclasses import dataclass, replace
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.client.job import Job, Update
from atlas_fl.client.options import TrainOptions
from atlas_fl.config.schema import AttackConfig
from atlas_fl.data.clients import ClientData
from atlas_fl.data.registry import find_tasks
from atlas_fl.data.task import Rows
from atlas_fl.errors import ConfigError
from atlas_fl.runtime.attacks import ATTACKS, HostileEngine, choose_attackers, with_flipped_labels

NAMES, OPTIONS = ("a", "b", "c"), TrainOptions(seed=3)
SPACE = StrategyOptions(space="product", share=("A", "B", "head"), scale=lambda _: 2.0)


def model(seed):
    draw = torch.Generator().manual_seed(seed)
    shapes = {"q.lora_A": (2, 6), "q.lora_B": (5, 2), "head.weight": (2, 6)}
    return {key: torch.randn(shape, generator=draw) for key, shape in shapes.items()}


BEFORE, AFTER = {**model(1), "q.lora_B": torch.zeros(5, 2)}, model(2)


def dense(params):
    return (2 * params["q.lora_B"] @ params["q.lora_A"]).double()


@dataclass
class Honest:
    def run(self, _action, jobs):
        return [Update(client=job.client, params=AFTER, examples=10, metrics={}) for job in jobs]


def sent(kind, *, size=None, round=1, action="train", options=OPTIONS):
    engine = HostileEngine(
        engine=Honest(), attack=ATTACKS[kind], attackers=("b",), size=size, space=SPACE, seed=3,
        examples={"a": 10, "b": 20, "c": 30},
    )  # fmt: skip
    jobs = [Job(client=name, params=BEFORE, round=round, options=options) for name in NAMES]
    return {update.client: update.params for update in engine.run(action, jobs)}


def test_the_setting_names_every_attack():
    assert set(get_args(get_type_hints(AttackConfig)["attack"])) == {"none", *ATTACKS}


@pytest.mark.parametrize("kind", ATTACKS)
def test_only_attackers_alter_only_what_they_trained_and_the_same_way_again(kind):
    first, second = sent(kind), sent(kind)
    assert first["a"] is AFTER and first["c"] is AFTER
    assert all(torch.equal(first["b"][key], second["b"][key]) for key in AFTER)
    assert {key: tensor.shape for key, tensor in first["b"].items()} == {key: t.shape for key, t in AFTER.items()}
    assert sent(kind, action="evaluate")["b"] is AFTER
    altered = any(not torch.equal(first["b"][key], AFTER[key]) for key in AFTER)
    assert altered == (kind != "label_flip")


def test_what_does_not_train_is_not_sent_and_so_not_altered():
    options = TrainOptions(seed=3, trained_parts="alternate")
    for round, (still, moving) in ((1, ("q.lora_A", "q.lora_B")), (2, ("q.lora_B", "q.lora_A"))):
        altered = sent("noise", round=round, options=options)["b"]
        assert torch.equal(altered[still], AFTER[still])
        assert not torch.equal(altered[moving], AFTER[moving])


@pytest.mark.parametrize(
    ("kind", "size", "factor"), [("sign_flip", None, -1), ("sign_flip", 30, -30), ("scale", None, 30)]
)
def test_a_change_is_sent_reversed_or_larger(kind, size, factor):
    found = sent(kind, size=size)["b"]
    assert torch.allclose(dense(found), factor * dense(AFTER), rtol=1e-4, atol=1e-4), "it began with B = 0"
    wanted = BEFORE["head.weight"] + factor * (AFTER["head.weight"] - BEFORE["head.weight"])
    assert torch.allclose(found["head.weight"], wanted, atol=1e-4)


def test_noise_has_ten_times_the_size_of_the_change_and_is_another_in_every_round():
    found = sent("noise")["b"]
    noise, change = found["head.weight"] - AFTER["head.weight"], AFTER["head.weight"] - BEFORE["head.weight"]
    assert 5 < float(noise.norm() / change.norm()) < 20
    assert not torch.equal(found["head.weight"], sent("noise", round=2)["b"]["head.weight"])


def test_a_replacement_is_what_the_average_becomes():
    """With a third of the examples, w + 3 (x - w): the others at w, their average is x."""
    found = sent("model_replacement")["b"]["head.weight"]
    mean = (10 * BEFORE["head.weight"] + 20 * found + 30 * BEFORE["head.weight"]) / 60
    size = float(AFTER["head.weight"].square().mean().sqrt())
    assert 0.4 * size < float(mean.square().mean().sqrt()) < 2 * size
    assert float(((mean - AFTER["head.weight"]) ** 2).mean()) > 0.5 * size**2


def test_labels_are_reversed_in_training_alone():
    (task,) = find_tasks(("trec",), ())
    rows = Rows(text=("x",) * 3, label=np.array([0, 1, 5]))
    client = ClientData(name="trec-0", task=task, train=rows, validation=rows, test=rows)
    honest, flipped = with_flipped_labels([replace(client, name="trec-1"), client], ["trec-0"])
    assert flipped.train.label.tolist() == [5, 4, 0]
    assert flipped.validation.label.tolist() == flipped.test.label.tolist() == [0, 1, 5]
    assert honest.train is rows
    number = replace(client, task=replace(task, num_labels=1))
    with pytest.raises(ConfigError, match="reverses classes, and task 'trec' has none; take another"):
        with_flipped_labels([number], ["trec-0"])


def test_attackers_are_named_or_drawn_by_the_seed():
    assert choose_attackers(("c", "a"), NAMES, seed=1) == ("a", "c")
    assert choose_attackers(("1",), NAMES, seed=1) == choose_attackers(("1",), NAMES, seed=1)
    assert {choose_attackers(("1",), NAMES, seed=seed) for seed in range(20)} == {("a",), ("b",), ("c",)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("d",), "--attackers names 'd', and the clients are a, b, c; name some"),
        (("3",), "--attackers is 3: of 3 clients at least one attacks and one is honest"),
        (("0",), "--attackers is 0: of 3 clients"),
        (("a", "b", "c"), "--attackers is a b c: of 3 clients"),
    ],
)
def test_impossible_attackers_are_one_line(words, message):
    with pytest.raises(ConfigError, match=message):
        choose_attackers(words, NAMES, seed=1)
