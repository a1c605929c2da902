"""YAML as settings are written in it: what a text says, by the core schema of YAML 1.2.

As PyYAML itself reads it, by YAML 1.1, `1e-3` is a text, `no` is false and `010` is eight. Here these are a number, a
text and ten, so that the setting's own type says what it had to be.
"""

import re
from collections.abc import Callable
from typing import Any

from yaml import MappingNode, Node, SafeLoader, ScalarNode, YAMLError, compose

from atlas_fl.errors import shown

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
    return None if root is None else _value(root, {})


def _value(node: Node, made: dict[int, Any]) -> Any:
    """What a node says; one that several aliases name is read once, so that no short text means a huge value."""
    if id(node) not in made:
        if node.tag not in _KNOWN:
            raise ValueError(f"line {node.start_mark.line + 1}: the tag {node.tag} means nothing here")
        made[id(node)] = _scalar(node) if isinstance(node, ScalarNode) else _collection(node, made)
    return made[id(node)]


def _collection(node: Node, made: dict[int, Any]) -> Any:
    if not isinstance(node, MappingNode):
        return [_value(part, made) for part in node.value]
    found: dict[str, Any] = {}
    for key, value in node.value:
        line = f"line {key.start_mark.line + 1}"
        if not isinstance(key, ScalarNode):
            raise ValueError(f"{line}: a key is no word")
        if key.value in found:
            raise ValueError(f"{line}: {key.value!r} stands there twice")
        found[key.value] = _value(value, made)
    return found


def _scalar(node: ScalarNode) -> Any:
    text = str(node.value)
    if node.style is not None:  # in quotes, or a block
        return text
    try:
        return next((read(text) for pattern, read in _PLAIN if pattern.fullmatch(text)), text)
    except ValueError:  # Python reads no whole number of more than 4,300 digits
        raise ValueError(f"line {node.start_mark.line + 1}: {shown(text)} is more than anything here can be") from None
