"""What a pickle file of plain data and byte arrays holds, read without ever running it.

A pickle is a program: to load one is to do what its writer says. The archives of CIFAR are pickles, so the opcodes are
read one by one here, as `pickletools` splits them, and only those that build numbers, texts, lists, dictionaries and
arrays of uint8 are known; a name that would be called is compared with a table of three and never looked up.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atlas_fl.errors import DataError

_MARK = object()


@dataclass(frozen=True, kw_only=True)
class _Name:
    """A function or class that the file names."""

    module: str
    name: str


@dataclass(kw_only=True)
class _Array:
    """An array of which the values are still to come."""

    values: Any = None


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """What the opcodes so far have built."""

    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def above_mark(self) -> list[Any]:
        """What lies above the topmost mark; it and the mark are taken off."""
        place = max(index for index, value in enumerate(self.stack) if value is _MARK)
        found = self.stack[place + 1 :]
        del self.stack[place:]
        return found

    def last(self, count: int) -> list[Any]:
        """The topmost values; they are taken off."""
        found = self.stack[-count:]
        del self.stack[-count:]
        if len(found) < count:
            raise ValueError("a value is missing")
        return found


def read_pickled(content: bytes, *, origin: object) -> Any:
    """The plain data of a pickle; arrays of uint8 as NumPy arrays, texts of Python 2 as str with one letter a byte.

    Raises:
        DataError: the file is damaged, or holds anything but plain data.
    """
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name not in _OPCODES:
                raise ValueError(f"opcode {opcode.name} is none of plain data")
            _OPCODES[opcode.name](machine, argument)
        (built,) = machine.stack
        return _finished(built, {})
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise DataError(
            f"cannot read {origin}: {reason}; it is damaged or holds more than data, get the official archive"
        ) from error


def _finished(built: Any, known: dict[int, Any]) -> Any:
    """The value itself; `known` has lists and dictionaries by identity, as a small file may name one very often."""
    if id(built) in known:
        return known[id(built)]
    if isinstance(built, _Array):
        return built.values
    if isinstance(built, list):
        return known.setdefault(id(built), [_finished(value, known) for value in built])
    if isinstance(built, dict):
        return known.setdefault(id(built), {key: _finished(value, known) for key, value in built.items()})
    if built is _MARK or isinstance(built, _Name):
        raise ValueError("it ends in the middle")
    return built


def _push(machine: _Machine, argument: Any) -> None:
    machine.stack.append(argument)


def _constant(make: Callable[[], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(make())


def _tuple(count: int) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(tuple(machine.last(count)))


def _put(machine: _Machine, argument: Any) -> None:
    machine.memo[int(argument)] = machine.stack[-1]


def _get(machine: _Machine, argument: Any) -> None:
    machine.stack.append(machine.memo[int(argument)])


def _set_items(machine: _Machine, pairs: list[Any]) -> None:
    machine.stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))


def _name(machine: _Machine, argument: str) -> None:
    module, _, name = argument.partition(" ")
    machine.stack.append(_Name(module=module, name=name))


def _reduce(machine: _Machine, _: Any) -> None:
    called, arguments = machine.last(2)
    if not isinstance(called, _Name) or (called.module, called.name) not in _CALLS:
        raise ValueError(f"it would call {getattr(called, 'module', called)}.{getattr(called, 'name', '')}")
    machine.stack.append(_CALLS[called.module, called.name](*arguments))


def _build(machine: _Machine, _: Any) -> None:
    (state,) = machine.last(1)
    target = machine.stack[-1]
    if isinstance(target, _Array):
        _, shape, dtype, by_column, data = state
        if not isinstance(dtype, np.dtype):
            raise ValueError(f"an array of {dtype!r} and not of uint8")
        content = data if isinstance(data, bytes) else data.encode("latin-1")
        values = np.frombuffer(content, dtype=dtype)
        target.values = values.reshape(shape, order="F" if by_column else "C")
    elif not isinstance(target, np.dtype):  # that of uint8 has nothing to be told
        raise ValueError(f"it would change a {type(target).__name__}")


def _encoded(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes are encoded as {encoding!r}")
    return text.encode("latin-1")


def _dtype(code: str, *_: Any) -> np.dtype[np.uint8]:
    if code != "u1":
        raise ValueError(f"an array of {code!r} and not of uint8")
    return np.dtype(np.uint8)


_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy._core.multiarray", "_reconstruct"): lambda *_: _Array(),
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encoded,
}

_PUSHED = ("BININT", "BININT1", "BININT2", "LONG1", "INT", "SHORT_BINSTRING", "BINSTRING", "BINUNICODE", "BINFLOAT")

_OPCODES: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(_PUSHED, _push),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _get),
    **dict.fromkeys(("PROTO", "STOP"), lambda *_: None),
    "MARK": _constant(lambda: _MARK),
    "NONE": _constant(lambda: None),
    "NEWTRUE": _constant(lambda: True),
    "NEWFALSE": _constant(lambda: False),
    "EMPTY_DICT": _constant(dict),
    "EMPTY_LIST": _constant(list),
    "EMPTY_TUPLE": _constant(tuple),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.above_mark())),
    "APPEND": lambda machine, _: machine.stack[-2].append(machine.stack.pop()),
    "APPENDS": lambda machine, _: (lambda found: machine.stack[-1].extend(found))(machine.above_mark()),
    "SETITEM": lambda machine, _: (lambda pair: _set_items(machine, pair))(machine.last(2)),
    "SETITEMS": lambda machine, _: (lambda pairs: _set_items(machine, pairs))(machine.above_mark()),
    "GLOBAL": _name,
    "REDUCE": _reduce,
    "BUILD": _build,
}
