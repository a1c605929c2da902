"""Every setting is read where something is done with it: a flag that is wired to nothing would be believed."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import atlas_fl
from atlas_fl.aggregation.graph import GraphOptions
from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.client.options import TrainOptions
from atlas_fl.clustering.labels import ClusteringSettings
from atlas_fl.config import settings
from atlas_fl.config.settings import group_classes
from atlas_fl.methods.mr_mtl import PersonalModels
from atlas_fl.methods.registry import RULES, SECOND_MODELS

SOURCES = Path(atlas_fl.__file__).parent
PARTS = [*RULES.values(), *SECOND_MODELS.values(), PersonalModels]
READ_BY_CONFIG = {
    "client_sizes": "`setup.options.dealing_of` hands it to `data.clients.make_clients` by its name",
    "knob": "`config.methods.knob_values` gives its values to the methods",
    "runs_dir": "`config.identity.run_folder` makes the folder of a run in it",
    "test_mix": "`setup.options.dealing_of` hands it to `data.clients.make_clients` by its name",
    "trainable": "`Config.trainable` decides by the kind of the tasks",
    "tune": "`Config.trainable` decides by the kind of the tasks",
}
"""Settings that nothing else reads, with the reason."""


def read_settings() -> set[tuple[str, str]]:
    """(group, setting) of every reading, such as `config.training.lr`, outside of the command line and the config."""
    paths = [path for path in SOURCES.rglob("*.py") if path.relative_to(SOURCES).parts[0] not in ("cli", "config")]
    modules = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    return {pair for module in modules for pair in readings(module)} | set(copied(modules))


def copied(modules: list[ast.Module]) -> Iterator[tuple[str, str]]:
    """(group, setting) of every field that `setup.options.settings_for` fills in and that is read."""
    attributes = {node.attr for module in modules for node in ast.walk(module) if isinstance(node, ast.Attribute)}
    for options in (TrainOptions, StrategyOptions, ClusteringSettings, GraphOptions, *PARTS):
        for field in dataclasses.fields(options):
            if field.name in settings() and field.name in attributes:
                yield settings()[field.name].group, field.name


def readings(module: ast.Module) -> Iterator[tuple[str, str]]:
    """(group, attribute) wherever a module reads an attribute of a group, or of what it calls a group."""
    nodes = list(ast.walk(module))
    names = {(group, group) for group in group_classes()}
    group_of = {cls.__name__: group for group, cls in group_classes().items()}
    annotated = [node for node in nodes if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name)]
    names |= {(node.arg, group_of[node.annotation.id]) for node in annotated if node.annotation.id in group_of}
    names |= {
        (name.id, value.attr)
        for node in nodes
        if isinstance(node, ast.Assign)
        for name, value in zip(parts(node.targets[0]), parts(node.value))
        if isinstance(name, ast.Name) and isinstance(value, ast.Attribute) and value.attr in group_classes()
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            yield node.value.attr, node.attr
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield from ((group, node.attr) for name, group in names if name == node.value.id)


def parts(node: ast.expr) -> list[ast.expr]:
    """The sides of an assignment of several values, or the one."""
    return node.elts if isinstance(node, ast.Tuple) else [node]


def test_every_setting_is_read_outside_of_the_config() -> None:
    read = read_settings()
    unread = {name for name, setting in settings().items() if (setting.group, name) not in read}
    assert unread == set(READ_BY_CONFIG), "a flag is wired to nothing"
