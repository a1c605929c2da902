"""Everything a user can set, and how it is read, checked and written.

The same dataclasses are the command line, the TOML file and the Python API. Below `plan` and `train` no function
sees them: it gets the numbers that it needs.
"""

from atlas_fl.config.attack import AttackConfig as AttackConfig
from atlas_fl.config.data import DataConfig as DataConfig
from atlas_fl.config.data import arrivals as arrivals
from atlas_fl.config.fields import Setting as Setting
from atlas_fl.config.fields import settings as settings
from atlas_fl.config.fields import value_of as value_of
from atlas_fl.config.groups import ClusteringConfig as ClusteringConfig
from atlas_fl.config.groups import Config as Config
from atlas_fl.config.groups import MixingConfig as MixingConfig
from atlas_fl.config.groups import ModelConfig as ModelConfig
from atlas_fl.config.groups import RanksConfig as RanksConfig
from atlas_fl.config.groups import RunConfig as RunConfig
from atlas_fl.config.identity import config_hash as config_hash
from atlas_fl.config.identity import differences as differences
from atlas_fl.config.identity import identity as identity
from atlas_fl.config.identity import run_folder as run_folder
from atlas_fl.config.images import ImagesConfig as ImagesConfig
from atlas_fl.config.images import SparseConfig as SparseConfig
from atlas_fl.config.images import mask_source as mask_source
from atlas_fl.config.pins import check_pins as check_pins
from atlas_fl.config.pins import pinned as pinned
from atlas_fl.config.robust import RobustConfig as RobustConfig
from atlas_fl.config.splitting import SplitConfig as SplitConfig
from atlas_fl.config.toml import load_config as load_config
from atlas_fl.config.toml import parse_config as parse_config
from atlas_fl.config.toml import to_toml as to_toml
from atlas_fl.config.training import TrainingConfig as TrainingConfig
from atlas_fl.config.update import with_values as with_values
from atlas_fl.config.validate import validate as validate
