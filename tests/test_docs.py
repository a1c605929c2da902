"""What the documents name, held against what is there: modules, functions, tests, commands, flags, settings, links.

Sources are read as syntax trees and nothing is imported but the command line, so that this costs next to nothing.
In the documents a name in backticks is a promise: `mixing.mix.mix` (a path inside the package), `mixing/mix.py`,
`tests/mixing/test_mix.py::test_x`, `--eta`, `atlas run --eta 0.2`, `make demo`, `[mixing] eta`.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path

import pytest
import tyro

import atlas_fl
from atlas_fl.cli.commands import COMMANDS
from atlas_fl.cli.parse import known_flags, parse
from atlas_fl.cli.settings import base_config
from atlas_fl.cli.words import ALIASES, split
from atlas_fl.config import load_config, settings, validate, with_values
from atlas_fl.presets import PRESETS
from atlas_fl.search.space import check_space, parse_space
from atlas_fl.sweep import grid, parse_over, seeds

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "atlas_fl"
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), RESULTS]
)
EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py"))
PROMISED = [
    *range(1, 13),
    *range(15, 32),
    *range(33, 112),
    *range(118, 130),
    *range(133, 141),
    *range(148, 181),
]
"""What `docs/promises.md` has a row for."""

OTHER_FLAGS = {"--no-deps", "--editable", "--constraint", "--require-hashes", "--version"}
"""Flags of pip, and the one of `atlas` itself."""
FLOWER_FLAGS = {
    "--auth-supernode-private-key",
    "--disable-runtime-dependency-installation",
    "--enable-supernode-auth",
    "--node-config",
    "--root-certificates",
    "--run-config",
    "--ssl-ca-certfile",
    "--ssl-certfile",
    "--ssl-keyfile",
    "--stream",
    "--superlink",
}
"""Flags of Flower's commands."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
DOTTED = re.compile(r"(?:atlas_fl\.)?[a-z_]+(?:\.[A-Za-z_]\w*)+")
FILE = re.compile(r"[\w./-]+\.(?:py|md|sh)|(?:src|tests|docs|benchmarks|examples)/[\w./-]*")
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
FILE_NAMES = {"toml", "json", "jsonl", "txt", "md", "py", "csv", "png", "safetensors", "parquet", "tsv", "com", "lock"}
"""What follows the dot of a file and not of a module."""


@cache
def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(text_of(document)) if language in languages]


def spans(document: str) -> list[str]:
    return SPAN.findall(FENCE.sub("", text_of(document)))


@cache
def names_of(path: Path) -> dict[str, ast.stmt]:
    """What the top level of a module defines or imports, by name; branches of `if` included."""
    return dict(_named(ast.parse(path.read_text(encoding="utf-8")).body))


def _named(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.If):
            yield from _named(node.body)
        else:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))


def module_path(parts: list[str]) -> Path | None:
    """The file of a module or package; the package itself for no parts."""
    base = PACKAGE.joinpath(*parts)
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def exists(dotted: str) -> bool:
    """Whether `module.name`, or `module.Class.member`, is there; `atlas_fl.` in front may be left out."""
    parts = dotted.removeprefix("atlas_fl.").split(".")
    for length in range(len(parts), -1, -1):
        path = module_path(parts[:length])
        if path is None or (length == 0 and not dotted.startswith("atlas_fl.")):
            continue
        inside, *more = parts[length:] or [""]
        if not inside:
            return True
        node = names_of(path).get(inside)
        if isinstance(node, ast.ClassDef) and more:
            return more[0] in dict(_named(node.body))
        return node is not None and not more
    return False


def is_about_the_package(dotted: str) -> bool:
    """Whether a dotted word names something of ours: its first part is a module of the package."""
    first, last = dotted.split(".")[0], dotted.rsplit(".", 1)[-1]
    ours = first == "atlas_fl" or module_path([first]) is not None
    return ours and last not in FILE_NAMES


def is_setting(dotted: str) -> bool:
    group, _, name = dotted.partition(".")
    return name in settings() and settings()[name].group == group


@cache
def every_flag() -> set[str]:
    flags = {flag for command in COMMANDS.values() for flag in known_flags(command.options)}
    scripts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py"))
    return flags | set(ALIASES) | OTHER_FLAGS | FLOWER_FLAGS | set(re.findall(r'"(--[a-z0-9-]+)"', scripts))


def command_lines(document: str) -> Iterator[list[str]]:
    """Every `atlas ...` of the shell blocks and of the spans, as words."""
    shell = "".join(blocks(document, "sh", "bash", "console")).replace("\\\n", " ")
    for line in [*shell.splitlines(), *spans(document)]:
        words = re.sub(r"^\$ ", "", line.split(" # ")[0].strip()).removeprefix(".venv/bin/")
        if words.startswith("atlas "):
            yield shlex.split(words)[1:]


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_there_are_documents() -> None:
    expected = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/promises.md"}
    assert expected <= set(DOCUMENTS)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_modules_and_functions_exist(document: str) -> None:
    words = [word.removesuffix("()") for word in spans(document)]
    dotted = [word for word in words if DOTTED.fullmatch(word) and is_about_the_package(word)]
    assert [word for word in dotted if not exists(word) and not is_setting(word)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_exist(document: str) -> None:
    bases = (ROOT, PACKAGE, (ROOT / document).parent)
    paths = [word for word in spans(document) if FILE.fullmatch(word)]
    assert [path for path in paths if not any((base / path).exists() for base in bases)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tests_exist(document: str) -> None:
    named = TEST.findall(text_of(document))
    assert [
        f"{file}::{name}" for file, name in named if not (ROOT / file).is_file() or name not in names_of(ROOT / file)
    ] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_flags_exist(document: str) -> None:
    places = [*spans(document), *blocks(document, "sh", "bash", "console")]
    flags = {flag for place in places if not place.startswith("<!--") for flag in FLAG.findall(place)}
    assert flags - every_flag() == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_are_accepted(document: str) -> None:
    for command, *words in command_lines(document):
        if command == "--help" or command == "--version":
            continue
        assert command in COMMANDS, f"atlas {command} is no command"
        groups = split(words)
        assert {group.flag for group in groups if group.flag} <= set(known_flags(COMMANDS[command].options))
        if words and "--config" not in words and not {"-h", "--help"} & set(words):
            accept(command, words)


def accept(command: str, words: list[str]) -> None:
    """Read the words as the command would, and check the settings where they name no file of a user's."""
    groups = split(words)
    options_of = COMMANDS[command].options
    without = {one.name: tyro.MISSING for one in fields(options_of) if one.default is MISSING is one.default_factory}
    has_settings = "settings" in {one.name for one in fields(options_of)}
    default = options_of(**without, **({"settings": base_config(groups)} if has_settings else {}))
    options = parse(default, groups, command=f"atlas {command}")
    if has_settings and "--task" not in words:
        validate(options.settings)
    if command == "search":
        check_space(options.settings, parse_space(options.over))
    elif over := getattr(options, "over", ()):
        grid(options.settings, over=parse_over(over), seeds=seeds(options.seeds))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_exist(document: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    shell = "\n".join([*spans(document), *blocks(document, "sh", "bash", "console")])
    assert set(re.findall(r"^(?:.*&& )?make ([a-z-]+)", shell, re.MULTILINE)) - targets == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_settings_exist(document: str, tmp_path: Path) -> None:
    for body in blocks(document, "toml"):
        path = tmp_path / "config.toml"
        path.write_text(body, encoding="utf-8")
        validate(load_config(path), at_sites=document == "docs/guides/across-machines.md")
    for group, name in re.findall(r"`\[(\w+)\] (\w+)`", text_of(document)):
        assert is_setting(f"{group}.{name}"), f"[{group}] {name} is no setting"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", text_of(document))):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (ROOT / document).parent / path if path else ROOT / document
        if not target.exists():
            broken.append(link)
        elif anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            broken += [] if anchor in {slug(heading) for heading in headings} else [link]
    assert broken == []


def snippets() -> list[tuple[str, str]]:
    found = [(document, body) for document in DOCUMENTS for body in blocks(document, "python")]
    return found + [(example, text_of(example)) for example in EXAMPLES]


@pytest.mark.parametrize(("origin", "code"), snippets(), ids=[origin for origin, _ in snippets()])
def test_python_names_what_there_is(origin: str, code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "atlas_fl":
            for alias in node.names:
                assert exists(f"{node.module}.{alias.name}"), f"{origin}: no {alias.name} in {node.module}"


@pytest.mark.parametrize("origin", ["README.md", *EXAMPLES])
def test_readme_and_examples_use_the_public_api_alone(origin: str) -> None:
    codes = blocks(origin, "python") if origin.endswith(".md") else [text_of(origin)]
    assert codes
    for code in codes:
        tree = ast.parse(code)
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "atlas_fl"]
        assert imports, "nothing of atlas_fl is used"
        assert {alias.name for node in imports for alias in node.names} <= set(dir(atlas_fl))
        deeper = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        assert not [node.module for node in deeper if str(node.module).startswith("atlas_fl.")]
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            check_call(call)


def check_call(call: ast.Call) -> None:
    """Presets and settings that a snippet names in words."""
    name = ast.unparse(call.func)
    if name == "find_preset" and isinstance(call.args[0], ast.Constant):
        assert ast.literal_eval(call.args[0]) in PRESETS
    if name == "with_values" and isinstance(call.args[1], ast.Dict):
        texts = {
            str(ast.literal_eval(key)): str(ast.literal_eval(value))
            for key, value in zip(call.args[1].keys, call.args[1].values)
            if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
        }
        with_values(PRESETS["quick"](), texts)


def test_the_readme_has_the_snippet_of_the_package() -> None:
    (code,) = blocks("README.md", "python")
    shown = [line.strip() for line in (atlas_fl.__doc__ or "").splitlines() if line.startswith("    ")]
    assert [line for line in code.splitlines() if line] == shown, "README and atlas_fl.__doc__ tell two stories"


def promise_rows() -> dict[int, str]:
    rows: dict[int, str] = {}
    for number, row in re.findall(r"^\| (\d+) \|(.+)$", text_of("docs/promises.md"), re.MULTILINE):
        assert int(number) not in rows, f"promise {number} has two rows"
        rows[int(number)] = row
    return rows


def test_every_promise_has_a_row() -> None:
    assert sorted(promise_rows()) == PROMISED


@pytest.mark.parametrize("number", PROMISED)
def test_a_promise_is_kept_by_a_test_or_said_to_be_open(number: int) -> None:
    row = promise_rows()[number]
    state = row.split("|")[1].strip()
    assert state in ("yes", "part", "not yet"), f"promise {number} has the state {state!r}"
    if state == "yes":
        assert TEST.search(row), f"promise {number} names no test"
