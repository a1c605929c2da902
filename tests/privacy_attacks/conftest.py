"""The config of small federations, and the model that they train."""

from tests.runs.conftest import config as config
from tests.runs.conftest import finished as finished
from tests.runs.conftest import shared_config as shared_config
from tests.runs.conftest import shared_folder as shared_folder
from tests.runs.conftest import tiny_model as tiny_model
