"""Optional extras: the command that installs what one of them needs, by the metadata of the installed ATLAS.

It names the packages themselves, and so works wherever ATLAS came from: a clone, a wheel or an index.
"""

import logging
import os
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import Any

from packaging.requirements import Requirement

from atlas_fl.errors import ConfigError

PROJECT = "atlas-fl"


def extra_requirements(extra: str) -> dict[str, str]:
    """By package what this extra, or for "" ATLAS itself, needs on this machine, such as `dp-accounting>=0.6`.

    Empty where ATLAS is not installed.
    """
    try:
        texts: Sequence[str] = metadata.requires(PROJECT) or ()
    except metadata.PackageNotFoundError:
        return {}
    requirements = [needed for needed in map(Requirement, texts) if _is_of(needed, extra)]
    return {needed.name: f"{needed.name}{needed.specifier}" for needed in requirements}


def accepts(requirement: str, version: str) -> bool:
    """Return whether this version of a package will do."""
    return Requirement(requirement).specifier.contains(version, prereleases=True)


def install_command(extra: str) -> str:
    """The command that installs what this extra needs, such as `pip install 'dp-accounting>=0.6'`.

    Where ATLAS runs from its sources without being installed, it installs both, from the folder of the sources.
    """
    packages = [f"'{requirement}'" for requirement in extra_requirements(extra).values()]
    return f"pip install {' '.join(packages)}" if packages else f"pip install '.[{extra}]'"


def import_extra(module: str, *, extra: str, asked: str, remedy: str = "") -> Any:
    """The module of a library that an extra brings; raises `ConfigError` where it is not installed.

    `asked` says what needs it.
    """
    try:
        return import_module(module)
    except ImportError:
        library = module.partition(".")[0]
        raise ConfigError(f"{asked} {library}, which is not installed; {install_command(extra)}{remedy}") from None


def silence_libraries() -> None:
    """Keep warnings of libraries from the terminal that they log when they are imported.

    transformers imports torchao wherever it is installed, and that warns of each of its parts for other machines. gRPC
    tells of every refused certificate, where a line of ours stands already.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _is_of(needed: Requirement, extra: str) -> bool:
    if needed.marker is None:
        return not extra
    return needed.marker.evaluate({"extra": extra}) and not (extra and needed.marker.evaluate({"extra": ""}))
