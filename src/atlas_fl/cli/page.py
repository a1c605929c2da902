"""The page that `--help` prints: plain text, as wide as the terminal up to `WIDEST`, from the dataclasses alone."""

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tyro

from atlas_fl.config.fields import field_docs, group_classes
from atlas_fl.config.kinds import inner_of, item_of, to_words

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
    docs = field_docs(type(default))
    for name, kind in get_type_hints(type(default), include_extras=True).items():
        if name == SETTINGS:
            continue
        extras = getattr(kind, "__metadata__", ())
        plain = kind.__origin__ if extras else kind
        named = [one.metavar for one in extras if getattr(one, "metavar", None)]
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
        item, size = item_of(kind)
        name = metavar(item) or ""
        return " ".join([name] * size) if size else f"{name} ..."
    return metavar(inner) if (inner := inner_of(kind)) is not None else _METAVARS.get(kind)


def page(default: Any, *, command: str) -> str:
    """The help of a command whose options have these values where no flag says another."""
    own = list(arguments(default))
    words, flags = [one for one in own if not one.flag], [one for one in own if one.flag]
    required = [one.name for one in flags if one.is_required]
    positional = [one.name if one.default is tyro.MISSING else f"[{one.name}]" for one in words]
    usage = f"usage: {' '.join([command, *required, '[OPTIONS]', *positional])}"
    sections = [("", _rows(words)), ("options:", [*_rows(flags), ("-h, --help", "Show this page.")])]
    sections += _groups(getattr(default, SETTINGS, None))
    width = max(len(name) for _, rows in sections for name, _ in rows)
    lines = [*wrapped(usage), "", *wrapped(" ".join((type(default).__doc__ or "").split()))]
    for title, rows in sections:
        if title or rows:
            lines += ["", *wrapped(title), *table(rows, names=min(width, NAMES))]
    return "\n".join(lines)


def table(rows: Sequence[tuple[str, str]], *, names: int) -> Iterator[str]:
    """Lines with a name and its text beside it, or below where the name takes more columns than that."""
    for name, text in rows:
        first, *others = wrapped(text, indent=names + 4)
        yield from [f"  {name}", first] if len(name) > names else [f"  {name:<{names}}  {first.lstrip()}"]
        yield from others


def wrapped(text: str, *, indent: int = 0) -> list[str]:
    """The text in lines that fit on the terminal; what stands in backquotes stays on one of them."""
    width = max(min(shutil.get_terminal_size().columns, WIDEST), indent + 24)
    together = "`".join(part.replace(" ", SPACE) if place % 2 else part for place, part in enumerate(text.split("`")))
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


def _rows(found: Iterable[Argument]) -> list[tuple[str, str]]:
    return [(one.name, one.text) for one in found]


def _choices(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return _choices(item_of(kind)[0]) if get_origin(kind) is tuple else ()
