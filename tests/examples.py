"""How many examples the laws that hypothesis checks are tried on."""

import os

from hypothesis import settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "same")
"""The profile of hypothesis; `tests/conftest.py` registers `same` and `quick`."""
QUICK_EXAMPLES = 12
"""At most so many examples of a law in the profile `quick`."""


def examples(most: int) -> settings:
    """Settings for at most this number of examples without a deadline; for fewer in the profile `quick`."""
    return settings(deadline=None, max_examples=min(most, QUICK_EXAMPLES) if PROFILE == "quick" else most)
