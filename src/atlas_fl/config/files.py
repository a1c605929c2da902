"""Configs as TOML and as YAML.

YAML as settings are written in it: what a text says, by the core schema of YAML 1.2.

As PyYAML itself reads it, by YAML 1.1, `1e-3` is a text, `no` is false and `010` is eight. Here these are a number, a
text and ten, so that the setting's own type says what it had to be.

Config files: TOML or YAML with a table for each group, every setting commented, none of them necessary.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
from yaml import MappingNode, Node, SafeLoader, ScalarNode, YAMLError, compose

from atlas_fl.config.schema import Config
from atlas_fl.config.settings import Setting, from_values, group_classes, settings, unknown_setting, value_of
from atlas_fl.config.values import NONE, describe, read, wrong_kind
from atlas_fl.errors import ConfigError, shown, unknown
from atlas_fl.storage.files import check_regular

_KNOWN = frozenset(
    f"tag:yaml.org,2002:{kind}"
    for kind in ("map", "seq", "str", "null", "bool", "int", "float", "timestamp", "merge", "value")
)
"""Tags that PyYAML itself gives to what has none."""
_PLAIN: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = (
    (re.compile(r"null|Null|NULL|~|"), lambda _: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)
"""What a scalar without quotes is; a text where it is none of these."""


def read_yaml(text: str) -> Any:
    """What the text says: mappings with texts as keys, lists, texts, numbers, true, false and None.

    Raises:
        ValueError: it is no YAML, has a key twice in one mapping, or a tag of its own.
    """
    try:
        root = compose(text, Loader=SafeLoader)
    except YAMLError as error:
        raise ValueError(str(error)) from None
    return None if root is None else _node_value(root, {})


def _node_value(node: Node, made: dict[int, Any]) -> Any:
    """What a node says; one that several aliases name is read once, so that no short text means a huge value."""
    if id(node) not in made:
        if node.tag not in _KNOWN:
            raise ValueError(f"line {node.start_mark.line + 1}: the tag {node.tag} means nothing here")
        made[id(node)] = _scalar(node) if isinstance(node, ScalarNode) else _collection(node, made)
    return made[id(node)]


def _collection(node: Node, made: dict[int, Any]) -> Any:
    if not isinstance(node, MappingNode):
        return [_node_value(part, made) for part in node.value]
    found: dict[str, Any] = {}
    for key, value in node.value:
        line = f"line {key.start_mark.line + 1}"
        if not isinstance(key, ScalarNode):
            raise ValueError(f"{line}: a key is no word")
        if key.value in found:
            raise ValueError(f"{line}: {key.value!r} stands there twice")
        found[key.value] = _node_value(value, made)
    return found


def _scalar(node: ScalarNode) -> Any:
    text = str(node.value)
    if node.style is not None:  # in quotes, or a block
        return text
    try:
        return next((read(text) for pattern, read in _PLAIN if pattern.fullmatch(text)), text)
    except ValueError:  # Python reads no whole number of more than 4,300 digits
        raise ValueError(f"line {node.start_mark.line + 1}: {shown(text)} is more than anything here can be") from None


WORD_OR_NUMBER = frozenset({"clusters", "ranks", "split", "nc"})
"""Settings that are a word or a number, so that a file may hold `ranks = 8` without quotes."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form in which settings are written."""

    name: str
    parse: Callable[[str], Any]
    """What a text says; raises `ValueError` where it is none of this form."""
    table: str
    """How a table begins."""


def _read_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python reads no whole number of more than 4,300 digits
        raise ValueError("a number of thousands of digits is more than anything here can be") from None


TOML = Form(name="TOML", parse=_read_toml, table="[{}]")
YAML = Form(name="YAML", parse=read_yaml, table="{}:")
FORMS: Mapping[str, Form] = {".yaml": YAML, ".yml": YAML}
"""The form of a file by its ending; TOML where there is none."""


def load_config(path: str | Path, *, base: Config | None = None) -> Config:
    """The settings of a TOML or YAML file over those of `base`; over the defaults without one.

    Ranges and names are not looked at: that is what `validate` does.

    Raises:
        ConfigError: the file cannot be read or is of neither form, holds an unknown table or key (the message has the
            nearest), or a value of the wrong type.
    """
    return from_values(load_values(path), base=base or Config())


def load_values(path: str | Path) -> dict[str, Any]:
    """The settings that a TOML or YAML file holds, by name and with their types.

    Raises:
        ConfigError: as `load_config`.
    """
    form = FORMS.get(Path(path).suffix.lower(), TOML)
    return _values(_parsed(Path(path), form), path, form=form)


def parse_config(text: str, *, origin: str) -> Config:
    """The settings of a TOML text over the defaults; raises `ConfigError` as `load_config`, which names `origin`."""
    try:
        tables = _read_toml(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin} is no TOML ({' '.join(str(error).split())})") from None
    return from_values(_values(tables, origin), base=Config())


def _values(tables: Mapping[str, Any], path: str | Path, *, form: Form = TOML) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for group, table in tables.items():
        if (own := settings().get(group)) is not None and group not in group_classes():
            begun = form.table.format(own.group)
            raise ConfigError(f"{path}: {group} stands outside of all tables; it belongs below {begun}; move it there")
        if group not in group_classes():
            raise unknown(f"table in {path}:", group, group_classes())
        if not isinstance(table, Mapping):
            begun = form.table.format(group)
            raise ConfigError(f"{path}: {group} is no table; write {begun} on a line of its own, its settings below")
        values |= {key: _value(path, group, key, value) for key, value in table.items()}
    return values


def to_toml(config: Config) -> str:
    """Every setting with its help as a comment; `load_config` reads it back to an equal config.

    A setting without a value is written as "none", so that the file stands for itself and needs no base.
    """
    lines = ["# Every setting of a run. `atlas run --config THIS_FILE --name again` repeats it."]
    for group, cls in group_classes().items():
        lines += ["", "", f"# {(cls.__doc__ or '').strip()}", f"[{group}]"]
        for setting in (setting for setting in settings().values() if setting.group == group):
            lines += _entry(setting, value_of(config, setting.name))
    return "\n".join(lines) + "\n"


def _parsed(path: Path, form: Form) -> dict[str, Any]:
    try:
        check_regular(path)
        found = form.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path} ({error.strerror}); give the path of a TOML or YAML file") from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is no {form.name} ({reason}); mend that line, or leave the file out") from None
    if not isinstance(found, dict | None):
        begun = form.table.format("training")
        raise ConfigError(f"{path} holds no tables; write {begun} on a line of its own, its settings below")
    # YAML has nothing where all that stands below is commented out
    return {group: {} if table is None else table for group, table in (found or {}).items()}


def _value(path: str | Path, group: str, key: str, value: object) -> Any:
    setting = settings().get(key)
    if setting is None:
        raise unknown_setting(key, where=str(path))
    if setting.group != group:
        raise ConfigError(f"{path}: {key} stands in [{group}]; it belongs to [{setting.group}]; move it there")
    if key in WORD_OR_NUMBER and type(value) is int:
        value = str(value)
    try:
        return read(value, setting.kind)
    except ValueError:
        raise wrong_kind(f"{path}: {key}", value, setting.kind) from None


def _entry(setting: Setting, value: Any) -> Iterator[str]:
    is_choice = "one of" in (words := describe(setting.kind))
    yield f"# {setting.help}" + (f" ({words})" if is_choice else "")
    yield f"{setting.name} = {tomlkit.item(_plain(value)).as_string()}"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return NONE if value is None else value
