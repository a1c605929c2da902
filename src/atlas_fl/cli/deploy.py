"""`atlas serve`, `join` and `certs`: a federation across machines."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path

from atlas_fl.cli import options as cli
from atlas_fl.cli.arguments import Words, base_config
from atlas_fl.cli.display import going_on, show, show_progress
from atlas_fl.cli.tables import outcome
from atlas_fl.config import pinned_config, validate
from atlas_fl.deployment.consent import ServiceChoices, SiteChoices, choices_of
from atlas_fl.deployment.server import remote_backend, serve_final_models
from atlas_fl.deployment.service import ServerOptions
from atlas_fl.deployment.site import SiteOptions, join_federation
from atlas_fl.errors import ConfigError
from atlas_fl.events import Note
from atlas_fl.experiment.run import run_config
from atlas_fl.report.format import human_bytes
from atlas_fl.runtime.transport import certificates
from atlas_fl.storage.digests import file_sha256


def serve(options: cli.ServeOptions) -> int:
    """Serve the run that these words describe; 0."""
    config = validate(options.settings, at_sites=True)
    service = ServerOptions(**choices_of(ServiceChoices, options), certs=Path(options.certs))
    with show_progress() as on_event, going_on("the same command"), _sigterm_as_ctrl_c():
        if config.robust.max_share < 1:
            most = f"no site counts for more than {config.robust.max_share:.0%} of an average"
            on_event(Note(f"{most}, whatever number of examples it states (--max-share)"))
        serve_final_models(config, service, on_event, again=options.again)
        result = run_config(config, on_event=on_event, resume=True, backend=remote_backend(service))
    show(outcome(result.folder, result.summary, complete=result.complete))
    return 0


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does, so that sites are told."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def join(options: cli.JoinOptions) -> int:
    """Take part as these words say; 0."""
    # the settings that `atlas serve` has with this file
    words = [] if options.config is None else [Words("--config", (options.config,))]
    pinned = pinned_config(base_config(words, implied=cli.ServeOptions.implied)) if words else None
    joining = SiteOptions(
        **choices_of(SiteChoices, options), address=options.address, certs=Path(options.certs), config=pinned
    )
    with show_progress() as on_event, going_on("the same command"):
        joined = join_federation(joining, on_event=on_event)
    where = "no model: it was not in the plan" if joined.adapter is None else f"its model is in {joined.adapter}"
    up, down = human_bytes(joined.sent_bytes), human_bytes(joined.received_bytes)
    show([f"the run is complete for {joined.name}; {where}; {up} up, {down} down"])
    return 0


TAKES: Mapping[str, tuple[tuple[str, ...], str, int]] = {
    "make": (("--server", "--client", "--days"), "one DIR", 1),
    "renew": (("--to", "--days"), "names of sites", 1000),
    "revoke": (("--to",), "names of sites", 1000),
    "request": (("--to",), "one NAME", 1),
    "sign": (("--to", "--days"), "one REQUEST", 1),
}
"""By action its flags, its subjects, and how many of these at most."""


def certs(options: cli.CertsOptions) -> int:
    """Carry out the action that these words name; 0."""
    flags, noun, most = TAKES[options.what]
    for one in fields(options):
        if one.default not in (MISSING, getattr(options, one.name)) and f"--{one.name}" not in flags:
            raise ConfigError(
                f"--{one.name} is not for `atlas certs {options.what}`, which takes {' and '.join(flags)}"
            )
    if len(options.subject) > most:
        raise ConfigError(
            f"`atlas certs {options.what}` was given {len(options.subject)} words; it takes {noun}: see"
            " `atlas certs --help`"
        )
    show(_certify(options))
    return 0


def _certify(options: cli.CertsOptions) -> list[str]:
    """Carry out an action; what was made, how long it holds and what to do with it."""
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
            f"SHA-256 of the request: {file_sha256(made).hexdigest()}",
            "send the request to the holder of the folder ca, for `atlas certs sign`, and put the"
            f" {certificates.CA} and {certificates.CERT} that come back into {made.parent}",
        ]
    folders: Sequence[Path]
    if options.what == "make":
        folders = certificates.make_certs(
            Path(subject), servers=options.server, clients=options.client, days=options.days
        )
        lines = [f"made {folder}" for folder in folders]
        copies = "copy each site's folder to its site and to nobody else; " if options.client else ""
        remedy = f"{copies}the folder ca stays with you"
    elif options.what == "renew":
        folders = certificates.renew_certs(to, clients=options.subject, days=options.days)
        lines = [f"made {folder} anew; the certificate before it is worth nothing now" for folder in folders]
        remedy = (
            "copy each site's folder to its site, with the new key where one is in it, and start `atlas join` there"
        )
    else:
        folders = [certificates.sign_request(Path(subject), folder=to, days=options.days)]
        name, digest = folders[0].name, file_sha256(Path(subject)).hexdigest()
        lines = [f"made {folders[0]} for client {name}, who may join now", f"SHA-256 of the request: {digest}"]
        remedy = f"send both files back; if the site had another SHA-256, first `atlas certs revoke {name} --to {to}`"
    sites = [folder for folder in folders if folder.name not in (certificates.AUTHORITY, certificates.SERVER)]
    until = sorted({f"{certificates.holds_until(folder):%Y-%m-%d}" for folder in sites})
    return [*lines, *([f"good until {', '.join(until)}"] if until else []), remedy]
