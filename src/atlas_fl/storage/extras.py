"""Optional extras: the command that installs what one of them needs, by the metadata of the installed ATLAS.

It names the packages themselves, and so works wherever ATLAS came from: a clone, a wheel or an index.
"""

from collections.abc import Sequence
from importlib import metadata

from packaging.requirements import Requirement

PROJECT = "atlas-fl"


def extra_requirements(extra: str) -> tuple[Requirement, ...]:
    """What this extra, or for "" ATLAS itself, needs on this machine; nothing where ATLAS is not installed."""
    try:
        texts: Sequence[str] = metadata.requires(PROJECT) or ()
    except metadata.PackageNotFoundError:
        return ()
    return tuple(needed for needed in map(Requirement, texts) if _is_of(needed, extra))


def install_command(extra: str) -> str:
    """The command that installs what this extra needs, such as `pip install 'optuna>=4.4'`.

    Where ATLAS runs from its sources without being installed, it installs both, from the folder of the sources.
    """
    packages = [f"'{needed.name}{needed.specifier}'" for needed in extra_requirements(extra)]
    return f"pip install {' '.join(packages)}" if packages else f"pip install '.[{extra}]'"


def _is_of(needed: Requirement, extra: str) -> bool:
    if needed.marker is None:
        return not extra
    return needed.marker.evaluate({"extra": extra}) and not (extra and needed.marker.evaluate({"extra": ""}))
