"""Everything a user can set, and how it is read, checked and written.

The same dataclasses are the command line, the TOML file and the Python API. Below `plan` and `train` no function
sees them: it gets the numbers that it needs.
"""

from atlas_fl.config.files import load_config as load_config
from atlas_fl.config.files import parse_config as parse_config
from atlas_fl.config.files import to_toml as to_toml
from atlas_fl.config.identity import check_mask_file as check_mask_file
from atlas_fl.config.identity import config_hash as config_hash
from atlas_fl.config.identity import differences as differences
from atlas_fl.config.identity import identity_settings as identity_settings
from atlas_fl.config.identity import pin_mask_file as pin_mask_file
from atlas_fl.config.identity import pinned_config as pinned_config
from atlas_fl.config.identity import run_folder as run_folder
from atlas_fl.config.schema import Config as Config
from atlas_fl.config.settings import settings as settings
from atlas_fl.config.settings import value_of as value_of
from atlas_fl.config.settings import with_values as with_values
from atlas_fl.config.validation import validate as validate
