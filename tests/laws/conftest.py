"""Architectures are the subject here."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.architectures import ARCHITECTURES


@pytest.fixture(params=ARCHITECTURES)
def tiny(request: pytest.FixtureRequest, tiny_of: Callable[[str], Any]) -> Any:
    """Every architecture in turn."""
    return tiny_of(request.param)
