"""Arguments of the command line: words, flags, help pages, presets and config files that they start from.

A command declares its options as a dataclass; one whose options hold a config takes every setting as a flag as well.
Settings come from a recipe, over it a file, over both the flags. A help page is plain text, as wide as the terminal up
to `WIDEST`.
"""

import os
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_origin

from atlas_fl.config import Config, conflicts, files, methods, settings, value_of
from atlas_fl.config.presets import find_preset, presets, turn_dial, with_own_data
from atlas_fl.config.settings import Setting, check_range, declared_settings, group_classes, replace_settings
from atlas_fl.config.values import Mark, describe, from_words, item_kind, parse_integer, to_words
from atlas_fl.errors import ConfigError, did_you_mean, short_repr
from atlas_fl.packaged import packaged_text
from atlas_fl.storage.folder_access import MOST_JSON_BYTES, read_named_file

ALIASES = {"--ablation": "--strategy", "--mode": "--preset"}
"""Flags that earlier descriptions used, and their names here."""

JOINED = frozenset(
    {"--task", "--device", "--over", "--server", "--client", "--arrive", "--without", "--allow", "--plugin", "--knob"}
)
"""Flags with a list that may be given several times instead of once with several words."""

_FLAG = re.compile(r"-(?!inf$|nan$)[A-Za-z-]")


@dataclass(frozen=True)
class Words:
    """A flag and the words up to the next one; the words before the first flag have the flag ``."""

    flag: str
    values: tuple[str, ...]


def split(args: Sequence[str], *, aliases: Mapping[str, str] = ALIASES) -> tuple[Words, ...]:
    """The command line flag by flag; hyphens for underscores, and today's names for those of `aliases`."""
    groups = [Words("", ())]
    for word in args:
        if is_flag(word):
            name, sign, value = word.partition("=")
            flag = name.replace("_", "-")
            groups.append(Words(aliases.get(flag, flag), (value,) if sign else ()))
        else:
            groups[-1] = Words(groups[-1].flag, (*groups[-1].values, word))
    return tuple(groups)


def last_value(groups: Iterable[Words], flag: str) -> str | None:
    """The value that counts for a flag; None where it is not given, or without a value, which the parser tells."""
    values = [group.values[0] for group in groups if group.flag == flag and group.values]
    return values[-1] if values else None


def check_flags(groups: Sequence[Words], *, flags: Sequence[str], command: str) -> None:
    """Raise ConfigError unless every flag is known, with what to write instead, or the nearest that is known."""
    for group in groups:
        if not group.flag or group.flag in flags:
            continue
        hint = did_you_mean(group.flag, flags)
        if group.flag in hints() and "--accelerator" in flags:
            hint = f"; {hints()[group.flag]};"
        elif "--knob" in flags and any(given.flag == "--plugin" for given in groups):
            hint = f"{hint} a setting of a plug-in's method is --knob {group.flag.removeprefix('--')}=VALUE;"
        raise ConfigError(f"unknown flag {short_repr(group.flag)}{hint} see `{command} --help`")


@cache
def hints() -> Mapping[str, str]:
    """Flags of other programs, and what to write here, a row of `synonyms.tsv` for each."""
    return dict(line.split("\t") for line in packaged_text(__package__, "synonyms.tsv").splitlines()[1:])


def is_flag(word: str) -> bool:
    """Return true for a flag: -1, -.5 and -inf are numbers."""
    return _FLAG.match(word) is not None


WIDEST = 100
"""Columns; longer lines are hard to read."""
NAMES = 26
"""Most columns of a name; the text of a longer one begins on the next line."""
SPACE = "\N{NO-BREAK SPACE}"
"""Space at which no line ends: textwrap breaks at ordinary spaces alone."""


@dataclass(frozen=True)
class Command:
    """One command."""

    run: str
    """Module and function, from its options and words to an exit code; what it needs is imported when it is called."""
    options: type[Any]
    """The dataclass of its options, whose fields without a default it cannot do without."""
    refused: tuple[str, ...] = ()
    """Settings that it sets itself."""

    @property
    def summary(self) -> str:
        """The first part of the first sentence on its options."""
        return re.split(r"[.;:](?= |$)", " ".join((self.options.__doc__ or "").split()))[0]


def name_of(argument: Setting) -> str:
    """Name of an argument on the page."""
    if argument.kind is bool:
        return f"--[no-]{argument.flag[2:]}"
    return f"{argument.flag} {argument.metavar}".strip()


def spellings(argument: Setting) -> list[str]:
    """The flags that set it."""
    return [argument.flag, f"--no-{argument.flag[2:]}"] if argument.kind is bool else [argument.flag]


def text_of(argument: Setting) -> str:
    """Its help, the choices, and a default that has a value."""
    allowed = describe(argument.kind)
    if argument.kind is bool:
        default = "default: on" if argument.default else ""
    elif argument.default is MISSING:
        default = "required"
    else:
        words = [] if argument.default in (None, ()) else to_words(argument.default)
        default = (SPACE if len(words) < 3 else " ").join(["default:", *words]) if words else ""
    hints = [*([allowed] if "one of" in allowed else []), *([default] if default else [])]
    return f"{argument.help} ({'; '.join(hints)})" if hints else argument.help


def option_arguments(options: type[Any]) -> list[Setting]:
    """Arguments that the options of a command declare, its own before those that it extends, without the settings."""
    declared = [one for one in declared_settings(options, group="") if one.name != "settings"]
    return sorted(declared, key=lambda one: one.name not in options.__annotations__)


def has_settings(options: type[Any]) -> bool:
    """Return true for options that hold a config."""
    return "settings" in options.__dataclass_fields__


def arguments(options: type[Any]) -> list[Setting]:
    """All arguments of a command."""
    return [*option_arguments(options), *(settings().values() if has_settings(options) else ())]


def help_page(options: type[Any], *, command: str, config: Config | None = None, is_whole: bool = False) -> str:
    """The help of a command with the defaults of this config; of the settings the common ones, or `is_whole` all."""
    own = option_arguments(options)
    words = [argument for argument in own if not argument.flag]
    flags = [argument for argument in own if argument.flag]
    required = [name_of(argument) for argument in flags if argument.default is MISSING]
    positional = [a.metavar if a.default is MISSING else f"[{a.metavar}]" for a in words]
    usage = f"usage: {' '.join([command, *required, '[OPTIONS]', *positional])}"
    sections = [("", _rows(words)), ("options:", [*_rows(flags), ("-h, --help", "Show this page.")])]
    if has_settings(options):
        sections += _groups(config or Config(), is_whole=is_whole)
        if not is_whole:
            more = f"`{command} --help all` shows all {len(settings())} settings"
            sections.append((f"{more}, `atlas list strategies NAME` those of one strategy.", []))
    width = max(len(name) for _, rows in sections for name, _ in rows)
    lines = [*wrap_lines(usage), "", *wrap_lines(" ".join((options.__doc__ or "").split()))]
    for title, rows in sections:
        if title or rows:
            lines += ["", *wrap_lines(title), *table(rows, names=min(width, NAMES))]
    return "\n".join(lines)


def table(rows: Sequence[tuple[str, str]], *, names: int) -> Iterator[str]:
    """Lines with a name and its text beside it, or below where the name takes more columns than that."""
    for name, text in rows:
        first, *others = wrap_lines(text, indent=names + 4)
        yield from [f"  {name}", first] if len(name) > names else [f"  {name:<{names}}  {first.lstrip()}"]
        yield from others


def wrap_lines(text: str, *, indent: int = 0) -> list[str]:
    """The text in lines that fit on the terminal; what stands in backquotes stays on one of them."""
    width = max(min(shutil.get_terminal_size().columns, WIDEST), indent + 24)
    together = "`".join(part.replace(" ", SPACE) if index % 2 else part for index, part in enumerate(text.split("`")))
    margin = " " * indent
    lines = textwrap.wrap(
        together, width, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(SPACE, " ") for line in lines]


def _groups(config: Config, *, is_whole: bool) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The heading and the rows of every table of settings; where and from what a run is made stands before how."""
    yield "settings, by their table in config.toml:", []
    for group, cls in sorted(group_classes().items(), key=lambda item: item[0] != "run"):
        shown = [one for one in settings().values() if one.group == group and (is_whole or Mark.COMMON in one.marks)]
        if shown:
            yield f"[{group}] {cls.__doc__}", _rows(replace(one, default=value_of(config, one.name)) for one in shown)


def _rows(options: Iterable[Setting]) -> list[tuple[str, str]]:
    return [(name_of(argument), text_of(argument)) for argument in options]


DEFAULT_PRESET = "quick"


def base_config(groups: Sequence[Words], *, implied: Mapping[str, Any] = MappingProxyType({})) -> Config:
    """The config that `--preset` and `--config` give over what a command implies, before any other flag.

    A file may name its preset itself. Another one beside it is refused: the file's settings are of the first.

    Raises:
        ConfigError: the preset is unknown, the file is wrong, or they name two presets.
    """
    swept = [word for group in groups if group.flag == "--over" for word in group.values if word.startswith("preset=")]
    named = last_value(groups, "--preset") or (swept[0].removeprefix("preset=").partition(",")[0] if swept else None)
    file = last_value(groups, "--config")
    values = {} if file is None else files.load_values(file)
    written = values.get("preset")
    if named and written and named != written:
        raise ConfigError(
            f"--preset {named} contradicts {file}, which is made from preset {written}; leave --preset out, "
            "or take preset out of the file"
        )
    base = find_preset(named or written or DEFAULT_PRESET, dial=values.get("dial"))
    config = replace_settings({**implied, **values}, base=base)
    rows = [word for group in groups if group.flag == "--task" for word in group.values]
    tasks = [word for group in groups if group.flag == "--tasks" for word in group.values]
    said = {*values, *(group.flag[2:].replace("-", "_") for group in groups)}
    config = with_own_data(config, rows or values.get("task", ()), tasks=tasks or values.get("tasks"), said=said)
    dial = parse_integer(last_value(groups, "--dial") or "")
    return config if dial is None else turn_dial(config, dial)


def new_folder(to: str) -> Path:
    """The folder that `--to` names; raises `ConfigError` where something is there that it would mix with."""
    path = Path(to)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"--to is {path}, and there is something already; name a folder that is new or empty")
    return path


def check_target(to: str | None, *, example: str, is_own: Callable[[Path], bool], flag: str = "--to") -> None:
    """Check that a file to write, if one is given, is in a folder that exists, and new or of the command itself.

    Raises:
        ConfigError: it is a folder, in no folder, or a file that the command has not written.
    """
    if to is None:
        return
    path = Path(to)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{flag} is {to}; allowed: a file in a folder that exists; name one such as {example}")
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or not is_own(path)):
        raise ConfigError(
            f"{flag} is {to}, and what lies there was not written by this command; name a new file such as {example}"
        )


def holds_json(path: Path, *, keys: Collection[str]) -> bool:
    """Return true for a file that holds JSON of which the mapping, or every one of a list of them, has these keys."""
    from atlas_fl.storage.jsonl import from_json  # NumPy, which most commands need not wait for here

    try:
        content = from_json(read_named_file(path, max_bytes=MOST_JSON_BYTES))
    except (OSError, ValueError):
        return False
    rows = content if isinstance(content, list) else [content]
    return bool(rows) and all(isinstance(row, dict) and set(keys) <= row.keys() for row in rows)


OptionsT = TypeVar("OptionsT")


def parse(options: type[OptionsT], groups: Sequence[Words], *, command: str) -> OptionsT:
    """The options that these words give, on top of the config that `--preset` and `--config` give.

    `--help` prints the page and exits.

    Raises:
        ConfigError: a flag is unknown, or a value is missing, of the wrong type or none of the choices.
    """
    check_flags(groups, flags=known_flags(options), command=command)
    config = base_config(groups, implied=getattr(options, "implied", {})) if has_settings(options) else None
    if asked := [group for group in groups if group.flag in ("-h", "--help")]:
        is_whole = any("all" in group.values for group in asked)
        print(help_page(options, command=command, config=config, is_whole=is_whole))
        raise SystemExit(0)
    try:
        values = _read(groups, arguments(options))
    except ValueError as error:
        problem = str(error)
        raise ConfigError(f"{problem}{' ' if problem.endswith('?') else '; '}see `{command} --help`") from None
    for argument in option_arguments(options):
        check_range(argument, values.get(argument.name, ()))
    if config is None:
        return options(**values)
    changes = {name: values.pop(name) for name in settings() if name in values}
    config = replace_settings(changes, base=config)
    if not hasattr(options, "strategies"):  # a comparison names its strategies apart
        typed = {group.flag.replace("--no-", "--", 1) for group in groups}  # a switch that is off is typed, too
        methods.check_typed_settings(config, typed)
    if not hasattr(options, "over"):  # several runs are asked together
        conflicts.check_read(changes, configs=[config])
    return options(**values, settings=config)  # type: ignore[call-arg]


def known_flags(options: type[Any]) -> list[str]:
    """Every flag of a command, in the order of its page."""
    return ["-h", "--help", *(flag for one in arguments(options) if one.flag for flag in spellings(one))]


def _read(groups: Sequence[Words], declared: Sequence[Setting]) -> dict[str, Any]:
    """The values that words give to arguments, by key; raises ValueError where they give none."""
    values: dict[str, Any] = {}
    words: list[str] = []
    by_flag = {flag: one for one in declared if one.flag for flag in spellings(one)}
    for group in groups:
        argument = by_flag.get(group.flag)
        if argument is None or argument.kind is bool:
            words += group.values
            if argument is not None:
                values[argument.name] = group.flag == argument.flag
            continue
        size = _size(argument)
        own = group.values[:size] if size else group.values
        value = _read_value(argument, own)
        values[argument.name] = values.get(argument.name, ()) + value if group.flag in JOINED and not size else value
        words += group.values[len(own) :]
    for argument in (one for one in declared if not one.flag):
        own_words = words[: _size(argument) or len(words)]
        words = words[len(own_words) :]
        if own_words:
            values[argument.name] = _read_value(argument, own_words)
    if words:
        named = presets().keys() & {*words} if "preset" in {one.name for one in declared} else ()
        hint = f"; did you mean --preset {min(named)}?" if named else ""
        if not named and "strategies" in {one.name for one in declared}:
            hint = f"; name what is compared with --strategies {' '.join(words)}"
        raise ValueError(f"unexpected words: {' '.join(words)}{hint}")
    if missing := [name_of(one) for one in declared if one.default is MISSING and one.name not in values]:
        raise ValueError(f"missing: {', '.join(missing)}")
    return values


def _size(argument: Setting) -> int:
    """Words of a value; 0 for any number."""
    return item_kind(argument.kind)[1] if get_origin(argument.kind) is tuple else 1


def _read_value(argument: Setting, words: Sequence[str]) -> Any:
    if len(words) < _size(argument):
        raise ValueError(f"{argument.flag} lacks a value; allowed: {describe(argument.kind)}")
    try:
        return from_words(words, argument.kind)
    except ValueError as error:
        raise ValueError(f"{argument.flag or argument.metavar}: {error}") from None
