"""Forty sites in one federation."""

from collections.abc import Callable

import pytest

from tests.runs.federation import Federation

pytestmark = pytest.mark.slow


def test_forty_sites_end_in_the_bits_of_their_simulation(federation: Callable[..., Federation]) -> None:
    small = {"samples": 16, "validation_samples": 6, "test_samples": 6, "max_length": 16}
    sites = {f"movie-{number}": "cpu_2gb" for number in range(40)}
    fed = federation(sites, **small, clients_per_task=40, rounds=1, strategy="fedavg", ranks="4")
    fed.complete()
    fed.is_as_simulated()
