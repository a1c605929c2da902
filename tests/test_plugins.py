"""Plug-ins in a process: what is registered, what is refused, and what a digest is of."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from atlas_fl import plugins
from atlas_fl.cli.main import main
from atlas_fl.client import optimizer
from atlas_fl.client.optimizer import fedprox
from atlas_fl.config import (
    Config,
    config_hash,
    differences,
    parse_config,
    pinned_config,
    to_toml,
    validate,
    with_values,
)
from atlas_fl.data.partition import PARTITIONS
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.recorder import provenance_of
from atlas_fl.experiment.sweep import grid
from atlas_fl.plugins import KINDS, active_plugins, load_plugins, register, registered_names, source_files
from atlas_fl.setup.options import strategy_of

EXAMPLE = Path(__file__).parents[1] / "examples/plugins/partition.py"
HEAD = "from atlas_fl.plugins import register\n"


@pytest.fixture(autouse=True)
def _no_plugins() -> Iterator[None]:
    yield
    load_plugins(())


@pytest.fixture
def plugin(tmp_path: Path) -> Callable[..., str]:
    """The path of a file with this code."""

    def write(code: str, name: str = "own.py") -> str:
        path = tmp_path / name
        path.write_text(HEAD + code)
        return str(path)

    return write


def test_a_registry_holds_a_plugin_while_a_config_names_it_and_no_longer() -> None:
    config = with_values(Config(), {"plugin": [str(EXAMPLE)], "partition": "staircase"})
    pinned = validate(config)
    assert "staircase" in registered_names()["partition"]
    assert active_plugins() == (pinned.run.plugin[0].partition("#sha256=")[2],)
    validate(Config())
    assert "staircase" not in registered_names()["partition"]
    assert active_plugins() == ()
    with pytest.raises(ConfigError, match="unknown name in --partition 'staircase'; known: dirichlet, exponential"):
        validate(with_values(Config(), {"partition": "staircase"}))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_takes_a_name_and_refuses_one_that_any_registry_of_these_names_has(plugin, kind: str) -> None:
    mine = plugin(f"register({kind!r}, 'entry-of-mine')(0)\n")
    taken = next(iter(registered_names()[kind]), {"metric": "accuracy", "figure": "bytes"}.get(kind, "entry-of-mine"))
    load_plugins((mine,))
    assert "entry-of-mine" in registered_names()[kind]
    path = plugin(f"register({kind!r}, 'another')(0)\nregister({kind!r}, {taken!r})(0)\n", "taken.py")
    with pytest.raises(ConfigError, match=f"taken.py registers the {kind} '{taken}', a name that is taken"):
        load_plugins((mine, path) if taken == "entry-of-mine" else (path,))
    assert "another" not in registered_names()[kind]
    assert "entry-of-mine" not in registered_names()[kind]


def test_a_method_has_one_name(plugin: Callable[..., str]) -> None:
    own = "class Own:\n    name = 'own'\n\n\n"
    load_plugins((plugin(own + "register('method')(Own)\n"),))
    assert "own" in registered_names()["method"]
    with pytest.raises(ConfigError, match="the method 'own' is registered as 'other'; give it one name"):
        load_plugins((plugin(own + "register('method', 'other')(Own)\n"),))


def test_two_plugins_do_not_take_one_name(plugin: Callable[..., str]) -> None:
    one = plugin("register('partition', 'mine')(1)\n", "one.py")
    two = plugin("register('partition', 'mine')(2)\n", "two.py")
    with pytest.raises(ConfigError, match=r"two.py registers the partition 'mine', a name that is taken"):
        load_plugins((one, two))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0\n", r"cannot be imported \(line 2: ZeroDivisionError: division by zero\); mend it"),
        ("def (:\n", r"cannot be imported \(line 2: SyntaxError: invalid syntax"),
        ("import no_such_module\n", r"cannot be imported \(line 2: ModuleNotFoundError: No module named"),
        ("raise SystemExit(0)\n", r"cannot be imported \(line 2: SystemExit: 0\)"),
        ("", "registers nothing; give it a line such as @register"),
        ("register('partition', 'iid')(0)\n", "registers the partition 'iid', a name that is taken; give it another"),
        ("register('method', 'ditto')(0)\n", "registers the method 'ditto', a name that is taken"),
        ("register('partitions', 'mine')(0)\n", "unknown kind of registration 'partitions'; did you mean 'partition'"),
        ("register('partition', 'a b')(0)\n", "a partition has the name 'a b'; allowed: letters, digits"),
    ],
)
def test_a_plugin_that_is_of_no_use_ends_the_command_with_one_line(
    plugin: Callable[..., str], capsys: pytest.CaptureFixture[str], code: str, message: str, tmp_path: Path
) -> None:
    path = plugin(code)
    assert main(["run", "--plugin", path, "--runs-dir", str(tmp_path / "runs")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"atlas: the plug-in {path} ")
    with pytest.raises(ConfigError, match=message):
        load_plugins((path,))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("nowhere.py",), r"the plug-in nowhere.py cannot be read \(No such file or directory\); give --plugin a P"),
        (("no_such_module",), "--plugin 'no_such_module' is no module that can be imported"),
        (("__main__",), "is no module that can be imported"),
        ((str(EXAMPLE), str(EXAMPLE)), "twice; name a plug-in once"),
        (("json",), "the plug-in json cannot be used: its module was imported before"),
    ],
)
def test_what_is_no_plugin_is_refused_in_a_line(names: tuple[str, ...], message: str) -> None:
    assert json
    with pytest.raises(ConfigError, match=message) as raised:
        load_plugins(names)
    assert "\n" not in str(raised.value)


def test_what_a_script_registers_is_refused_unless_the_run_names_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins._STATE, "by_hand", {})
    register("term", "mine")(fedprox)
    assert "mine" not in registered_names()["term"]
    with pytest.raises(ConfigError, match=r"the term 'mine' was registered by .*test_plugins.py, which is no plug-in"):
        validate(Config())


def test_the_file_of_a_class_function_or_module_is_its_plugin() -> None:
    assert source_files([fedprox, optimizer]) == (optimizer.__file__,)
    for value, message in ((3, "3 is no class, function or module"), (eval("lambda: 0", {}), "is defined in no file")):
        with pytest.raises(ConfigError, match=message):
            source_files([value])


SCRIPT = """
from typing import Annotated
from atlas_fl import audit_run, find_preset, resume_run, run_config, with_values
from atlas_fl.aggregation.matrices import average
from atlas_fl.ranges import Range
from atlas_fl.methods.method import Method
from atlas_fl.plugins import register

@register("method")
class Alike(Method):
    name = "alike"
    q: Annotated[float, Range(least=0, below=1)] = 0.0
    \"\"\"Weight of the first client less than that of the others.\"\"\"

    def rule(self, step):
        assert self.q == 0.5
        return average([1.0] * len(step.federation.clients), step.groups, step.present)

SMALL = {{"rounds": 2, "tasks": ["movie"], "samples": 8, "validation_samples": 4, "test_samples": 4}}

{guard}
    settings = {{"strategy": "alike", "knob": ["q=0.5"], "workers": 2, "max_rounds": 1, "audit": True, **SMALL}}
    result = run_config(with_values(find_preset("smoke"), settings), plugins=[Alike])
    print(result.complete, resume_run(result.folder).complete, audit_run(result.folder).ok)
"""


@pytest.mark.product
def test_a_script_runs_the_method_that_it_defines_below_a_guard(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(SCRIPT.format(guard="if True:"))
    with pytest.raises(ConfigError, match="it begins a run while it is loaded; put that below"):
        load_plugins((str(script),))
    script.write_text(SCRIPT.format(guard='if __name__ == "__main__":'))
    ended = subprocess.run([sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "False True True" in ended.stdout + ended.stderr


def test_another_process_refuses_what_a_script_put_into_a_registry() -> None:
    names = registered_names()
    plugins.check_registered(names)
    with pytest.raises(ConfigError, match="the term 'noise' was put into a registry by hand and does not reach other"):
        plugins.check_registered({**names, "term": [*names["term"], "noise"]})


def test_the_digest_is_part_of_the_identity_and_the_place_is_not(tmp_path: Path) -> None:
    copy = shutil.copy(EXAMPLE, tmp_path / "elsewhere.py")
    here, there = (validate(with_values(Config(), {"plugin": [str(path)]})) for path in (EXAMPLE, copy))
    assert config_hash(here) == config_hash(there) != config_hash(validate(Config()))
    assert config_hash(here) == config_hash(pinned_config(with_values(Config(), {"plugin": [str(copy)]})))
    Path(copy).write_text(EXAMPLE.read_text() + "\n")
    changed = validate(with_values(Config(), {"plugin": [str(copy)]}))
    assert config_hash(changed) != config_hash(here)
    assert differences(here, changed) == {"plugin": (here.run.plugin, changed.run.plugin)}
    digest = here.run.plugin[0].partition("#sha256=")[2]
    assert provenance_of(here, (), {}, {})["settings"]["plugin"] == [digest]
    assert parse_config(to_toml(here), origin="config.toml") == here


def test_another_content_than_the_settings_say_is_refused(plugin: Callable[..., str]) -> None:
    path = plugin("register('partition', 'mine')(1)\n")
    pinned = plugins.pin_plugins((path,))
    plugin("register('partition', 'mine')(2)\n")
    with pytest.raises(ConfigError, match=r"own.py was altered: its SHA-256 begins with [0-9a-f]{16}, and that of the"):
        load_plugins(pinned)


def test_a_file_that_changes_between_two_runs_of_a_process_is_read_again(plugin: Callable[..., str]) -> None:
    load_plugins((plugin("register('partition', 'mine')(1)\n"),))
    load_plugins((plugin("register('partition', 'mine')(2)\n"),))
    assert PARTITIONS["mine"] == 2  # type: ignore[comparison-overlap]


def test_a_file_defines_dataclasses_and_is_run_once_in_a_process(plugin: Callable[..., str]) -> None:
    code = "from __future__ import annotations\n" + HEAD + "from dataclasses import dataclass\n@dataclass\nclass A:\n"
    path = Path(plugin(""))
    path.write_text(code + "    x: int = 1\nregister('partition', 'mine')(A())\n")
    load_plugins((str(path),))
    first = sys.modules[f"atlas_fl_plugin_{active_plugins()[0]}"]
    load_plugins(())
    load_plugins((str(path),))
    assert sys.modules[f"atlas_fl_plugin_{active_plugins()[0]}"] is first


def package(folder: Path, name: str) -> Path:
    """A package that registers a partition in one module and computes it in another."""
    root = folder / name
    root.mkdir()
    (root / "__init__.py").write_text("")
    (root / "helper.py").write_text("VALUE = 1\n")
    code = f"from {name}.helper import VALUE\nregister('partition', '{name}-part')(VALUE)\n"
    (root / "plugin.py").write_text(HEAD + code)
    return root


def test_the_digest_of_a_module_is_of_all_files_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = package(tmp_path, "atlas_test_package")
    monkeypatch.syspath_prepend(str(tmp_path))
    pinned = load_plugins(("atlas_test_package.plugin",))
    assert "atlas_test_package-part" in registered_names()["partition"]
    (root / "helper.py").write_text("VALUE = 2\n")
    with pytest.raises(ConfigError, match=r"the plug-in atlas_test_package.plugin was altered"):
        load_plugins(pinned)
    with pytest.raises(ConfigError, match="its module was imported before, or has changed since; start Python again"):
        load_plugins(("atlas_test_package.plugin",))


def test_an_entry_point_is_named_by_its_name_and_loaded_only_then(tmp_path: Path, monkeypatch) -> None:
    package(tmp_path, "atlas_test_installed")
    info = tmp_path / "atlas_test_installed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: atlas-test-installed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[atlas_fl]\nmy-parts = atlas_test_installed.plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    validate(Config())
    assert "atlas_test_installed" not in sys.modules
    with pytest.raises(ConfigError, match=r"'my-part' is no module .*\(my-parts are\)"):
        load_plugins(("my-part",))
    (pinned,) = load_plugins(("my-parts",))
    assert pinned.startswith("my-parts#sha256=")
    assert "atlas_test_installed-part" in registered_names()["partition"]


def test_a_run_does_not_bring_its_own_code(tmp_path: Path) -> None:
    inside = tmp_path / "run" / "evil.py"
    inside.parent.mkdir()
    inside.write_text("raise AssertionError\n")
    link = tmp_path / "link.py"
    link.symlink_to(inside)
    for path in (inside, link):
        with pytest.raises(ConfigError, match="lies in the folder of the run that names it"):
            load_plugins((str(path),), outside=tmp_path / "run")


def test_plugins_are_told_apart_from_a_list_of_words_that_is_none() -> None:
    config = Config()
    with pytest.raises(ConfigError, match=r"--plugin is 'x\.py'; allowed: a list of texts"):
        validate(replace(config, run=replace(config.run, plugin="x.py")))  # type: ignore[arg-type]


KNOBS = """from typing import Annotated, Literal
import numpy as np
from atlas_fl.ranges import Range
from atlas_fl.methods.method import Method

@register("method")
class Partly(Method):
    name = "partly"
    matrix = "a share of the equal average"
    q: Annotated[float, Range(least=0, most=1)] = 0.5
    \"""Share of the average.\"""
    kind: Annotated[Literal["mean", "none"], "knob"] = "mean"
    \"""Kind of average.\"""

    def rule(self, step):
        number = len(step.present)
        return (1 - self.q) * np.eye(number) + self.q / number

@register("method")
class Other(Method):
    name = "other"
    least: Annotated[int, Range(least=1)] = 1
    \"""Fewest.\"""
"""


def test_a_knob_of_a_method_is_a_setting_of_the_run(plugin, capsys: pytest.CaptureFixture[str]) -> None:
    path = plugin(KNOBS)
    config = with_values(Config(), {"plugin": [path], "strategy": "partly"})
    knobs = (), ("q=1", "kind=none"), ("kind=none", "q=1")
    runs = [validate(with_values(config, {"knob": words})) for words in knobs]
    usual, changed, same = runs
    methods = [strategy_of(one) for one in runs]
    assert [(method.q, method.kind) for method in methods] == [(0.5, "mean"), (1.0, "none"), (1.0, "none")]  # type: ignore[attr-defined]
    assert config_hash(usual) != config_hash(changed) == config_hash(same)
    assert differences(usual, changed) == {"knob": ((), ("q=1", "kind=none"))}
    assert parse_config(to_toml(changed), origin="config.toml") == changed
    assert main(["list", "strategies", "partly", "--plugin", path]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--knob q 0.5 Share of the average. (at least 0, at most 1)" in shown
    assert "--knob kind mean Kind of average. (one of mean, none)" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["p=1"], "unknown knob 'p'; known: kind, least, q"),
        (["q=2"], "--knob q is 2.0; allowed: at least 0, at most 1; set it to that, or leave it out"),
        (["q=much"], "--knob q is 'much'; allowed: a number; set it to that, or leave it out"),
        (["kind=men"], "--knob kind is 'men'; allowed: one of mean, none; did you mean 'mean'?"),
        (["q"], "--knob is 'q'; allowed: name=value, each name once; set it to that, or leave it out"),
        (["q=1", "q=0"], "--knob is 'q=0'; allowed: name=value, each name once; set it to that, or leave it out"),
    ],
)
def test_a_knob_that_no_method_has_or_takes_is_refused_in_a_line(
    plugin: Callable[..., str], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    args = ["run", "--plugin", plugin(KNOBS), "--strategy", "partly"]
    assert main([*args, *(word for knob in words for word in ("--knob", knob))]) == 2
    assert capsys.readouterr().err == f"atlas: {message}\n"


def test_knobs_of_ours_have_flags_and_a_run_without_methods_of_plugins_has_none() -> None:
    with pytest.raises(ConfigError, match="unknown knob 'server_lr'; known: none, since no method of a plug-in"):
        validate(with_values(Config(), {"strategy": "fedadam", "knob": "server_lr=1"}))


def test_a_comparison_has_a_knob_for_the_methods_that_have_it(plugin: Callable[..., str], tmp_path: Path) -> None:
    base = with_values(Config(), {"plugin": [plugin(KNOBS)], "runs_dir": str(tmp_path)})
    points = grid(base, over={"strategy": ("partly", "fedavg"), "knob": ("q=0", "q=1")}, seeds=(1,))
    values = [getattr(strategy_of(point.config), "q", None) for point in points]
    assert values == [0.0, 1.0, None, None]
