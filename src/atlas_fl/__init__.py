"""ATLAS: federated fine-tuning of transformers across clients with different tasks, devices and data.

    from atlas_fl import find_preset, run_config, with_values

    config = with_values(find_preset("quick"), {"strategy": "fedper", "rounds": 3})
    result = run_config(config)
    print(result.summary["overall"]["final"]["test"])

This page is the public API. A name is imported when it is first used, so `import atlas_fl` costs nothing.
"""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atlas_fl.audit.check import audit_run as audit_run
    from atlas_fl.audit.report import AuditReport as AuditReport
    from atlas_fl.audit.run_files import read_audited as read_audited
    from atlas_fl.clustering.result import Clustering as Clustering
    from atlas_fl.clustering.result import Placement as Placement
    from atlas_fl.clustering.result import assign_client as assign_client
    from atlas_fl.config import Config as Config
    from atlas_fl.config import config_hash as config_hash
    from atlas_fl.config import differences as differences
    from atlas_fl.config import load_config as load_config
    from atlas_fl.config import run_folder as run_folder
    from atlas_fl.config import to_toml as to_toml
    from atlas_fl.config import validate as validate
    from atlas_fl.config import with_values as with_values
    from atlas_fl.config.presets import find_preset as find_preset
    from atlas_fl.config.schema import ClusteringConfig as ClusteringConfig
    from atlas_fl.config.schema import DataConfig as DataConfig
    from atlas_fl.config.schema import MixingConfig as MixingConfig
    from atlas_fl.config.schema import ModelConfig as ModelConfig
    from atlas_fl.config.schema import RanksConfig as RanksConfig
    from atlas_fl.config.schema import RunConfig as RunConfig
    from atlas_fl.config.schema import SplitConfig as SplitConfig
    from atlas_fl.config.schema import TrainingConfig as TrainingConfig
    from atlas_fl.errors import AtlasError as AtlasError
    from atlas_fl.errors import BudgetError as BudgetError
    from atlas_fl.errors import CheckpointError as CheckpointError
    from atlas_fl.errors import ConfigError as ConfigError
    from atlas_fl.errors import DataError as DataError
    from atlas_fl.errors import ModelError as ModelError
    from atlas_fl.errors import ProtocolError as ProtocolError
    from atlas_fl.events import Event as Event
    from atlas_fl.events import Note as Note
    from atlas_fl.events import PhaseStarted as PhaseStarted
    from atlas_fl.events import Progress as Progress
    from atlas_fl.events import RoundFinished as RoundFinished
    from atlas_fl.experiment.export import export_client as export_client
    from atlas_fl.experiment.run import RunResult as RunResult
    from atlas_fl.experiment.run import resume_run as resume_run
    from atlas_fl.experiment.run import run_config as run_config
    from atlas_fl.experiment.sweep import grid as grid
    from atlas_fl.experiment.sweep import run_all as run_all
    from atlas_fl.experiment.sweep import seeds as seeds
    from atlas_fl.methods.method import Method as Method
    from atlas_fl.planning.leakage import CutLeakage as CutLeakage
    from atlas_fl.planning.place_client import ClientPlacement as ClientPlacement
    from atlas_fl.planning.place_client import place_client as place_client
    from atlas_fl.planning.plan import Plan as Plan
    from atlas_fl.planning.planner import make_plan as make_plan
    from atlas_fl.planning.planner import measure_leakage as measure_leakage
    from atlas_fl.plugins import register as register
    from atlas_fl.report.figures import draw_all as draw_all
    from atlas_fl.report.html.write import write_report as write_report
    from atlas_fl.report.method_comparison import MethodComparison as MethodComparison
    from atlas_fl.report.method_comparison import compare_methods as compare_methods
    from atlas_fl.setup.own_data import own_data as own_data
    from atlas_fl.setup.own_data import task_row as task_row
    from atlas_fl.sparse.fisher import fisher_scores as fisher_scores
    from atlas_fl.sparse.masked_sgd import SparseSGDM as SparseSGDM
    from atlas_fl.sparse.masks import calibrate_mask as calibrate_mask
    from atlas_fl.sparse.task_vectors import apply_vector as apply_vector
    from atlas_fl.sparse.task_vectors import merge_vectors as merge_vectors
    from atlas_fl.sparse.task_vectors import task_vector as task_vector
    from atlas_fl.storage.assets import embedded_dir as embedded_dir
    from atlas_fl.storage.run_folder import RunFolder as RunFolder
    from atlas_fl.storage.run_folder import find_run as find_run


@cache
def _modules() -> dict[str, str]:
    """The module of each name, from the lines above."""
    nodes = ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).startswith(__name__)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def __getattr__(name: str) -> Any:
    if name not in _modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_modules()[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_modules())
