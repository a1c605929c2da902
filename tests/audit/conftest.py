import pytest

from tests.audit.written import write_run


@pytest.fixture
def run(tmp_path):
    """The folder of an honest run with the usual settings."""
    return write_run(tmp_path / "run")
