"""From words to the options of a command: tyro reads them, its errors become one line."""

import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from atlas_fl.cli.words import Words, check_flags, join
from atlas_fl.config import settings
from atlas_fl.config.kinds import from_words, inner_of, item_of, to_words
from atlas_fl.errors import ConfigError

OptionsT = TypeVar("OptionsT")

SETTINGS = "settings"
"""The field of a command's options that holds a whole config, whose settings are flags of their own."""

_NAMES = {int: "INT", float: "NUMBER", str: "TEXT"}


def parse(default: OptionsT, groups: Sequence[Words], *, command: str) -> OptionsT:
    """The options that these words give, on top of the default ones; `--help` prints a page and exits.

    Raises:
        ConfigError: a flag is unknown, or a value is missing, of the wrong type or none of the choices.
    """
    check_flags(groups, known=known_flags(type(default)), command=command)
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            return tyro.cli(
                type(default),
                prog=command,
                args=join(groups),
                default=default,
                config=(tyro.conf.OmitArgPrefixes,),
                registry=_registry(),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ConfigError(_one_line(printed.getvalue(), command=command)) from None


def known_flags(options: type[Any]) -> list[str]:
    """Every flag of a command, in the order of its page."""
    flags = ["-h", "--help"]
    for name, kind in get_type_hints(options, include_extras=True).items():
        if name == SETTINGS:
            flags += [flag for setting in settings().values() for flag in _spellings(setting.name, setting.kind)]
        elif tyro.conf.Positional not in getattr(kind, "__metadata__", ()):
            flags += _spellings(name, kind)
    return flags


def _spellings(name: str, kind: Any) -> list[str]:
    word = name.replace("_", "-")
    return [f"--{word}", f"--no-{word}"] if kind is bool else [f"--{word}"]


def _registry() -> ConstructorRegistry:
    """Our own reading of every type but bool, so that a flag and a file take the same values and say the same."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        kind: Any = info.type
        if (metavar := _metavar(kind)) is None:
            return None
        size = item_of(kind)[1] if get_origin(kind) is tuple else 1
        return PrimitiveConstructorSpec(
            nargs=size or "*",
            metavar=metavar,
            instance_from_str=lambda words: from_words(words, kind),
            is_instance=lambda _: True,
            str_from_instance=to_words,
        )

    return registry


def _metavar(kind: Any) -> str | None:
    """How the page shows what a flag takes; None for a type that is not ours to read."""
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if get_origin(kind) is tuple:
        item, size = item_of(kind)
        name = _metavar(item) or ""
        return " ".join([name] * size) if size else f"{name} ..."
    if type(None) in get_args(kind):
        return _metavar(inner_of(kind))
    return _NAMES.get(kind)


def _one_line(box: str, *, command: str) -> str:
    """What a box of text says: a title, in the frame if there is one, then sections with rules between them."""
    sections: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip("│| \t")
        if line[:1] in ("╭", "╰"):
            continue
        if text and not text.strip("─-"):
            sections.append([])
        elif text:
            sections[-1].append(text)
    is_framed = box.lstrip().startswith("╭")  # where the terminal has no such signs the title is the first section
    said = [" ".join(lines) for lines in sections[0 if is_framed else 1 :] if lines]
    told = [part.removeprefix("Error parsing ").removeprefix("Argument helptext: ") for part in said]
    parts = [part.rstrip(".") for part in told if not part.startswith("For full helptext")]
    return "; ".join([*parts, f"see `{command} --help`"])
