"""The federations of the hostile tests are federations: their bits are a simulation's, and a change is what is sent."""

from collections.abc import Callable

from atlas_fl.config import Config
from atlas_fl.experiment.run import run_config
from atlas_fl.params import digest
from atlas_fl.storage.jsonl import read_rows
from atlas_fl.storage.tensors import read_tensors
from tests.hostile.federation import SITES, federate, secrets_folder


def test_a_federation_in_threads_ends_in_the_bits_of_a_simulation(config: Callable[..., Config]) -> None:
    found = federate(config(name="served"))
    assert found.error is None
    assert (found.faults, found.refused) == ([], {})
    assert found.models.keys() == set(SITES)
    simulated = run_config(config(name="simulated", secrets=secrets_folder())).folder
    for name in SITES:
        bits = [
            digest(read_tensors(folder / "adapters" / name / "adapter_model.safetensors"))
            for folder in (found.folder, simulated)
        ]
        assert bits[0] == bits[1]


def test_a_site_that_fails_in_every_round_is_missing_and_the_others_end(config: Callable[..., Config]) -> None:
    def fails(head, tensors, action):
        if head["kind"] != "result" or action != "train":
            return head, tensors
        return {"kind": "failed", "number": head["number"], "reason": "no memory"}, {}

    found = federate(config(), {"movie-2": fails}, least=2)
    assert found.error is None
    assert found.faults == []
    rows = read_rows(found.folder / "metrics.jsonl")
    assert [row["client"] for row in rows if row.get("event") == "missing"] == ["movie-2"] * 2
    assert found.noted("no train of movie-2 in round 1: no memory")


def test_a_site_that_never_answers_lets_the_deadline_pass(config: Callable[..., Config]) -> None:
    found = federate(
        config(rounds=1),
        {"movie-2": lambda head, tensors, _: None if head["kind"] == "result" else (head, tensors)},
        deadline=1.0,
    )
    assert str(found.error).startswith("2 of 3 clients answered fingerprint in round 0, not movie-2, and 3 are needed")
    assert found.faults == []
