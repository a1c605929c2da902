"""Laws of what sites say of themselves: it is refused, or kept in a run's folder as it was."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.ranks.devices import BOUNDS as DEVICE_BOUNDS
from atlas_fl.ranks.devices import parse_device
from atlas_fl.runtime.coordinator.client_registry import ClientProxy
from atlas_fl.runtime.protocol.client_metadata import read_metadata
from atlas_fl.storage.run_folder import RunFolder
from tests.examples import examples
from tests.runtime.coordinator.test_coordinator import CENSUS

NUMBERS = st.one_of(
    st.floats(width=64),
    st.integers(-(10**30), 10**30),
    st.sampled_from([0, 1, -1, 1e17, 1e18, 1e299, 1e300, 5e-324, 10**12, 10**12 + 1, True, None, "1"]),
)


def with_value(content, place, value):
    """The content with this value at this place."""
    copy = json.loads(json.dumps(content))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return copy


@given(value=NUMBERS, place=st.sampled_from([("examples", "train"), ("max_length",), ("left_out",), ("num_labels",)]))
@examples(150)
def test_what_a_site_says_of_itself_is_refused_or_kept_as_it_was(value, place) -> None:
    from atlas_fl.deployment.service import read_sites, write_sites

    try:
        metadata = read_metadata(with_value({**CENSUS, "left_out": 0}, place, value))
    except ProtocolError as error:
        assert place[-1] in str(error) or "does not hold together" in str(error)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        device = parse_device("d=memory_gb=3,gflops=50,up_mbps=5,down_mbps=20,latency_ms=60,max_rank=8")
        write_sites(folder, [ClientProxy("a", metadata=metadata, device=device)])
        assert read_sites(folder) == {"a": (metadata, device)}


@pytest.mark.parametrize("name", DEVICE_BOUNDS)
def test_every_number_of_a_device_is_taken_at_its_bounds_and_not_beyond(name: str) -> None:
    profile = {"memory_gb": 3, "gflops": 50, "up_mbps": 5, "down_mbps": 20, "latency_ms": 60, "max_rank": 8}
    bounds = DEVICE_BOUNDS[name]

    def described(value: float) -> str:
        return "d=" + ",".join(f"{key}={number!r}" for key, number in {**profile, name: value}.items())

    for value in (bounds.least, bounds.most):
        assert parse_device(described(value)).name == "d"
    for value in (bounds.least / 2 - 1e-9, bounds.most * 2):
        with pytest.raises(ConfigError, match=f"{name}="):
            parse_device(described(value))
