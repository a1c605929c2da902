"""`atlas serve`, `join` and `certs`: a federation across machines."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from atlas_fl.cli.arguments import base_config, parse, split
from atlas_fl.cli.display import going_on, show, show_progress
from atlas_fl.config import Config, pinned_hash, validate
from atlas_fl.config.settings import Positional
from atlas_fl.deployment.consent import SiteChoices
from atlas_fl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Train a federation whose clients join from other machines, each with its own certificate and data. The same
    command goes on where it was. Tasks, clients and devices are those of the sites, not those of the settings."""

    config: str | None = None
    """A TOML or YAML file of settings, such as the config.toml of a run."""
    certs: str = "certs/server"
    """The folder `server` of `atlas certs make`; its clients.txt lists who may join."""
    host: str = "0.0.0.0"
    """Address of this machine to listen on; 0.0.0.0 for all."""
    port: int = 8470
    """Port to listen on; 0 for a free one."""
    min_clients: int = 0
    """Fewest clients that the plan and every round need; 0 for all that are listed."""
    wait: float = 600.0
    """Seconds to wait for all of them before the run begins with fewer, or ends; of a complete run, for those who have
    not got their model."""
    deadline: float = 600.0
    """Seconds that a client has for a job; who lets it pass misses the round."""
    without: tuple[str, ...] = ()
    """Clients of the plan without which the run goes on, such as who was taken off the list; may be repeated. Start it
    without this once they are back."""
    late: bool = True
    """Let listed clients join that come after the plan was made; they take part from the next round on."""
    again: tuple[str, ...] = ()
    """Clients of a complete run that get their model once more: they had it, and its files are lost."""
    settings: Config = field(default_factory=Config)


def serve(words: Sequence[str]) -> int:
    """Serve the run that these words describe; 0."""
    groups = split(words)
    options = parse(ServeOptions, groups, command="atlas serve")
    config = validate(options.settings, at_sites=True)
    # gRPC writes its own view of every refused certificate to the terminal, where ours stands already.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    from atlas_fl.cli.tables import outcome
    from atlas_fl.deployment.server import remote_backend, serve_final_models
    from atlas_fl.deployment.service import ServerOptions
    from atlas_fl.experiment.run import run_config

    service = ServerOptions(
        certs=Path(options.certs),
        host=options.host,
        port=options.port,
        min_clients=options.min_clients,
        wait_seconds=options.wait,
        deadline_seconds=options.deadline,
        late=options.late,
        without=options.without,
    )
    with show_progress() as on_event, going_on("the same command"):
        serve_final_models(config, service, on_event, again=options.again)
        result = run_config(config, on_event=on_event, resume=True, backend=remote_backend(service))
    show(outcome(result.folder, result.summary, complete=result.complete))
    return 0


@dataclass(frozen=True, kw_only=True)
class JoinOptions(SiteChoices):
    """Take part in a federation with the data of this machine. The data stays here; counts, label statistics, sketches
    and adapters travel. Ends when the server's run is complete; a connection that is lost is made again."""

    address: Annotated[str, Positional("HOST:PORT")]
    """Where `atlas serve` runs."""
    certs: str
    """This site's folder of `atlas certs make`."""
    config: str | None = None
    """A TOML or YAML file of settings; this site works for no server with others."""


def join(words: Sequence[str]) -> int:
    """Take part as these words say; 0."""
    groups = split(words)
    options = parse(JoinOptions, groups, command="atlas join")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as in `atlas serve`

    from atlas_fl.deployment.site import SiteOptions, join_federation
    from atlas_fl.report.format import human_bytes

    pinned = None if options.config is None else pinned_hash(base_config(groups), origin=options.config)
    joining = SiteOptions(**options.choices(), address=options.address, certs=Path(options.certs), config=pinned)
    with show_progress() as on_event, going_on("the same command"):
        joined = join_federation(joining, on_event=on_event)
    where = "no model: it was not in the plan" if joined.adapter is None else f"its model is in {joined.adapter}"
    up, down = human_bytes(joined.sent_bytes), human_bytes(joined.received_bytes)
    show([f"the run is complete for {joined.name}; {where}; {up} up, {down} down"])
    return 0


@dataclass(frozen=True, kw_only=True)
class CertsOptions:
    """The certificates of a federation across machines. `make DIR` makes an authority, a server and a folder for each
    site, or adds sites where --server is left out; `renew NAME` replaces a site's certificate and `revoke NAME` takes
    it off the list, while the server runs too. A site that makes its own key says `request NAME`, and `sign REQUEST`
    answers it where the authority lies. Nothing is overwritten."""

    what: Annotated[Literal["make", "renew", "revoke", "request", "sign"], Positional("ACTION")]
    """Action to carry out."""
    subject: Annotated[tuple[str, ...], Positional("DIR|NAME|REQUEST")]
    """make: the folder in which ca (keep it safe), server, and one named after each client are made. renew, revoke and
    request: names of sites. sign: the file request.pem that a site has made."""
    to: str | None = None
    """renew, revoke and sign: the folder that make has made; certs by default. request: the folder in which the key is
    made and stays; the site's name by default."""
    server: tuple[str, ...] = ()
    """make: host names and addresses under which sites reach the server; may be repeated."""
    client: tuple[str, ...] = ()
    """make: names of the sites; may be repeated."""
    days: int = 365
    """Days that the certificates hold, and not longer than their authority."""


TAKES: Mapping[str, tuple[tuple[str, ...], str, int]] = {
    "make": (("--server", "--client", "--days"), "one DIR", 1),
    "renew": (("--to", "--days"), "names of sites", 1000),
    "revoke": (("--to",), "names of sites", 1000),
    "request": (("--to",), "one NAME", 1),
    "sign": (("--to", "--days"), "one REQUEST", 1),
}
"""By action its flags, its subjects, and how many of these at most."""


def certs(words: Sequence[str]) -> int:
    """Carry out the action that these words name; 0."""
    groups = split(words)
    options = parse(CertsOptions, groups, command="atlas certs")
    flags, noun, most = TAKES[options.what]
    for group in groups:
        if group.flag and group.flag not in flags:
            raise ConfigError(
                f"{group.flag} is not for `atlas certs {options.what}`, which takes {' and '.join(flags)}"
            )
    if not options.subject or len(options.subject) > most:
        raise ConfigError(
            f"`atlas certs {options.what}` was given {len(options.subject)} words; it takes {noun}: see"
            " `atlas certs --help`"
        )
    show(_certify(options))
    return 0


def _certify(options: CertsOptions) -> list[str]:
    """Carry out an action; what was made, how long it holds and what to do with it."""
    from atlas_fl.runtime.transport import certificates

    subject = options.subject[0]
    to = Path(options.to or "certs")
    if options.what == "revoke":
        moved = certificates.revoke_certs(to, clients=options.subject)
        return [
            f"{', '.join(options.subject)} may not join any more; a server that runs ends their sessions now",
            *(f"the folder is {folder} now" for folder in moved),
        ]
    if options.what == "request":
        made = certificates.request_cert(Path(options.to or subject), name=subject)
        return [
            f"made {made}; its key is {made.with_name(certificates.KEY)} and stays here",
            "send the request to who runs the server, for `atlas certs sign`, and put the"
            f" {certificates.CA} and {certificates.CERT} that come back into {made.parent}",
        ]
    folders: Sequence[Path]
    if options.what == "make":
        folders = certificates.make_certs(
            Path(subject), servers=options.server, clients=options.client, days=options.days
        )
        lines = [f"made {folder}" for folder in folders]
        remedy = "copy each site's folder to its site and to nobody else; the folder ca stays with you"
    elif options.what == "renew":
        folders = certificates.renew_certs(to, clients=options.subject, days=options.days)
        lines = [f"made {folder} anew; the certificate before it is worth nothing now" for folder in folders]
        remedy = (
            "copy each site's folder to its site, with the new key where one is in it, and start `atlas join` there"
        )
    else:
        folders = [certificates.sign_request(Path(subject), folder=to, days=options.days)]
        lines = [f"made {folders[0]} for client {folders[0].name}, who may join now"]
        remedy = "send both files back; neither is secret"
    sites = [folder for folder in folders if folder.name not in (certificates.AUTHORITY, certificates.SERVER)]
    until = sorted({f"{certificates.holds_until(folder):%Y-%m-%d}" for folder in sites})
    return [*lines, *([f"good until {', '.join(until)}"] if until else []), remedy]
