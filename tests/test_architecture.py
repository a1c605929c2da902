"""What import-linter cannot say: who may import which package, and what an import may do."""

import ast
import graphlib
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache

import pytest
from packaging.requirements import Requirement

from tests.sources import MODULES, ROOT, listed, nodes
from tools.lock import read_pins

OWNERS = {
    "transformers": ("models/", "storage/gguf_smollm2.py"),
    "tokenizers": "models/",
    "datasets": "data/",
    "peft": ("models/peft_io.py",),
    "flwr": "flower/messages.py",
    "ray": "runtime/ray.py",
    "grpc": "runtime/transport/",
    "tomlkit": "config/",
    "platformdirs": "storage/",
    "psutil": "experiment/summary.py",
    "rouge_score": "data/",
    "logging": "storage/",
    "cryptography": ("runtime/transport/certificates.py", "secure_sums.py"),
    "onnx": "storage/",
    "gguf": ("storage/gguf_smollm2.py", "models/gguf_adapter.py"),
    "PIL": "data/",
    "yaml": ("config/", "report/html/charts.py"),
    "packaging": "storage/extras.py",
    "jinja2": ("models/chat_template.py", "experiment/export.py", "report/html/elements.py"),
    "vl_convert": ("report/drawing.py", "report/html/elements.py"),
}
"""The only place that may import a package."""

PURE = ("config/", "ranks/", "events.py", "errors.py", "experiment/sweep.py")
"""Places that know nothing of tensors."""


@cache
def imported(module: str) -> set[str]:
    """The top names of all that a module imports, anywhere in it."""
    plain = {alias.name for node in nodes(MODULES[module], ast.Import) for alias in node.names}
    parts = {node.module for node in nodes(MODULES[module], ast.ImportFrom) if node.module and not node.level}
    return {name.split(".")[0] for name in plain | parts}


def check_not_imported(packages: set[str], modules: Iterable[str], remedy: str) -> None:
    offenders = [f"{module} imports {package}" for module in modules for package in packages & imported(module)]
    assert not offenders, listed(offenders, remedy)


def check_not_called(forbidden: set[str], modules: Iterable[str], remedy: str) -> None:
    """By everything that a module calls, as it is written."""
    calls = {module: {ast.unparse(node.func) for node in nodes(MODULES[module], ast.Call)} for module in modules}
    offenders = [f"{module} calls {call}" for module, own in calls.items() for call in forbidden & own]
    assert not offenders, listed(offenders, remedy)


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
        pytest.fail(listed(error.args[1], "these import each other, some inside functions; cut one:"))


def _own_imports(module: str, names: Iterable[str]) -> Iterator[str]:
    """The modules of the package that a module imports, anywhere in it."""
    for node in nodes(MODULES[module], ast.ImportFrom):
        if (node.module or "").startswith("atlas_fl."):
            home = node.module.removeprefix("atlas_fl.")
            yield from (full if (full := f"{home}.{alias.name}") in names else home for alias in node.names)


def test_settings_and_ranks_know_no_tensors() -> None:
    missing = [pure for pure in PURE if not any(module.startswith(pure) for module in MODULES)]
    assert not missing, listed(missing, "no module has such a path; correct PURE:")
    pure = [module for module in MODULES if module.startswith(PURE)]
    check_not_imported({"torch", "transformers", "safetensors"}, pure, "move what needs tensors out of these modules:")


def test_nothing_is_pickled() -> None:
    remedy = "store tensors with safetensors and values as JSON:"
    check_not_imported({"pickle", "shelve", "dill", "joblib"}, MODULES, remedy)


def test_no_seed_and_no_setting_is_global() -> None:
    forbidden = {"torch.manual_seed", "np.random.seed", "random.seed", "torch.set_default_dtype", "logging.basicConfig"}
    check_not_called(forbidden, MODULES, "take a generator, a dtype or a logger as an argument:")


def test_only_the_command_line_prints() -> None:
    others = [module for module in MODULES if not module.startswith("cli/")]
    remedy = "return the value, raise an error of atlas_fl.errors, or send an event:"
    check_not_called({"print", "sys.exit", "input"}, others, remedy)


def test_every_module_says_what_it_is() -> None:
    trees = {module: tree for module, path in MODULES.items() for tree in nodes(path, ast.Module)}
    offenders = [module for module, tree in trees.items() if not (ast.get_docstring(tree) or "").strip()]
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
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = read_pins(ROOT.parents[1] / "constraints.txt")
    extras = [text for extra in project["optional-dependencies"].values() for text in extra]
    for requirement in map(Requirement, project["dependencies"] + extras):
        assert requirement.specifier.contains(versions[requirement.name.lower()]), requirement
    assert versions["torch"] == "2.13.0"


def test_no_test_of_an_extra_is_skipped_where_make_test_runs() -> None:
    """Of what a module of tests cannot do without, all is installed there."""
    folder = ROOT.parents[1]
    with (folder / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    (installed,) = re.findall(r"\$\(INSTALL\) (dev [a-z ]+)$", (folder / "Makefile").read_text("utf-8"), re.MULTILINE)
    needed = [one for extra in installed.split() for one in extras[extra]]
    there = {re.match(r"[\w-]+", one)[0].replace("-", "_") for one in needed}
    needs = re.compile(r'^(?:pytest\.importorskip|if importlib\.util\.find_spec)\("(\w+)"', re.MULTILINE)
    sought = {name for path in (folder / "tests").rglob("test_*.py") for name in needs.findall(path.read_text("utf-8"))}
    assert {"flwr", "gguf", "optuna", "ray"} <= sought <= there
