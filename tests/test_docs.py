"""What the documents name, held against what is there: modules, functions, tests, commands, flags, settings, links.

Sources are read as syntax trees and nothing is imported but the command line, so that this costs next to nothing.
In the documents a name in backticks is a promise: `aggregation.rules.mix` (a path inside the package),
`aggregation/mixing.py`, `tests/aggregation/test_mix.py::test_x`, `--eta`, `atlas run --eta 0.2`,
`make demo`, `[mixing] eta`.
"""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import atlas_fl
from atlas_fl.cli.arguments import ALIASES, has_settings, hints, known_flags, parse, split
from atlas_fl.cli.main import COMMANDS
from atlas_fl.config import load_config, settings, validate, with_values
from atlas_fl.config.presets import find_preset, presets
from atlas_fl.errors import AtlasError
from atlas_fl.experiment.sweep import chosen_seeds, grid, parse_over
from tests.sources import MODULES, listed, nodes
from tools import site
from tools.tree import tree

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "atlas_fl"
DOCUMENTS = sorted(path.as_posix() for path in site.documents())
EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py"))
PROMISED = list(range(1, 181))
"""What `docs/promises.md` has a row for."""

OTHER_FLAGS = {"--no-deps", "--editable", "--constraint", "--require-hashes", "--version"}
"""Flags of pip, and the one of `atlas` itself."""
FLOWER_FLAGS = {"--auth-supernode-private-key", "--disable-runtime-dependency-installation", "--enable-supernode-auth"}
FLOWER_FLAGS |= {"--node-config", "--root-certificates", "--run-config", "--stream", "--superlink"}
FLOWER_FLAGS |= {"--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile"}
"""Flags of Flower's commands."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
DOTTED = re.compile(r"(?:atlas_fl\.)?[a-z_]+(?:\.[A-Za-z_]\w*)+")
FILE = re.compile(r"[\w./-]+\.(?:py|md|sh)|(?:src|tests|docs|benchmarks|examples)/[\w./-]*")
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
FILE_NAMES = {"toml", "json", "jsonl", "txt", "md", "py", "csv", "png", "safetensors", "parquet", "tsv", "com", "lock"}
FILE_NAMES |= {"js", "css", "html", "onnx"}
"""What follows the dot of a file and not of a module."""


@cache
def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(text_of(document)) if language in languages]


def shell_blocks(document: str) -> list[str]:
    return blocks(document, "sh", "bash", "console")


def spans(document: str) -> list[str]:
    return SPAN.findall(FENCE.sub("", text_of(document)))


@cache
def names_of(path: Path) -> dict[str, ast.stmt]:
    """What the top level of a module defines or imports, by name; branches of `if` included."""
    return dict(_named(ast.parse(path.read_text(encoding="utf-8")).body))


def _named(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
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
        if isinstance(node, ast.Import | ast.ImportFrom) and path.name != "__init__.py":
            return False  # a document names the module that defines it, not one that imports it
        if isinstance(node, ast.ClassDef) and more:
            return more[0] in dict(_named(node.body))
        return node is not None and not more
    return False


@cache
def modules_by_last_name() -> dict[str, list[str]]:
    """Dotted paths inside the package by the name of the module or package."""
    named: dict[str, list[str]] = {}
    for module in MODULES:
        dotted = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        named.setdefault(dotted.rsplit(".", 1)[-1], []).append(dotted)
    return named


def docstrings(path: Path) -> list[str]:
    """Docstrings of a module, its classes and functions, and those that stand below fields and constants."""
    alone = [node.value for node in nodes(path, ast.Expr) if isinstance(node.value, ast.Constant)]
    return [value.value for value in alone if isinstance(value.value, str)]


def resolves(dotted: str, path: Path) -> bool:
    """Whether a dotted word of a docstring is there: a name of ours, of a library, a field, a constant, a setting.

    A module is named from the package's root or by its own name alone.
    """
    first, *rest = dotted.removeprefix("atlas_fl.").split(".")
    if exists(dotted) or is_setting(dotted) or first == "head":
        return True
    if any(exists(".".join([module, *rest])) for module in modules_by_last_name().get(first, ())):
        return True
    if dotted in {node.value for node in nodes(path, ast.Constant)}:
        return True
    fields_read = {node.attr for node in nodes(path, ast.Attribute)}
    variables = {node.id for node in nodes(path, ast.Name)} | {node.arg for node in nodes(path, ast.arg)}
    if first in variables and rest[0] in fields_read:
        return True
    return module_path([first]) is None and importlib.util.find_spec(first) is not None


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
    return flags | {*ALIASES, *hints()} | OTHER_FLAGS | FLOWER_FLAGS | set(re.findall(r'"(--[a-z0-9-]+)"', scripts))


def command_lines(document: str) -> Iterator[list[str]]:
    """Every `atlas ...` of the shell blocks and of the spans, as words; no row `atlas name=value` of a results page."""
    shell = "".join(shell_blocks(document)).replace("\\\n", " ")
    for line in [*shell.splitlines(), *spans(document)]:
        words = re.sub(r"^\$ ", "", line.split(" # ")[0].strip()).removeprefix(".venv/bin/")
        if words.startswith("atlas ") and "=" not in words.split()[1]:
            yield shlex.split(words)[1:]


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_names_in_docstrings_exist() -> None:
    unknown = []
    for module, path in MODULES.items():
        words = [span.removesuffix("()") for text in docstrings(path) for span in SPAN.findall(text)]
        dotted = [word for word in words if DOTTED.fullmatch(word) and word.rsplit(".", 1)[-1] not in FILE_NAMES]
        files = [word for word in words if re.fullmatch(r"\w+(/\w+)+\.py", word)]
        missing = [word for word in dotted if not resolves(word, path)]
        missing += [file for file in files if not ((PACKAGE / file).exists() or (ROOT / file).exists())]
        unknown += [f"{module}: {word}" for word in missing]
    assert unknown == []


def test_there_are_documents() -> None:
    expected = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/promises.md"}
    assert expected <= set(DOCUMENTS)


def test_the_tree_has_every_module_with_a_line() -> None:
    lines = tree().splitlines()[1:]
    assert sum(line.split()[0].endswith(".py") for line in lines) == sum(
        path.name != "__init__.py" for path in PACKAGE.rglob("[a-z]*.py")
    )
    assert all(len(line.split()) > 2 for line in lines)


def test_modules_and_functions_exist() -> None:
    offenders = [
        f"{document}: `{word}`"
        for document in DOCUMENTS
        for word in (span.removesuffix("()") for span in spans(document))
        if DOTTED.fullmatch(word) and is_about_the_package(word) and not exists(word) and not is_setting(word)
    ]
    assert not offenders, listed(offenders, "no such module, function or setting; name what is there now:")


def test_files_exist() -> None:
    offenders = [
        f"{document}: `{path}`"
        for document in DOCUMENTS
        for path in spans(document)
        if FILE.fullmatch(path)
        and not any((base / path).exists() for base in (ROOT, PACKAGE, (ROOT / document).parent))
    ]
    assert not offenders, listed(offenders, "no such file; name the one that is there now:")


@pytest.mark.slow
def test_tests_exist() -> None:
    offenders = [
        f"{document}: {file}::{name}"
        for document in DOCUMENTS
        for file, name in TEST.findall(text_of(document))
        if not (ROOT / file).is_file() or name not in names_of(ROOT / file)
    ]
    assert not offenders, listed(offenders, "no such test; name the one that checks this now:")


def test_flags_exist() -> None:
    offenders = [
        f"{document}: {flag}"
        for document in DOCUMENTS
        for text in [*spans(document), *shell_blocks(document)]
        if not text.startswith("<!--")
        for flag in FLAG.findall(text)
        if flag not in every_flag()
    ]
    assert not offenders, listed(offenders, "no command has this flag:")


@pytest.mark.slow
def test_commands_are_accepted() -> None:
    documents = {tuple(words): document for document in DOCUMENTS for words in command_lines(document)}
    offenders = []
    for words, document in documents.items():
        try:
            check_command(*words)
        except (AssertionError, AtlasError) as error:
            offenders.append(f"{document}: atlas {shlex.join(words)}: {error}")
    assert not offenders, listed(offenders, "these commands are refused:")


def test_no_site_of_a_command_writes_its_model_over_what_it_keeps() -> None:
    kept = ("-secret", "-sums", "-privacy", "-runs", "-private")
    joins = [(document, words) for document in DOCUMENTS for words in command_lines(document) if words[0] == "join"]
    offenders = [f"{document}: --to {words[words.index('--to') + 1]}" for document, words in joins if "--to" in words]
    assert offenders and not [line for line in offenders if line.endswith(kept)]


def check_command(command: str, *words: str) -> None:
    """Read a command of a document; refused as the command line would refuse it."""
    if command in ("--help", "--version"):
        return
    assert command in COMMANDS, f"atlas {command} is no command"
    unknown = {group.flag for group in split(list(words)) if group.flag} - set(known_flags(COMMANDS[command].options))
    assert not unknown, f"atlas {command} does not know {sorted(unknown)}"
    if words and "--config" not in words and not {"-h", "--help"} & set(words):
        accept(command, list(words))


def accept(command: str, words: list[str]) -> None:
    """Read the words as the command would, and check the settings where they name no file of a user's."""
    groups = split(words)
    options_of = COMMANDS[command].options
    options = parse(options_of, groups, command=f"atlas {command}")
    methods = getattr(options, "strategies", ())
    if methods and "--task" not in words:
        grid(options.settings, over={"strategy": methods}, seeds=(42,))
    elif has_settings(options_of) and "--task" not in words:
        validate(options.settings)
    if over := getattr(options, "over", ()):
        grid(options.settings, over=parse_over(over), seeds=chosen_seeds(options.seeds))


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    offenders = [
        f"{document}: make {target}"
        for document in DOCUMENTS
        for text in [*spans(document), *shell_blocks(document)]
        for target in re.findall(r"^(?:.*&& )?make ([a-z-]+)", text, re.MULTILINE)
        if target not in targets
    ]
    assert not offenders, listed(offenders, f"the Makefile has only {', '.join(sorted(targets))}:")


def test_settings_exist() -> None:
    offenders = [
        f"{document}: [{group}] {name}"
        for document in DOCUMENTS
        for group, name in re.findall(r"`\[(\w+)\] (\w+)`", text_of(document))
        if not is_setting(f"{group}.{name}")
    ]
    assert not offenders, listed(offenders, "no such setting:")


def test_configs_are_accepted(tmp_path: Path) -> None:
    offenders, path = [], tmp_path / "config.toml"
    for document in DOCUMENTS:
        for body in blocks(document, "toml"):
            path.write_text(body, encoding="utf-8")
            try:
                validate(load_config(path), at_sites=document == "docs/guides/across-machines.md")
            except AtlasError as error:
                offenders.append(f"{document}: {error}")
    assert not offenders, listed(offenders, "these blocks of TOML are refused:")


def test_links_lead_somewhere() -> None:
    offenders = [
        f"{document}: {link}"
        for document in DOCUMENTS
        for link in LINK.findall(FENCE.sub("", text_of(document)))
        if not re.match(r"[a-z]+:", link) and not is_there(document, link)
    ]
    assert not offenders, listed(offenders, "these links lead to no file or no heading:")


def is_there(document: str, link: str) -> bool:
    """Whether the file, and in it the heading, is there that a document links to."""
    path, _, anchor = link.partition("#")
    target = (ROOT / document).parent / path if path else ROOT / document
    if not anchor or not target.exists():
        return target.exists()
    headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
    return anchor in {slug(heading) for heading in headings}


def test_python_names_what_there_is() -> None:
    codes = [(document, body) for document in DOCUMENTS for body in blocks(document, "python")]
    codes += [(example, text_of(example)) for example in EXAMPLES]
    offenders = [
        f"{origin}: from {node.module} import {alias.name}"
        for origin, code in codes
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "atlas_fl"
        for alias in node.names
        if not exists(f"{node.module}.{alias.name}")
    ]
    assert not offenders, listed(offenders, "no such name in the package:")


@pytest.mark.parametrize("origin", ["README.md", *EXAMPLES])
def test_readme_and_examples_use_the_public_api_alone(origin: str) -> None:
    codes = blocks(origin, "python") if origin.endswith(".md") else [text_of(origin)]
    assert codes
    for code in codes:
        parts = list(ast.walk(ast.parse(code)))
        imports = [node for node in parts if isinstance(node, ast.ImportFrom)]
        public = [alias.name for node in imports if node.module == "atlas_fl" for alias in node.names]
        assert public, "nothing of atlas_fl is used"
        assert set(public) <= set(dir(atlas_fl))
        assert not [node.module for node in imports if str(node.module).startswith("atlas_fl.")]
        for call in (node for node in parts if isinstance(node, ast.Call)):
            check_call(call)


def check_call(call: ast.Call) -> None:
    """Presets and settings that a snippet names in words."""
    name = ast.unparse(call.func)
    if name == "find_preset" and isinstance(call.args[0], ast.Constant):
        assert ast.literal_eval(call.args[0]) in presets()
    if name == "with_values" and isinstance(call.args[1], ast.Dict):
        texts = {
            str(ast.literal_eval(key)): str(ast.literal_eval(value))
            for key, value in zip(call.args[1].keys, call.args[1].values)
            if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
        }
        with_values(find_preset("quick"), texts)


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


def test_every_promise_is_kept_by_a_test_or_said_to_be_open() -> None:
    rows = promise_rows()
    states = {number: row.split("|")[1].strip() for number, row in rows.items()}
    strange = [f"{number}: {state}" for number, state in states.items() if state not in ("yes", "part", "not yet")]
    assert not strange, listed(strange, "the state of a promise is yes, part or not yet:")
    untested = [str(number) for number, row in rows.items() if states[number] == "yes" and not TEST.search(row)]
    assert not untested, listed(untested, "a promise that is kept names its test:")


def test_the_site_has_every_command_setting_public_name_and_document() -> None:
    commands, all_settings, public = site.commands_page(), site.settings_page(), site.api_page()
    assert re.findall("^## atlas (.+)$", commands, re.MULTILINE) == list(COMMANDS)
    assert {flag for flag in FLAG.findall(commands) if flag in known_flags(COMMANDS["serve"].options)} >= {"--host"}
    assert re.findall("^\\| `(--[a-z0-9-]+)", all_settings, re.MULTILINE) == [one.flag for one in settings().values()]
    assert re.findall("::? atlas_fl\\.(\\w+)$", public, re.MULTILINE) == sorted(dir(atlas_fl), key=str.lower)
    lines = set((site.SITE / "index.md").read_text(encoding="utf-8").splitlines())
    named = [document for document in DOCUMENTS if document.removesuffix(".md") not in lines]
    assert [name for name in named if not name.startswith("docs/adr/0")] == [], "docs/site/index.md names it nowhere"
