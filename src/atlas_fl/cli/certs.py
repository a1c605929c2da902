"""`atlas certs`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from atlas_fl.cli.live import show
from atlas_fl.cli.parse import parse
from atlas_fl.cli.words import split


@dataclass(frozen=True, kw_only=True)
class CertsOptions:
    """Make the certificates of a federation across machines: an authority, a server, and a folder for each site.
    With the folder of an earlier call and without --server, sites are added. Nothing is overwritten."""

    what: Annotated[Literal["make"], tyro.conf.Positional, tyro.conf.arg(metavar="make")]
    """What is done with them."""
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Where the folders are made: ca (keep it safe), server, and one named after each client."""
    server: tuple[str, ...] = ()
    """Host names and addresses under which sites reach the server; may be repeated."""
    client: tuple[str, ...] = ()
    """Names of the sites; may be repeated."""
    days: int = 365
    """Days that the certificates hold."""


def certs(words: Sequence[str]) -> int:
    """Make the certificates that these words describe; 0."""
    default = CertsOptions(what=tyro.MISSING, folder=tyro.MISSING)
    options = parse(default, split(words), command="atlas certs")

    from pathlib import Path

    from atlas_fl.io.certs import make_certs

    made = make_certs(Path(options.folder), servers=options.server, clients=options.client, days=options.days)
    show(f"made {folder}" for folder in made)
    show(["copy each site's folder to its site and to nobody else; the folder ca stays with you"])
    return 0
