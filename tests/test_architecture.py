"""What import-linter cannot say: who may import which package, and what an import may do."""

import ast
import graphlib
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import atlas_fl

ROOT = Path(atlas_fl.__file__).parent
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))

OWNERS = {
    "transformers": "models/",
    "tokenizers": "models/",
    "datasets": "data/",
    "peft": "models/peft_io.py",
    "flwr": "flower/messages.py",
    "ray": "runtime/ray.py",
    "grpc": "runtime/transport/",
    "tomlkit": "config/",
    "platformdirs": "storage/",
    "psutil": "experiment/summary.py",
    "rouge_score": "data/",
    "logging": "storage/",
    "cryptography": "runtime/transport/certificates.py",
    "onnx": "storage/",
    "PIL": "data/",
    "optuna": "experiment/search.py",
    "wandb": "report/trackers/wandb.py",
    "yaml": ("config/", "report/html/charts.py"),
    "packaging": "storage/extras.py",
    "jinja2": ("experiment/export.py", "report/html/elements.py", "report/results_page.py"),
    "vl_convert": ("report/drawing.py", "report/html/elements.py"),
}
"""The only place that may import a package."""

PURE = ("config/", "ranks/", "events.py", "errors.py", "experiment/sweep.py")
"""Places that know nothing of tensors."""


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text(encoding="utf-8"))


@cache
def imported(module: str) -> frozenset[str]:
    """The top names of all that a module imports, anywhere in it."""
    return frozenset(_imported(module))


def _imported(module: str) -> Iterator[str]:
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


@cache
def calls_in(module: str) -> set[str]:
    """Everything that a module calls, as it is written."""
    return {ast.unparse(node.func) for node in ast.walk(tree_of(module)) if isinstance(node, ast.Call)}


def listed(offenders: Iterable[str], remedy: str) -> str:
    """The message of a check: what to do, then every offender on a line of its own."""
    return "\n".join([remedy, *(f"  {offender}" for offender in offenders)])


def test_a_package_is_imported_in_one_place() -> None:
    offenders = [
        f"{module} imports {package}, which belongs to {owner}"
        for module in MODULES
        for package, owner in OWNERS.items()
        if not module.startswith(owner) and package in imported(module)
    ]
    assert not offenders, listed(offenders, "call the owner of the package, or change OWNERS and say why:")


def test_imports_have_no_circle() -> None:
    names = {module.removesuffix(".py").removesuffix("/__init__").replace("/", "."): module for module in MODULES}
    needs = {name: set(_own_imports(module, names)) - {name} for name, module in names.items()}
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(
            listed(error.args[1], "these import each other, some inside functions; cut one:")
        ) from None


def _own_imports(module: str, names: Iterable[str]) -> Iterator[str]:
    """The modules of the package that a module imports, anywhere in it."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("atlas_fl."):
            home = node.module.removeprefix("atlas_fl.")
            yield from (full if (full := f"{home}.{alias.name}") in names else home for alias in node.names)


def test_settings_and_ranks_know_no_tensors() -> None:
    missing = [pure for pure in PURE if not any(module.startswith(pure) for module in MODULES)]
    assert not missing, listed(missing, "no module has such a path; correct PURE:")
    offenders = [
        f"{module} imports {package}"
        for module in MODULES
        if module.startswith(PURE)
        for package in sorted({"torch", "transformers", "safetensors"} & imported(module))
    ]
    assert not offenders, listed(offenders, "move what needs tensors out of these modules:")


def test_nothing_is_pickled() -> None:
    offenders = [
        f"{module} imports {package}"
        for module in MODULES
        for package in sorted({"pickle", "shelve", "dill", "joblib"} & imported(module))
    ]
    assert not offenders, listed(offenders, "store tensors with safetensors and values as JSON:")


def test_no_seed_and_no_setting_is_global() -> None:
    forbidden = {"torch.manual_seed", "np.random.seed", "random.seed", "torch.set_default_dtype", "logging.basicConfig"}
    offenders = [f"{module} calls {call}" for module in MODULES for call in sorted(forbidden & calls_in(module))]
    assert not offenders, listed(offenders, "take a generator, a dtype or a logger as an argument:")


def test_only_the_command_line_prints() -> None:
    offenders = [
        f"{module} calls {call}"
        for module in MODULES
        if not module.startswith("cli/")
        for call in sorted({"print", "sys.exit", "input"} & calls_in(module))
    ]
    assert not offenders, listed(offenders, "return the value, raise an error of atlas_fl.errors, or send an event:")


def test_every_module_says_what_it_is() -> None:
    offenders = [module for module in MODULES if not (ast.get_docstring(tree_of(module)) or "").strip()]
    assert not offenders, listed(offenders, "begin the module with a docstring that says what it holds:")


def test_nothing_is_left_to_do() -> None:
    offenders = [
        f"{module} says {word}"
        for module in MODULES
        for word in ("TODO", "FIXME", "XXX", "NotImplementedError")
        if word in (ROOT / module).read_text(encoding="utf-8")
    ]
    assert not offenders, listed(offenders, "finish it, or write the limitation into the documents:")


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
