"""From words to the options of a command: tyro reads them, its errors become one line."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from typing import Any, TypeVar, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from atlas_fl.cli.page import SETTINGS, Argument, arguments, metavar, page
from atlas_fl.cli.words import Words, check_flags, join
from atlas_fl.config import settings
from atlas_fl.config.fields import group_classes
from atlas_fl.config.kinds import describe, from_words, item_of, to_words
from atlas_fl.errors import ConfigError
from atlas_fl.presets import PRESETS

OptionsT = TypeVar("OptionsT")
UNEXPECTED = "unexpected words"


def parse(default: OptionsT, groups: Sequence[Words], *, command: str) -> OptionsT:
    """The options that these words give, on top of the default ones; `--help` prints the page and exits.

    Raises:
        ConfigError: a flag is unknown, or a value is missing, of the wrong type or none of the choices.
    """
    check_flags(groups, known=known_flags(type(default)), command=command)
    if {"-h", "--help"} & {group.flag for group in groups}:
        print(page(default, command=command))
        raise SystemExit(0)
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
    except SystemExit:
        told = _told(printed.getvalue(), known=list(_arguments(default)))
        if hasattr(default, SETTINGS) and told.startswith(UNEXPECTED) and (named := PRESETS.keys() & told.split()):
            told += f"; did you mean --preset {min(named)}?"
        raise ConfigError(f"{told}{' ' if told.endswith('?') else '; '}see `{command} --help`") from None


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
        if (name := metavar(kind)) is None:
            return None
        size = item_of(kind)[1] if get_origin(kind) is tuple else 1
        return PrimitiveConstructorSpec(
            nargs=size or "*",
            metavar=name,
            instance_from_str=lambda words: from_words(words, kind),
            is_instance=lambda _: True,
            str_from_instance=to_words,
        )

    return registry


def _arguments(default: Any) -> Iterator[Argument]:
    yield from arguments(default)
    groups = getattr(default, SETTINGS, None)
    for name in () if groups is None else group_classes():
        yield from arguments(getattr(groups, name))


def _told(box: str, *, known: Sequence[Argument]) -> str:
    """What the first section of a box of text says, without the title and the help that stand around it."""
    is_framed = box.lstrip().startswith("╭")  # where the terminal has no such signs the title is the first section
    sections: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip("│| \t")
        if line[:1] in ("╭", "╰"):
            continue
        if text and not text.strip("─-"):
            sections.append([])
        elif text:
            sections[-1].append(text)
    lines = sections[0 if is_framed else 1]
    told = " ".join(lines)
    if told.startswith("Missing from "):
        return f"missing: {', '.join(one.name for one in known if one.name in lines)}"
    if match := re.match(r"Missing value for argument '(\S+)'", told):
        (kind,) = (one.kind for one in known if one.flag == match[1])
        return f"{match[1]} lacks a value; allowed: {describe(kind)}"
    return told.removeprefix("Error parsing ").replace("Unrecognized options", UNEXPECTED).rstrip(".")
