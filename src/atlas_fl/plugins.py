"""Plug-ins: Python files and modules that register partitions, tasks, strategies and more under names of their own.

    from atlas_fl.plugins import register

    @register("partition", "halves")
    def halves(prior, num_clients, samples, alpha, rng): ...

`--plugin FILE_OR_MODULE` loads one; `run_config(config, plugins=[halves])` names the file that defines it. A setting
holds its name and the first sixteen digits of its SHA-256 (`halves.py#sha256=0123456789abcdef`): the digest is part of
a run's identity, and whoever loads the plug-in of a run, a worker or a resumed run, refuses another one. The registries
of a process hold exactly the plug-ins of the config that was validated last.
"""

import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from atlas_fl.errors import AtlasError, ConfigError, check_known, replace_unprintable, short_repr
from atlas_fl.frozen import Frozen
from atlas_fl.storage.folder_access import read_named_file

KINDS: Mapping[str, tuple[str, ...]] = {
    "partition": ("data.partition.PARTITIONS",),
    "task": ("data.registry.TASKS",),
    "reader": ("data.tables.READERS",),
    "allocator": ("ranks.allocation.ALLOCATORS",),
    "term": ("client.optimizer.TERMS",),
    "trainer": ("client.trainers.TRAINERS",),
    "update_filter": ("methods.update_filters.UPDATE_FILTERS",),
    "metric": ("data.metrics.FURTHER_METRICS", "experiment.summary.ROW_NAMES"),
    "tracker": ("report.trackers.TRACKERS",),
    "figure": ("report.figures.PLUGIN_FIGURES", "report.figures.FIGURES"),
    "fingerprint": ("clustering.fingerprints.FINGERPRINTS", "clustering.fingerprints.WITHOUT_GRADIENTS"),
    "model": ("models.registry.MODELS",),
    "family": ("models.registry.FAMILIES", "models.registry.VISION_FAMILIES"),
    "vision_family": ("models.registry.VISION_FAMILIES", "models.registry.FAMILIES"),
    "method": ("methods.registry.RULES", "methods.registry.ALIASES", "methods.registry.METHODS"),
}
"""The registry of each kind, and others that share its names. They are not imported here, because registries lie in all
layers and importing them takes seconds."""

ENTRY_POINTS = "atlas_fl"
"""The group of entry points of installed packages; one is loaded where `--plugin` names it."""
MOST_BYTES = 1 << 22
"""Most bytes of a plug-in's file."""
DIGITS = 16

_NAME = re.compile(r"\.?[A-Za-z0-9][A-Za-z0-9_.-]*")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_PINNED = re.compile(rf"(.+)#sha256=([0-9a-f]{{{DIGITS}}})")

EntryT = TypeVar("EntryT")


class Entry(Frozen):
    """One registration."""

    kind: str
    name: str
    value: Any


class Source(Frozen):
    """Code of a plug-in that has not run."""

    name: str
    """The name that the user gave."""
    module: str
    """The module to import; empty for a file."""
    code: bytes
    """The content of a file."""
    digest: str

    @property
    def pinned(self) -> str:
        """The name with its digest, as settings hold it."""
        return f"{self.name}#sha256={self.digest}"


@dataclass(kw_only=True)
class _State:
    """Plug-ins of this process."""

    loaded: dict[str, tuple[Entry, ...]] = field(default_factory=dict)
    """Entries by pinned name; the code of a plug-in runs once in a process."""
    active: dict[str, list[Entry]] = field(default_factory=dict)
    """Plug-ins whose entries are in the registries."""
    loading: list[Entry] | None = None
    """Entries of the plug-in that is being loaded."""
    by_hand: dict[tuple[str, str], str] = field(default_factory=dict)
    """Files of registrations that were made while no plug-in was loaded, by kind and name."""


_STATE = _State()


def register(kind: str, name: str = "") -> Callable[[EntryT], EntryT]:
    """Register what this is called with under a name of its own: a decorator, or `register("task", "mine")(task)`.

    Without `name` it is the value's own, such as that of a method's class. In a script it takes effect in runs that
    name the script's file; `load_plugins` refuses others.

    Raises:
        ConfigError: the kind is unknown, or the name is no word.
    """

    def add(value: EntryT) -> EntryT:
        own = getattr(value, "name", "") if kind == "method" else ""
        entry = name or own
        if own and entry != own:
            raise ConfigError(f"the {kind} {short_repr(own)} is registered as {short_repr(entry)}; give it one name")
        check_known("kind of registration", kind, among=KINDS)
        if not _NAME.fullmatch(entry):
            raise ConfigError(
                f"a {kind} has the name {short_repr(entry)}; allowed: letters, digits, - and _; rename it"
            )
        if _STATE.loading is None:
            _STATE.by_hand[kind, entry] = _file_of(sys._getframe(1).f_globals, name=entry)
        else:
            _STATE.loading.append(Entry(kind=kind, name=entry, value=value))
        return value

    return add


def source_files(values: Sequence[object]) -> tuple[str, ...]:
    """The files, each once, that define these classes, functions or modules, as `--plugin` takes them.

    Raises:
        ConfigError: one is something else, or defined in no file.
    """
    files = []
    for value in values:
        module = value if isinstance(value, ModuleType) else sys.modules.get(getattr(value, "__module__", ""))
        if not isinstance(value, ModuleType | FunctionType | type):
            raise ConfigError(
                f"{short_repr(value)} is no class, function or module; pass what is decorated with @register, or name"
                " its file: RunConfig(plugin=(FILE,))"
            )
        files.append(_file_of(vars(module) if module else {}, name=value.__name__))
    return tuple(dict.fromkeys(files))


def _file_of(module: Mapping[str, Any], *, name: str) -> str:
    """The file of the module with these globals; a ConfigError where there is none that workers could load."""
    file = module.get("__file__")
    if file is None or not Path(file).is_file():
        raise ConfigError(
            f"{name} is defined in no file, so neither workers nor a resumed run could load it; write it into a .py"
            " file (in a notebook: %%writefile own.py) and name the file: --plugin FILE, or RunConfig(plugin=(FILE,))"
        )
    return str(file)


def pin_plugins(names: Sequence[str]) -> tuple[str, ...]:
    """The same plug-ins, each with the digest of its code, which does not run.

    Raises:
        ConfigError: one is not there, is named twice, or has another digest than its name says.
    """
    return tuple(source.pinned for source in _find_sources(names))


def load_plugins(names: Sequence[str], *, outside: Path | None = None) -> tuple[str, ...]:
    """Put the entries of these plug-ins, and of no others, into the registries of this process; their pinned names.

    Files in the folder `outside` are refused: a run that one was given does not bring its own code.

    Raises:
        ConfigError: as `pin_plugins`; one cannot be imported, registers nothing, or registers a name that is taken; a
            script has registered something and its file is none of these; a plug-in begins a run while it is loaded.
    """
    if _STATE.loading is not None:
        raise ConfigError('it begins a run while it is loaded; put that below `if __name__ == "__main__":`')
    sources = _find_sources(names)
    for source in sources:
        if outside is not None and not source.module and Path(source.name).resolve().is_relative_to(outside.resolve()):
            raise ConfigError(
                f"the plug-in {source.name} lies in the folder of the run that names it, and a run does not bring its"
                " own code; read it, move it elsewhere, and name its place in config.toml"
            )
    by_pin = {source.pinned: source for source in sources}
    if list(by_pin) != list(_STATE.active):
        _deactivate()
        for pinned, source in by_pin.items():
            if pinned not in _STATE.loaded:
                _STATE.loaded[pinned] = _run(source)
            _activate(source, _STATE.loaded[pinned])
    active = {(entry.kind, entry.name) for entries in _STATE.active.values() for entry in entries}
    for (kind, name), file in _STATE.by_hand.items():
        if (kind, name) not in active:
            raise ConfigError(
                f"the {kind} {name!r} was registered by {file}, which is no plug-in of this run, so it would not reach"
                " workers or a resumed run; name the file: run_config(config, plugins=[...]), or"
                f" RunConfig(plugin=({file!r},))"
            )
    return tuple(by_pin)


def plugin_digests(names: Sequence[str]) -> tuple[str, ...]:
    """The digests of these plug-ins, sorted, wherever they lie; the name of one that is not pinned."""
    return tuple(sorted(digest or name for name, digest in map(split_pin, names)))


def registrations(pinned: str, kind: str) -> dict[str, Any]:
    """Registrations of this kind of an active plug-in, by name."""
    return {entry.name: entry.value for entry in _STATE.active[pinned] if entry.kind == kind}


def active_plugins() -> tuple[str, ...]:
    """The digests of the plug-ins in the registries of this process, sorted."""
    return plugin_digests(tuple(_STATE.active))


def registered_names() -> dict[str, list[str]]:
    """All names by kind, in this process."""
    return {kind: sorted(_table(tables[0])) for kind, tables in KINDS.items()}


def check_registered(names: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError where another process, whose names these are, has one that this process lacks."""
    for kind, here in registered_names().items():
        if missing := sorted(set(names.get(kind, ())) - set(here)):
            raise ConfigError(
                f"the {kind} {short_repr(missing[0])} was put into a registry by hand and does not reach other"
                " processes; register it in a file of its own, and name the file: --plugin FILE"
            )


def split_pin(name: str) -> tuple[str, str | None]:
    """(the name, the digest behind it); None where it has none.

    >>> split_pin("halves.py#sha256=0123456789abcdef"), split_pin("halves.py")
    (('halves.py', '0123456789abcdef'), ('halves.py', None))
    """
    match = _PINNED.fullmatch(name)
    return (name, None) if match is None else (match[1], match[2])


def _find_sources(names: Sequence[str]) -> list[Source]:
    sources: list[Source] = []
    for word in names:
        name, digest = split_pin(word)
        source = _read_file(name) if name.endswith(".py") or "/" in name else _read_module(name)
        if digest is not None and source.digest != digest:
            raise ConfigError(
                f"the plug-in {name} was altered: its SHA-256 begins with {source.digest}, and that of the run's with"
                f" {digest}; restore it, or begin another run with it"
            )
        if any(source.digest == other.digest for other in sources):
            raise ConfigError(f"--plugin names {name} twice; name a plug-in once")
        sources.append(source)
    return sources


def _read_file(name: str) -> Source:
    try:
        code = read_named_file(Path(name), max_bytes=MOST_BYTES)
    except OSError as error:
        raise ConfigError(
            f"the plug-in {name} cannot be read ({error.strerror}); give --plugin a Python file that is there"
        ) from None
    return Source(name=name, module="", code=code, digest=sha256(code).hexdigest()[:DIGITS])


def _read_module(name: str) -> Source:
    """The source of an entry point of this name, or else of a module."""
    points = [point for point in entry_points(group=ENTRY_POINTS) if point.name == name]
    module = points[0].module if points else name
    files = _files_of(module) if _MODULE.fullmatch(module) else {}
    if not files:
        known = ", ".join(sorted(point.name for point in entry_points(group=ENTRY_POINTS)))
        raise ConfigError(
            f"--plugin {short_repr(name)} is no module that can be imported, and no entry point of an installed package"
            f"{f' ({known} are)' if known else ''}; give the path of a .py file, or install its package"
        )
    lines = [module, *(f"{place} {sha256(file.read_bytes()).hexdigest()}" for place, file in files.items())]
    return Source(name=name, module=module, code=b"", digest=sha256("\n".join(lines).encode()).hexdigest()[:DIGITS])


def _files_of(module: str) -> dict[str, Path]:
    """All .py files of the package that a module belongs to, by their place in it; of a module without one its own."""
    spec = find_spec(module.partition(".")[0]) if module != "__main__" else None
    if spec is None:
        return {}
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = {str(file.relative_to(folder)): file for folder in folders for file in folder.rglob("*.py")}
    if not folders and spec.origin is not None and spec.origin.endswith(".py"):
        files = {Path(spec.origin).name: Path(spec.origin)}
    return dict(sorted(files.items()))


def _run(source: Source) -> tuple[Entry, ...]:
    """Run the code of a plug-in; its registrations."""
    _STATE.loading = []
    try:
        if source.module in sys.modules:
            raise ConfigError("its module was imported before, or has changed since; start Python again")
        if source.module:
            import_module(source.module)
        else:
            # the bytes that were digested run as a module that dataclasses and tracebacks find
            module = ModuleType(f"atlas_fl_plugin_{source.digest}")
            module.__file__ = source.name
            with ExitStack() as undo:
                sys.modules[module.__name__] = module
                undo.callback(sys.modules.pop, module.__name__)
                exec(compile(source.code, source.name, "exec"), vars(module))
                undo.pop_all()
        entries = tuple(_STATE.loading)
    except AtlasError as error:
        raise ConfigError(f"the plug-in {source.name} cannot be used: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"the plug-in {source.name} cannot be imported ({_reason(error, source)}); mend it, or leave it out"
        ) from error
    finally:
        _STATE.loading = None
    if not entries:
        raise ConfigError(
            f"the plug-in {source.name} registers nothing; give it a line such as @register('partition', 'my_own') from"
            " atlas_fl.plugins, or leave it out"
        )
    return entries


def _reason(error: BaseException, source: Source) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == source.name]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    message = replace_unprintable(" ".join(f"{type(error).__name__}: {error}".split()))[:200]
    return message if line is None else f"line {line}: {message}"


def _activate(source: Source, entries: tuple[Entry, ...]) -> None:
    added = _STATE.active.setdefault(source.pinned, [])
    for entry in entries:
        tables = [_table(place) for place in KINDS[entry.kind]]
        if any(entry.name in table for table in tables):
            _deactivate()
            raise ConfigError(
                f"the plug-in {source.name} registers the {entry.kind} {entry.name!r}, a name that is taken; give it"
                " another"
            )
        tables[0][entry.name] = entry.value
        added.append(entry)


def _deactivate() -> None:
    for entries in _STATE.active.values():
        for entry in entries:
            del _table(KINDS[entry.kind][0])[entry.name]
    _STATE.active.clear()


def _table(place: str) -> dict[str, Any]:
    module, _, name = place.rpartition(".")
    table: dict[str, Any] = getattr(import_module(f"atlas_fl.{module}"), name)
    return table
