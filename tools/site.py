"""Build the documentation site: every document of the repository, and a reference written from the source.

    .venv/bin/python -m tools.site        what `make site` runs; the site is build/site/html/index.html

The documents are copied to a folder in which they lie beside each other as they do here, so that their links lead
where they do in the repository, and the pages of commands, settings and the public API are written beside them. A link
that leads nowhere, a document that no table of contents names and a docstring that is not well formed end the build.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from inspect import isfunction
from pathlib import Path

import atlas_fl
from atlas_fl.cli.arguments import Command, has_settings, name_of, option_arguments, text_of
from atlas_fl.cli.main import COMMANDS
from atlas_fl.config import settings
from atlas_fl.config.settings import Setting, group_classes
from tools.tree import tree

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "build" / "site"
SITE = ROOT / "docs" / "site"
LINK = re.compile(r"\]\(([^)\s#]+)")
OUTSIDE = ("benchmarks/RESULTS.md",)
"""Documents that are neither in docs/ nor in the root."""
SETTINGS = "settings"
"""The field of a command's options that stands for all settings."""


def main() -> None:
    """Build the site; ends the process with what Sphinx says where anything is wrong."""
    source = TARGET / "source"
    shutil.rmtree(TARGET, ignore_errors=True)
    copy_documents(source)
    pages = {"commands.md": commands_page(), "settings.md": settings_page(), "api.rst": api_page()}
    for name, text in {**pages, "modules.md": f"# Modules\n\n```text\n{tree()}```\n"}.items():
        (source / "reference").mkdir(exist_ok=True)
        (source / "reference" / name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "sphinx", "--builder", "html", "--fail-on-warning", "--keep-going", "--quiet"]
    done = subprocess.run([*command, "--jobs", "2", str(source), str(TARGET / "html")], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    print(f"{len(list((TARGET / 'html').rglob('*.html')))} pages: {TARGET / 'html' / 'index.html'}")


def documents() -> list[Path]:
    """Every document that the site shows, from the root."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in OUTSIDE)]
    return sorted(path.relative_to(ROOT) for path in found if SITE not in path.parents)


def copy_documents(source: Path) -> None:
    """Copy the documents and the files that they show or link to, and the settings and the first page of the site."""
    for path in documents():
        _copy(path, source)
        for target in LINK.findall((ROOT / path).read_text(encoding="utf-8")):
            linked = (ROOT / path.parent / target).resolve()
            if linked.is_file() and linked.suffix != ".md":
                _copy(linked.relative_to(ROOT), source)
    for path in SITE.iterdir():
        shutil.copy(path, source / path.name)


def _copy(path: Path, source: Path) -> None:
    (source / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / path, source / path)


def commands_page() -> str:
    """The page of all commands: their `atlas COMMAND --help`, but the settings, which have a page of their own."""
    lines = ["# Commands", ""]
    for name, command in COMMANDS.items():
        lines += [f"## atlas {name}", "", *_command(command), ""]
    return "\n".join(lines)


def _command(command: Command) -> Iterator[str]:
    yield " ".join((command.options.__doc__ or "").split())
    yield from ("", "| argument | what it is |", "|---|---|")
    yield from (_row(argument) for argument in option_arguments(command.options))
    if has_settings(command.options):
        yield from ("", "It takes every [setting](settings.md) as a flag, too.")


def settings_page() -> str:
    """Every setting by its table of config.toml, with its flag, what it takes and its default."""
    lines = [
        "# Settings",
        "",
        "Of every table of `config.toml` the settings, each also a flag of the commands that train.",
    ]
    for name, group in group_classes().items():
        lines += ["", f"## [{name}]", "", " ".join((group.__doc__ or "").split())]
        lines += ["", "| flag | what it is |", "|---|---|"]
        lines += [_row(one) for one in settings().values() if one.group == name]
    return "\n".join([*lines, ""])


def _row(argument: Setting) -> str:
    name = f"{argument.flag} {argument.metavar}".strip() or name_of(argument)
    return f"| `{name}` | {_as_markdown(text_of(argument))} |"


def _as_markdown(text: str) -> str:
    """A help text in a cell of a table: signs of Markdown mean themselves, but for the backquotes of code."""
    parts = text.replace("|", r"\|").split("`")
    return "`".join(part if index % 2 else re.sub("([<*_])", r"\\\1", part) for index, part in enumerate(parts))


def api_page() -> str:
    """The public API, name by name, from the docstrings."""
    lines = ["Python", "======", "", ".. automodule:: atlas_fl", "   :no-members:", ""]
    for name in sorted(dir(atlas_fl), key=str.lower):
        value = getattr(atlas_fl, name)
        kind = "autoclass" if isinstance(value, type) else "autofunction" if isfunction(value) else "autodata"
        lines += [name, "-" * len(name), "", f".. {kind}:: atlas_fl.{name}", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
