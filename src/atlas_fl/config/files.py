"""Config files: TOML or YAML with a table for each group, every setting commented, none of them necessary.

Of YAML every scalar is a text, which the setting's own type reads as on the command line: as PyYAML guesses, by YAML
1.1, `1e-3` is a text, `no` is false and `010` is eight.
"""

import errno
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_origin

import tomlkit
from yaml import AliasToken, BaseLoader, MappingNode, ScalarNode, YAMLError, compose, scan

from atlas_fl.config.schema import Config
from atlas_fl.config.settings import group_classes, replace_settings, settings, unknown_setting, value_of
from atlas_fl.config.values import NONE, Mark, convert_value, describe, from_words, unwrap_optional, wrong_kind
from atlas_fl.errors import ConfigError, check_known, short_repr
from atlas_fl.frozen import Frozen
from atlas_fl.storage.folder_access import read_file, read_named_file


def read_yaml(text: str) -> Any:
    """Content of a YAML text: mappings, lists and texts; raises ValueError where it is none, or has aliases."""
    try:
        if any(isinstance(token, AliasToken) for token in scan(text)):
            raise ValueError("it has aliases (*), which mean nothing here")
        root = compose(text, Loader=BaseLoader)
    except YAMLError as error:
        raise ValueError(str(error)) from None
    return None if root is None else _content(root)


def _content(node: Any) -> Any:
    if isinstance(node, ScalarNode):
        return str(node.value)
    if not isinstance(node, MappingNode):
        return [_content(part) for part in node.value]
    keys = [key.value for key, _ in node.value if isinstance(key, ScalarNode)]
    if len({*keys}) < len(node.value):
        raise ValueError(f"line {node.start_mark.line + 1}: a key stands twice in one mapping, or is no word")
    return {key.value: _content(value) for key, value in node.value}


def convert_texts(value: object, kind: Any) -> Any:
    """The value of this kind that texts spell; raises ValueError where they spell none."""
    is_null = value in ("", "~", "null") and unwrap_optional(kind) is not None
    parts = value if isinstance(value, list) else [NONE if is_null else value]
    words = [word for word in parts if isinstance(word, str)]
    if len(words) < len(parts) or (isinstance(value, list) and get_origin(kind) is not tuple):
        raise ValueError(f"{short_repr(value)} is not {describe(kind)}")
    return from_words(words, kind)


class FileFormat(Frozen):
    """A form in which settings are written."""

    name: str
    parse: Callable[[str], Any]
    """Content of a text; raises `ValueError` where it is none of this form."""
    convert: Callable[[object, Any], Any]
    """Value of this kind from such content; raises ValueError where there is none."""
    table: str
    """Header of a table."""


MOST_BYTES = 1 << 18
"""Size of a file of settings; one that is written here has some thousands, and a few more for each client."""
MOST_KEY_CHARACTERS, MOST_KEY_PARTS = 100, 8
"""Length of a key, and its parts between dots: `tomllib` takes time by the square of these parts."""
_BOUNDS = f"allowed: {MOST_BYTES:,} bytes, keys of {MOST_KEY_CHARACTERS} characters and {MOST_KEY_PARTS} parts"
_TOML_TEXTS = re.compile(
    r'''"""(?:[^"\\]|\\.|"(?!""))*+"""|'{3}(?:[^']|'(?!''))*+'{3}|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+'|\#[^\n]*+''',
    re.DOTALL,
)
"""Texts and comments."""
_LONG_KEY = re.compile(rf"(?<![\w-])(?!\d+\b)[\w-]{{{MOST_KEY_CHARACTERS + 1}}}")
"""A key that is no number, whose length Python bounds."""
_KEY_OF_PARTS = re.compile(rf"(?<![\w-])[\w-]++(?:[ \t]*+\.[ \t]*+[\w-]++){{{MOST_KEY_PARTS}}}")


def read_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text; raises ValueError or RecursionError where it is none, or has keys beyond the bounds.

    >>> read_toml("[training]\\nlr = 0.1")
    {'training': {'lr': 0.1}}
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"it has {len(text):,} characters; {_BOUNDS}")
    keys = _TOML_TEXTS.sub("x", text)
    if (long := _LONG_KEY.search(keys) or _KEY_OF_PARTS.search(keys)) is not None:
        raise ValueError(f"the key {short_repr(long[0])} is too long; {_BOUNDS}")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python reads no whole number of more than 4,300 digits
        raise ValueError("a number of thousands of digits is more than anything here can be") from None


TOML = FileFormat(name="TOML", parse=read_toml, convert=convert_value, table="[{}]")
YAML = FileFormat(name="YAML", parse=read_yaml, convert=convert_texts, table="{}:")
FORMATS: Mapping[str, FileFormat] = {".yaml": YAML, ".yml": YAML}
"""The form of a file by its ending; TOML where there is none."""


def load_config(path: str | Path, *, base: Config | None = None, within: Path | None = None) -> Config:
    """The settings of a TOML or YAML file over those of `base`; over the defaults without one.

    Ranges and names are not looked at: that is what `validate` does. A file of the folder `within`, such as that of a
    run, is no link; one that a user names may be one.

    Raises:
        ConfigError: the file cannot be read or is of neither form, holds an unknown table or key (the message has the
            nearest), or a value of the wrong type.
    """
    return replace_settings(load_values(path, within=within), base=base or Config())


def load_values(path: str | Path, *, within: Path | None = None) -> dict[str, Any]:
    """The settings that a TOML or YAML file holds, by name and with their types.

    Raises:
        ConfigError: as `load_config`.
    """
    file_format = FORMATS.get(Path(path).suffix.lower(), TOML)
    tables = _parse_file(Path(path), file_format, within)
    return _read_tables(tables, path, file_format=file_format, is_recorded=within is not None)


def parse_config(text: str, *, origin: str) -> Config:
    """The settings of a TOML text over the defaults; raises `ConfigError` as `load_config`, which names `origin`."""
    try:
        tables = read_toml(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin} is no TOML ({' '.join(str(error).split())})") from None
    return replace_settings(_read_tables(tables, origin), base=Config())


def _read_tables(
    tables: Mapping[str, Any], path: str | Path, *, file_format: FileFormat = TOML, is_recorded: bool = False
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    # the digests of a run hold for its settings
    remedy = "another version of ATLAS wrote this run; run it again" if is_recorded else "move it there"
    for group, table in tables.items():
        if (setting := settings().get(group)) is not None and group not in group_classes():
            header = file_format.table.format(setting.group)
            raise ConfigError(f"{path}: {group} stands outside of all tables; it belongs below {header}; {remedy}")
        check_known(f"table in {path}:", group, among=group_classes())
        if not isinstance(table, Mapping):
            header = file_format.table.format(group)
            raise ConfigError(f"{path}: {group} is no table; write {header} on a line of its own, its settings below")
        for key, value in table.items():
            if key in settings() and settings()[key].group != group:
                raise ConfigError(
                    f"{path}: {key} stands in [{group}]; it belongs to [{settings()[key].group}]; {remedy}"
                )
            values[key] = _read_value(path, key, value, file_format)
    return values


def to_toml(config: Config) -> str:
    """Every setting with its help as a comment; `load_config` reads it back to an equal config.

    A setting without a value is written as "none", so that the file stands for itself and needs no base.
    """
    lines = ["# Every setting of a run. `atlas run --config THIS_FILE --name again` repeats it."]
    for group, cls in group_classes().items():
        lines += ["", "", f"# {(cls.__doc__ or '').strip()}", f"[{group}]"]
        for setting in (setting for setting in settings().values() if setting.group == group):
            words, value = describe(setting.kind), _to_toml_value(value_of(config, setting.name))
            lines.append(f"# {setting.help}" + (f" ({words})" if "one of" in words else ""))
            lines.append(f"{setting.name} = {tomlkit.item(value).as_string()}")
    return "\n".join(lines) + "\n"


def _parse_file(path: Path, file_format: FileFormat, within: Path | None) -> dict[str, Any]:
    try:
        if within is None:
            content = read_named_file(path, max_bytes=MOST_BYTES)
        else:
            content = read_file(path, max_bytes=MOST_BYTES, within=within)
        tables = file_format.parse(content.decode())
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ConfigError(f"{path} has {error.strerror}; {_BOUNDS}; take out what is no setting") from None
        raise ConfigError(f"cannot read {path} ({error.strerror}); give the path of a TOML or YAML file") from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{path} is no {file_format.name} ({reason}); mend that line, or leave the file out"
        ) from None
    if tables and not isinstance(tables, dict):
        header = file_format.table.format("training")
        raise ConfigError(f"{path} holds no tables; write {header} on a line of its own, its settings below")
    # YAML has nothing where all that stands below is commented out
    return {group: table or {} for group, table in (tables or {}).items()}


def _read_value(path: str | Path, key: str, value: object, file_format: FileFormat) -> Any:
    setting = settings().get(key)
    if setting is None:
        raise unknown_setting(key, where=str(path))
    if Mark.WORD_OR_NUMBER in setting.marks and type(value) is int:
        value = str(value)
    try:
        return file_format.convert(value, setting.kind)
    except ValueError:
        raise wrong_kind(f"{path}: {key}", value, setting.kind) from None


def _to_toml_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_toml_value(part) for part in value]
    return NONE if value is None else value
