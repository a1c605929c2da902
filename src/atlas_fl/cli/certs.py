"""`atlas certs`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import tyro

from atlas_fl.cli.live import show
from atlas_fl.cli.parse import parse
from atlas_fl.cli.words import Words, split
from atlas_fl.errors import ConfigError

DAYS, TO = 365, "certs"


@dataclass(frozen=True, kw_only=True)
class CertsOptions:
    """The certificates of a federation across machines. `make DIR` makes an authority, a server and a folder for each
    site, or adds sites where --server is left out; `renew NAME` replaces a site's certificate and `revoke NAME` takes
    it off the list, while the server runs too. A site that makes its own key says `request NAME`, and `sign REQUEST`
    answers it where the authority lies. Nothing is overwritten."""

    what: Annotated[
        Literal["make", "renew", "revoke", "request", "sign"], tyro.conf.Positional, tyro.conf.arg(metavar="ACTION")
    ]
    """What is done."""
    subject: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR|NAME|REQUEST")]
    """Of make, where the folders are made: ca (keep it safe), server, and one named after each client. Of renew, revoke
    and request, names of sites. Of sign, the file request.pem that a site has made."""
    to: str | None = None
    """Of renew, revoke and sign, the folder that make has made; certs by default. Of request, where the key is made and
    stays; the site's name by default."""
    server: tuple[str, ...] = ()
    """Of make, host names and addresses under which sites reach the server; may be repeated."""
    client: tuple[str, ...] = ()
    """Of make, names of the sites; may be repeated."""
    days: int = DAYS
    """Days that the certificates hold, and not longer than their authority."""


Lines: TypeAlias = list[str]


def certs(words: Sequence[str]) -> int:
    """Carry out what these words say; 0."""
    default = CertsOptions(what=tyro.MISSING, subject=tyro.MISSING)
    groups = split(words)
    options = parse(default, groups, command="atlas certs")
    _check(options, groups)
    show(_ACTIONS[options.what](options))
    return 0


def _check(options: CertsOptions, groups: Sequence[Words]) -> None:
    """Raise `ConfigError` for a flag that this action does not take, and for too many or too few subjects."""
    flags, noun, most = _TAKES[options.what]
    for group in groups:
        if group.flag and group.flag not in flags:
            raise ConfigError(
                f"{group.flag} is not for `atlas certs {options.what}`, which takes {' and '.join(flags) or 'no flag'}"
            )
    if not options.subject or len(options.subject) > most:
        raise ConfigError(
            f"`atlas certs {options.what}` was given {len(options.subject)} words; it takes {noun}: see"
            " `atlas certs --help`"
        )


def _make(options: CertsOptions) -> Lines:
    from atlas_fl.io.certs import AUTHORITY, SERVER, make_certs

    made = make_certs(Path(options.subject[0]), servers=options.server, clients=options.client, days=options.days)
    sites = [folder for folder in made if folder.name not in (AUTHORITY, SERVER)]
    return [
        *(f"made {folder}" for folder in made),
        *_dates(sites),
        "copy each site's folder to its site and to nobody else; the folder ca stays with you",
    ]


def _renew(options: CertsOptions) -> Lines:
    from atlas_fl.io.certs import KEY, renew_certs

    made = renew_certs(Path(options.to or TO), clients=options.subject, days=options.days)
    ends = ", which has a new key" if any((folder / KEY).exists() for folder in made) else ""
    return [
        *(f"made {folder} anew; the certificate before it is worth nothing now" for folder in made),
        *_dates(made),
        f"copy each site's folder to its site{ends}, and start `atlas join` there again",
    ]


def _revoke(options: CertsOptions) -> Lines:
    from atlas_fl.io.certs import revoke_certs

    moved = revoke_certs(Path(options.to or TO), clients=options.subject)
    return [
        f"{', '.join(options.subject)} may not join any more; a server that runs ends their sessions now",
        *(f"the folder is {folder} now" for folder in moved),
    ]


def _request(options: CertsOptions) -> Lines:
    from atlas_fl.io.certs import CA, CERT, KEY, request_cert

    (name,) = options.subject
    made = request_cert(Path(options.to or name), name=name)
    return [
        f"made {made}; its key is {made.with_name(KEY)} and stays here",
        f"send the request to who runs the server, for `atlas certs sign`, and put the {CA} and {CERT} that come back"
        f" into {made.parent}",
    ]


def _sign(options: CertsOptions) -> Lines:
    from atlas_fl.io.certs import sign_request

    made = sign_request(Path(options.subject[0]), folder=Path(options.to or TO), days=options.days)
    return [
        f"made {made} for client {made.name}, who may join now",
        *_dates([made]),
        "send both files back; neither is secret",
    ]


def _dates(made: Sequence[Path]) -> Lines:
    from atlas_fl.io.certs import holds_until

    until = sorted({f"{holds_until(folder):%Y-%m-%d}" for folder in made})
    return [f"good until {', '.join(until)}"] if until else []


_ACTIONS: Mapping[str, Callable[[CertsOptions], Lines]] = {
    "make": _make,
    "renew": _renew,
    "revoke": _revoke,
    "request": _request,
    "sign": _sign,
}
_TAKES: Mapping[str, tuple[tuple[str, ...], str, int]] = {
    "make": (("--server", "--client", "--days"), "one DIR", 1),
    "renew": (("--to", "--days"), "names of sites", 1000),
    "revoke": (("--to",), "names of sites", 1000),
    "request": (("--to",), "one NAME", 1),
    "sign": (("--to", "--days"), "one REQUEST", 1),
}
"""By action its flags, what it is about, and how many of these at most."""
