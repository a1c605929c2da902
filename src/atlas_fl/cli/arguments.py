"""Arguments of the command line: words, flags, help pages, presets and config files that they start from.

The words are normalised and unknown flags caught before tyro parses them; its errors become one line. A help page is
plain text, as wide as the terminal up to `WIDEST`. Settings come from a recipe, over it a file, over both the flags.
"""

import io
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from atlas_fl.config import Config, load_config, settings
from atlas_fl.config.federations import turn_dial
from atlas_fl.config.files import load_values
from atlas_fl.config.methods import check_typed_settings
from atlas_fl.config.presets import PRESETS, find_preset
from atlas_fl.config.settings import field_docs, group_classes
from atlas_fl.config.values import describe, from_words, item_kind, parse_integer, to_words, unwrap_optional
from atlas_fl.errors import ConfigError, did_you_mean, short_repr
from atlas_fl.storage.folder_access import MOST_JSON_BYTES, read_named_file

ALIASES = {"--ablation": "--strategy", "--mode": "--preset"}
"""Flags of earlier programs and what they are called here."""

JOINED = frozenset(
    {"--task", "--device", "--over", "--server", "--client", "--arrive", "--without", "--allow", "--plugin"}
)
"""Flags with a list that may be given several times instead of once with several words."""

LONGEST = 4096
"""Characters of a word: as many as a path may have."""

_FLAG = re.compile(r"-(?!inf$|nan$)[A-Za-z-]")


@dataclass(frozen=True)
class Words:
    """A flag and the words up to the next one; the words before the first flag have the flag ``."""

    flag: str
    values: tuple[str, ...]
    is_joined_by_sign: bool = False
    """Whether it was written as `--flag=value`."""


def split(args: Sequence[str], *, aliases: Mapping[str, str] = ALIASES) -> tuple[Words, ...]:
    """The command line flag by flag; hyphens for underscores, and today's names for those of `aliases`.

    Raises:
        ConfigError: a word is longer than any value may be.
    """
    groups = [Words("", ())]
    for word in args:
        if len(word) > LONGEST:
            flag, sign, value = word.partition("=") if is_flag(word) else (groups[-1].flag, "=", word)
            problem = f"{flag} has {short_repr(value)}" if flag and sign else f"there is {short_repr(word)}"
            raise ConfigError(f"{problem}; allowed: a word of at most {LONGEST:,} characters; shorten it")
        if not is_flag(word):
            last = groups[-1]
            groups[-1] = Words(last.flag, (*last.values, word), last.is_joined_by_sign and not last.values)
            continue
        name, sign, value = word.partition("=")
        flag = name.replace("_", "-")
        groups.append(Words(aliases.get(flag, flag), (value,) if sign else (), bool(sign)))
    return tuple(groups)


def join_words(groups: Iterable[Words]) -> list[str]:
    """The words of a command line again; the lists of `JOINED` flags that stand in several places become one."""
    merged: dict[str, Words] = {}
    others: list[Words] = []
    for group in groups:
        if group.flag not in JOINED:
            others.append(group)
            continue
        before = merged.get(group.flag, Words(group.flag, ()))
        merged[group.flag] = Words(group.flag, before.values + group.values)
    return [word for group in (*others, *merged.values()) for word in _typed_words(group)]


def last_value(groups: Iterable[Words], flag: str) -> str | None:
    """The value that counts for a flag; None where it is not given, or without a value, which the parser tells."""
    values = [group.values[0] for group in groups if group.flag == flag and group.values]
    return values[-1] if values else None


def check_flags(groups: Iterable[Words], *, flags: Sequence[str], command: str) -> None:
    """Nothing where every flag is known.

    Raises:
        ConfigError: one is not; the message has the one that is near, where one is.
    """
    for group in groups:
        if group.flag and group.flag not in flags:
            hint = did_you_mean(group.flag, flags)
            raise ConfigError(f"unknown flag {short_repr(group.flag)}{hint} see `{command} --help`")


def is_flag(word: str) -> bool:
    """Whether the word is a flag: -1, -.5 and -inf are numbers."""
    return _FLAG.match(word) is not None


def _typed_words(group: Words) -> list[str]:
    if group.is_joined_by_sign:
        return [f"{group.flag}={group.values[0]}", *group.values[1:]]
    return [*([group.flag] if group.flag else []), *group.values]


SETTINGS = "settings"
"""The field of a command's options that holds a whole config, whose settings are flags of their own."""
WIDEST = 100
"""Columns; longer lines are hard to read."""
NAMES = 26
"""Most columns of a name; the text of a longer one begins on the next line."""
SPACE = "\N{NO-BREAK SPACE}"
"""Where no line may end: textwrap breaks at ordinary spaces alone."""

_METAVARS = {int: "INT", float: "NUMBER", str: "TEXT"}


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One flag or positional word of a command."""

    flag: str
    """How it is written, such as `--eta`; empty for a positional one."""
    metavar: str
    """What stands for its value; empty for a switch."""
    kind: Any
    default: Any
    help: str

    @property
    def name(self) -> str:
        """How the page calls it."""
        if self.kind is bool:
            return f"--[no-]{self.flag[2:]}"
        return f"{self.flag} {self.metavar}".strip()

    @property
    def is_required(self) -> bool:
        """Whether the command cannot do without it."""
        return self.default is tyro.MISSING and not self.metavar.endswith("...")

    @property
    def text(self) -> str:
        """Its help, the choices and the default; nothing of a default that says nothing."""
        *others, last = _choices(self.kind) or ("",)
        choices = f"{', '.join(others)} or {last}" if others else last
        if self.kind is bool:
            default = "default: on" if self.default else ""
        elif self.default is tyro.MISSING:
            default = "required" if self.is_required else ""
        else:
            words = [] if self.default in (None, ()) else to_words(self.default)
            default = (SPACE if len(words) < 3 else " ").join(["default:", *words]) if words else ""
        hints = "; ".join(part for part in (choices, default) if part)
        return f"{self.help} ({hints})" if hints else self.help


def arguments(default: Any) -> Iterator[Argument]:
    """What a dataclass declares, a group of settings or the options of a command, with the values of this instance."""
    docs, hints = field_docs(type(default)), get_type_hints(type(default), include_extras=True)
    own_first = sorted(hints, key=lambda name: name not in type(default).__annotations__)
    for name in own_first:
        kind = hints[name]
        if name == SETTINGS:
            continue
        extras = getattr(kind, "__metadata__", ())
        plain = kind.__origin__ if extras else kind
        named = [extra.metavar for extra in extras if getattr(extra, "metavar", None)]
        yield Argument(
            flag="" if tyro.conf.Positional in extras else "--" + name.replace("_", "-"),
            metavar=named[0] if named else metavar(plain) or "",
            kind=plain,
            default=getattr(default, name),
            help=docs[name],
        )


def metavar(kind: Any) -> str | None:
    """What stands for a value of this kind; None for a type that is no setting's or a switch."""
    if get_origin(kind) is Literal:
        return "CHOICE"
    if get_origin(kind) is tuple:
        item, size = item_kind(kind)
        name = metavar(item) or ""
        return " ".join([name] * size) if size else f"{name} ..."
    return metavar(inner) if (inner := unwrap_optional(kind)) is not None else _METAVARS.get(kind)


def help_page(default: Any, *, command: str) -> str:
    """The help of a command whose options have these values where no flag says another."""
    options = list(arguments(default))
    words = [argument for argument in options if not argument.flag]
    flags = [argument for argument in options if argument.flag]
    required = [argument.name for argument in flags if argument.is_required]
    positional = [argument.name if argument.default is tyro.MISSING else f"[{argument.name}]" for argument in words]
    usage = f"usage: {' '.join([command, *required, '[OPTIONS]', *positional])}"
    sections = [("", _rows(words)), ("options:", [*_rows(flags), ("-h, --help", "Show this page.")])]
    sections += _groups(getattr(default, SETTINGS, None))
    width = max(len(name) for _, rows in sections for name, _ in rows)
    lines = [*wrap_lines(usage), "", *wrap_lines(" ".join((type(default).__doc__ or "").split()))]
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
        together,
        width,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(SPACE, " ") for line in lines]


def _groups(settings: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The heading and the rows of every table of settings; where and from what a run is made stands before how."""
    if settings is None:
        return
    yield "settings, by their table in config.toml:", []
    classes = group_classes()
    for group in sorted(classes, key=lambda group: group != "run"):
        yield f"[{group}] {classes[group].__doc__}", _rows(arguments(getattr(settings, group)))


def _rows(options: Iterable[Argument]) -> list[tuple[str, str]]:
    return [(argument.name, argument.text) for argument in options]


def _choices(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return _choices(item_kind(kind)[0]) if get_origin(kind) is tuple else ()


DEFAULT_PRESET = "quick"


def base_config(groups: Sequence[Words]) -> Config:
    """The config that `--preset` and `--config` give, before any other flag.

    A file may name its recipe itself; naming another one beside it is refused, because the file's settings would
    then stand under a name that is not theirs.

    Raises:
        ConfigError: the recipe is unknown, the file is wrong, or they name two recipes.
    """
    named, file = last_value(groups, "--preset"), last_value(groups, "--config")
    text = last_value(groups, "--dial")
    typed = parse_integer(text) if text is not None else None
    if file is None:
        return find_preset(named or DEFAULT_PRESET, dial=typed)
    values = load_values(file)
    written = values.get("preset")
    if named and written and named != written:
        raise ConfigError(
            f"--preset {named} contradicts {file}, which is made from preset {written}; leave --preset out, "
            "or take preset out of the file"
        )
    dial = values.get("dial")
    base = find_preset(named or written or DEFAULT_PRESET, dial=dial if type(dial) is int else None)
    config = load_config(file, base=base)
    return config if typed is None else turn_dial(config, typed)


def new_folder(to: str) -> Path:
    """The folder that `--to` names; raises `ConfigError` where something is there that it would mix with."""
    path = Path(to)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"--to is {path}, and there is something already; name a folder that is new or empty")
    return path


def check_target(to: str | None, *, example: str, is_own: Callable[[Path], bool], flag: str = "--to") -> None:
    """Nothing where the flag is not given, or is a file in a folder that is there, and new or of the command itself.

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
    """Whether a file holds JSON of which the mapping, or every one of a list of them, has these keys."""
    from atlas_fl.storage.jsonl import from_json  # NumPy, which most commands need not wait for here

    try:
        content = from_json(read_named_file(path, max_bytes=MOST_JSON_BYTES))
    except (OSError, ValueError):
        return False
    rows = content if isinstance(content, list) else [content]
    return bool(rows) and all(isinstance(row, dict) and set(keys) <= row.keys() for row in rows)


OptionsT = TypeVar("OptionsT")
UNEXPECTED = "unexpected words"


def parse(default: OptionsT, groups: Sequence[Words], *, command: str) -> OptionsT:
    """The options that these words give, on top of the default ones; `--help` prints the page and exits.

    Raises:
        ConfigError: a flag is unknown, or a value is missing, of the wrong type or none of the choices.
    """
    check_flags(groups, flags=known_flags(type(default)), command=command)
    if {"-h", "--help"} & {group.flag for group in groups}:
        print(help_page(default, command=command))
        raise SystemExit(0)
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            options = tyro.cli(
                type(default),
                prog=command,
                args=join_words(groups),
                default=default,
                config=(tyro.conf.OmitArgPrefixes,),
                registry=registry(),
            )
    except SystemExit:
        problem = _parse_error(printed.getvalue(), options=list(_arguments(default)))
        if (
            hasattr(default, SETTINGS)
            and problem.startswith(UNEXPECTED)
            and (named := PRESETS.keys() & problem.split())
        ):
            problem += f"; did you mean --preset {min(named)}?"
        raise ConfigError(f"{problem}{' ' if problem.endswith('?') else '; '}see `{command} --help`") from None
    if hasattr(options, SETTINGS) and not hasattr(options, "strategies"):  # a comparison names its strategies apart
        typed = {group.flag.replace("--no-", "--", 1) for group in groups}  # a switch that is off is typed, too
        check_typed_settings(getattr(options, SETTINGS), typed)
    return options


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


def registry(*, with_choices: bool = False) -> ConstructorRegistry:
    """Our own reading of every type but bool, so that a flag and a file take the same values and say the same.

    `with_choices` tells tyro the choices, which it completes and would else check in words of its own.
    """
    rules = ConstructorRegistry()

    @rules.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        kind: Any = info.type
        if (name := metavar(kind)) is None:
            return None
        size = item_kind(kind)[1] if get_origin(kind) is tuple else 1
        return PrimitiveConstructorSpec(
            nargs=size or "*",
            metavar=name,
            instance_from_str=lambda words: from_words(words, kind),
            is_instance=lambda _: True,
            str_from_instance=to_words,
            choices=(_choices(kind) or None) if with_choices else None,
        )

    return rules


def _arguments(default: Any) -> Iterator[Argument]:
    yield from arguments(default)
    groups = getattr(default, SETTINGS, None)
    for name in () if groups is None else group_classes():
        yield from arguments(getattr(groups, name))


def _parse_error(box: str, *, options: Sequence[Argument]) -> str:
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
    problem = " ".join(lines)
    if problem.startswith("Missing from "):
        return f"missing: {', '.join(argument.name for argument in options if argument.name in lines)}"
    if match := re.match(r"Missing value for argument '(\S+)'", problem):
        (kind,) = (argument.kind for argument in options if argument.flag == match[1])
        return f"{match[1]} lacks a value; allowed: {describe(kind)}"
    if match := re.match(r"Error parsing --tune: '(\d+)'", problem):  # in papers tuning is a number of settings tried
        problem += f"; how many settings of every method are tried is `atlas compare --trials {match[1]}`"
    return problem.removeprefix("Error parsing ").replace("Unrecognized options", UNEXPECTED).rstrip(".")
