"""What import-linter cannot say: who may import which package, what an import may do, and how long a thing may be."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import atlas_fl

ROOT = Path(atlas_fl.__file__).parent
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))

OWNERS = {
    "transformers": "models/",
    "tokenizers": "models/",
    "datasets": "tasks/",
    "peft": "lora/peft_io.py",
    "flwr": "flower/api.py",
    "ray": "engines/ray.py",
    "grpc": "engines/stream/",
    "tyro": "cli/",
    "tomlkit": "config/",
    "matplotlib": "report/",
    "platformdirs": "io/",
    "psutil": "io/",
    "rouge_score": "tasks/",
    "logging": "io/",
    "cryptography": "io/",
    "onnx": "io/",
    "PIL": "tasks/",
    "optuna": "search/study.py",
    "sqlalchemy": "search/study.py",
    "wandb": "report/tracking.py",
    "yaml": "config/",
}
"""The only place that may import a package."""

PURE = ("config/", "ranks/", "events.py", "presets.py", "errors.py", "sweep.py", "stopping.py", "search/space.py")
"""Places that know nothing of tensors."""


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text(encoding="utf-8"))


def imported(module: str) -> Iterator[str]:
    """The top names of all that a module imports, anywhere in it."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", OWNERS)
def test_a_package_is_imported_in_one_place(package: str) -> None:
    owner = OWNERS[package]
    assert [module for module in MODULES if package in imported(module) and not module.startswith(owner)] == []


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith(PURE)])
def test_settings_and_ranks_know_no_tensors(module: str) -> None:
    assert not {"torch", "transformers", "safetensors"} & set(imported(module))


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_pickled_and_no_seed_is_global(module: str) -> None:
    assert not {"pickle", "shelve", "dill", "joblib"} & set(imported(module))
    calls = {ast.unparse(node.func) for node in ast.walk(tree_of(module)) if isinstance(node, ast.Call)}
    forbidden = {"torch.manual_seed", "np.random.seed", "random.seed", "torch.set_default_dtype", "logging.basicConfig"}
    assert not forbidden & calls


@pytest.mark.parametrize("module", MODULES)
def test_only_the_command_line_prints(module: str) -> None:
    calls = {ast.unparse(node.func) for node in ast.walk(tree_of(module)) if isinstance(node, ast.Call)}
    assert module.startswith("cli/") or not {"print", "sys.exit", "input"} & calls


@pytest.mark.parametrize("module", MODULES)
def test_modules_and_functions_are_short(module: str) -> None:
    lines = (ROOT / module).read_text(encoding="utf-8").count("\n")
    assert lines <= 600, f"{module} has {lines} lines"
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = body_lines(node)
            assert size <= 40, f"{module}: {node.name} has {size} lines"


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its signature and its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is(module: str) -> None:
    assert (ast.get_docstring(tree_of(module)) or "").strip()


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_left_to_do(module: str) -> None:
    text = (ROOT / module).read_text(encoding="utf-8")
    assert not [word for word in ("TODO", "FIXME", "XXX", "NotImplementedError") if word in text]


def test_the_constraints_pin_every_dependency() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = [
        Requirement(line)
        for line in (ROOT.parents[1] / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    versions = {pin.name.lower().replace("_", "-"): str(pin.specifier) for pin in pins}
    extras = [text for extra in project["optional-dependencies"].values() for text in extra]
    wanted = [Requirement(text) for text in project["dependencies"] + extras]
    for requirement in wanted:
        pin = versions[requirement.name.lower()]
        assert requirement.specifier.contains(pin.removeprefix("==")), requirement
    assert versions["torch"] == "==2.13.0"


def test_no_test_of_an_extra_is_skipped_where_make_test_runs() -> None:
    """Of what a module of tests cannot do without, all is installed there."""
    folder = ROOT.parents[1]
    with (folder / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    (installed,) = re.findall(r"\$\(INSTALL\) (dev [a-z ]+)$", (folder / "Makefile").read_text("utf-8"), re.MULTILINE)
    there = {re.match(r"[\w-]+", needed)[0] for extra in installed.split() for needed in extras[extra]}
    needs = re.compile(r'^(?:pytest\.importorskip|if importlib\.util\.find_spec)\("(\w+)"', re.MULTILINE)
    sought = {name for path in (folder / "tests").rglob("test_*.py") for name in needs.findall(path.read_text("utf-8"))}
    assert {"flwr", "optuna", "ray"} <= sought <= there
