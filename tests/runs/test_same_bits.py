"""Final states of all methods and of other kinds of runs, as they were recorded: refactoring changes no bit.

Bits depend on the processor and on the libraries, so that records of another machine say nothing. `same_bits.py`
records them anew: after a change that is meant to alter results, and never to make this test pass.
"""

from pathlib import Path

import pytest

from tests.runs.same_bits import CASES, machine, recorded, run_case

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(machine() not in recorded(), reason=f"nothing is recorded for {machine()}"),
]


SEEN = recorded().get(machine(), {})


@pytest.mark.parametrize("name", [pytest.param(name, marks=case.marks) for name, case in CASES.items() if name in SEEN])
def test_a_run_ends_in_the_bits_that_it_ended_in_before(name: str, shared_folder: Path) -> None:
    assert run_case(name, shared_folder) == SEEN[name]
