"""What the two halves of a cut client's update come to."""

from collections import Counter
from types import SimpleNamespace

import torch

from atlas_fl.client.job import Job, Update
from atlas_fl.client.split_server import merge_updates
from atlas_fl.params import digest

BELOW, ABOVE = {"b.lora_B": torch.zeros(2)}, {"a.lora_B": torch.ones(2), "c.lora_B": torch.ones(2)}
WHOLE = {**BELOW, **ABOVE}


def side() -> SimpleNamespace:
    job = Job(client="c", params=WHOLE, round=1, options=None)
    below = Job(client="c", params=BELOW, round=1, options=None)
    return SimpleNamespace(job=job, below=below, above=ABOVE, crossed=Counter({("label", "up"): 5}))


def update(params, **values) -> Update:
    return Update(client="c", params=params, **{"examples": 0, "metrics": {}, **values})


def test_each_half_gives_what_it_knows() -> None:
    """The server counts examples and bytes and has the loss; a client's word on these is not taken."""
    own = update({key: value + 1 for key, value in ABOVE.items()}, examples=7, metrics={"loss": 0.5}, keys=2)
    word = {"examples": 99, "metrics": {"loss": 9.0, "seconds": 2.0}, "keys": 1, "crossed": {("label", "up"): 1}}
    told = update({"b.lora_B": torch.full((2,), 3.0)}, **word)
    found = merge_updates(side(), told, own)
    assert list(found.params) == ["a.lora_B", "b.lora_B", "c.lora_B"]
    assert [float(value[0]) for value in found.params.values()] == [2.0, 3.0, 2.0]
    assert (found.examples, found.keys) == (7, 3)
    assert found.metrics == {"loss": 0.5, "seconds": 2.0}
    assert found.crossed == {("label", "up"): 5}
    assert found.loaded is None


def test_who_trained_nothing_has_the_very_model_of_its_job() -> None:
    own = side()
    assert merge_updates(own, update(BELOW), update(own.above)).params is own.job.params


def test_what_was_loaded_is_the_whole_where_both_halves_are_as_sent_and_else_what_differs() -> None:
    right, wrong = {"loaded": digest(BELOW)}, {"loaded": "other"}
    above, false = {"loaded": digest(ABOVE)}, {"loaded": "another"}
    found = [
        merge_updates(side(), update(BELOW, **one), update(ABOVE, **other)).loaded
        for one, other in ((right, above), (wrong, above), (right, false), (wrong, false), ({}, above))
    ]
    assert found == [digest(WHOLE), "other", "another", "other", None]
