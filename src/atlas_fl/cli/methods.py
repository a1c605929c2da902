"""`atlas check-method`: the laws of methods, on the methods of a plug-in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from atlas_fl.cli.arguments import parse, split
from atlas_fl.cli.display import show
from atlas_fl.config.settings import Positional
from atlas_fl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CheckMethodOptions:
    """Check that the methods of a plug-in obey the laws of methods: rows that sum to one, no order of clients, absent
    clients, a restart and others; exits with 1 where one does not."""

    plugin: Annotated[str, Positional("FILE_OR_MODULE")]
    """The plug-in, as --plugin takes it."""


def check_methods(words: Sequence[str]) -> int:
    """Check every method of this plug-in; 0 where all laws hold, 1 where one does not."""
    options = parse(CheckMethodOptions, split(words), command="atlas check-method")

    from atlas_fl.methods.laws import LAWS, check_method
    from atlas_fl.plugins import load_plugins, registrations

    (pinned,) = load_plugins((options.plugin,))
    methods = registrations(pinned, "method")
    if not methods:
        raise ConfigError(f"{options.plugin} registers no method; give it @register('method') from atlas_fl.plugins")
    lines, failed = [], False
    for name, method in methods.items():
        faults = check_method(method)
        failed = failed or bool(faults)
        lines += [f"{name}: {fault}" for fault in faults] or [f"{name}: all {len(LAWS)} laws hold ({', '.join(LAWS)})"]
    show(lines)
    return int(failed)
