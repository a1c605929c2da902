"""The federations of the hostile tests are federations: their bits are a simulation's."""

from collections.abc import Callable

import pytest

from atlas_fl.config import Config
from atlas_fl.experiment.run import run_config
from atlas_fl.params import digest
from atlas_fl.storage.tensors import read_tensors
from tests.hostile.federation import SITES, federate, secrets_folder


@pytest.mark.slow
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
