"""What a server knows of its clients, kept in the run's folder, so that a run can go on without one of them.

The rules, the audit and the records need to know of every client of a plan which task it has, how many examples of
which lengths and labels, and on which device. Its site says so when it registers (`engines.messages.census`).
"""

from collections.abc import Sequence
from dataclasses import asdict

from atlas_fl.engines.hall.seats import Seat
from atlas_fl.engines.messages.census import Census, read_census
from atlas_fl.errors import CheckpointError, ConfigError, ProtocolError, unknown
from atlas_fl.io.folder import RunFolder
from atlas_fl.io.results import read_sealed, write_sealed
from atlas_fl.ranks.devices import Device


def write_sites(folder: RunFolder, seats: Sequence[Seat]) -> None:
    """Write what these clients have said of themselves beside what others had."""
    known = read_sealed(folder.sites) if folder.sites.exists() else {}
    told = {
        seat.name: {"census": asdict(seat.census), "device": asdict(seat.device)}
        for seat in seats
        if seat.census is not None and seat.device is not None
    }
    write_sealed(folder.sites, {**known, **told})


def read_sites(folder: RunFolder, names: Sequence[str]) -> dict[str, tuple[Census, Device]]:
    """What these clients had said of themselves.

    Raises:
        CheckpointError: it is not known, since an earlier version began the run, or the file is damaged.
    """
    if not folder.sites.exists():
        raise CheckpointError(
            f"run {folder.path} has no {folder.sites.name}, and cannot go on without {', '.join(names)}; an earlier"
            " version began it: let everybody come once, and then it has"
        )
    known = read_sealed(folder.sites)
    found = {}
    for name in names:
        try:
            found[name] = read_census(known[name]["census"]), Device(**known[name]["device"])
        except (KeyError, TypeError, ProtocolError):
            raise CheckpointError(
                f"{folder.sites} does not know client {name!r}; restore it, or bring {name}"
            ) from None
    return found


def check_without(without: Sequence[str], *, planned: Sequence[str], listed: Sequence[str]) -> None:
    """Nothing where somebody is left without these clients, and there are such; raises `ConfigError` else."""
    known = dict.fromkeys((*planned, *listed))
    for name in without:
        if name not in known:
            raise unknown("client in --without", name, known)
    if set(without) >= set(planned or listed):
        raise ConfigError("--without names every client, and somebody must be there; leave one out")
