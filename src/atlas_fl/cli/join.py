"""`atlas join`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from atlas_fl.cli.live import going_on, show, show_progress
from atlas_fl.cli.parse import parse
from atlas_fl.cli.settings import base_config
from atlas_fl.cli.words import split
from atlas_fl.config import Config, config_hash, mask_source, pinned
from atlas_fl.deployed.consent import Allowance, Consent
from atlas_fl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Take part in a federation with the data of this machine. The data stays here; counts, label statistics, sketches
    and adapters travel. Ends when the server's run is complete; a connection that is lost is made again."""

    address: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="HOST:PORT")]
    """Where `atlas serve` runs."""
    certs: str
    """This site's folder of `atlas certs make`."""
    task: str
    """The data: your own as `name=path`, with text=, pair= and label= as needed, or a task's name."""
    device: str
    """This machine's profile: a name (`atlas list devices`) or your own description."""
    part: int | None = None
    """Which of the --clients-per-task parts of the task is here, from 0, dealt as in a simulation; all of it by
    default."""
    model: str | None = None
    """Where the model lies here, if the server's name for it leads nowhere on this machine."""
    data_dir: str | None = None
    """A directory that holds data sets which would else come from the hub or its cache."""
    config: str | None = None
    """A TOML or YAML file of settings; this site works for no server with others."""
    patience: float = 600.0
    """Seconds to try a server again that has gone."""
    allow: tuple[Allowance, ...] = ()
    """What you agree to beyond adapters, head, sketches and counts: `cut` (the model may be cut, and activations tell
    the server nearly all of the text), `labels` (they go to the server, where the head of a cut model is), `hosting`
    (sites compute for each other) and `hub-model` (a model of the hub that the server names is loaded)."""
    least_examples: int = Consent.least_examples
    """Fewest training examples behind an update or a fingerprint; settings that take fewer are refused."""
    most_sketch: int = Consent.most_sketch
    """Most numbers of a sketch of this data; settings with longer ones are refused."""
    private: str | None = None
    """Where what the settings' --share leaves out is kept until the run is complete; NAME-private by default. A site
    that is started again needs it."""
    to: str | None = None
    """Where this client's own model is written at the end, in PEFT's format; NAME-adapter by default."""


def join(words: Sequence[str]) -> int:
    """Take part as these words say; 0."""
    groups = split(words)
    default = JoinOptions(address=tyro.MISSING, certs=tyro.MISSING, task=tyro.MISSING, device=tyro.MISSING)
    options = parse(default, groups, command="atlas join")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as in `atlas serve`

    from atlas_fl.deployed.joining import Joining
    from atlas_fl.deployed.joining import join as join_federation
    from atlas_fl.io.certs import open_certs
    from atlas_fl.report.words import human_bytes

    certs = Path(options.certs)
    joining = Joining(
        address=options.address,
        certs=certs,
        task=options.task,
        device=options.device,
        part=options.part,
        model=options.model,
        data_dir=options.data_dir,
        config=None if options.config is None else _hash_of(base_config(groups), origin=options.config),
        patience_seconds=options.patience,
        allow=options.allow,
        least_examples=options.least_examples,
        most_sketch=options.most_sketch,
        private=None if options.private is None else Path(options.private),
        to=Path(options.to or f"{open_certs(certs).name}-adapter"),
    )
    with show_progress() as on_event, going_on("the same command"):
        joined = join_federation(joining, on_event=on_event)
    where = "no model: it was not in the plan" if joined.adapter is None else f"its model is in {joined.adapter}"
    up, down = human_bytes(joined.sent_bytes), human_bytes(joined.received_bytes)
    show([f"the run is complete for {joined.name}; {where}; {up} up, {down} down"])
    return 0


def _hash_of(config: Config, *, origin: str) -> str:
    """The hash that the server has of the same settings: with the digest of what lies in their mask file.

    Raises:
        ConfigError: the mask is not here, and the settings do not say its digest.
    """
    path, digest = mask_source(config.sparse.mask_file)
    if path is not None and digest is None and not Path(path).exists():
        raise ConfigError(
            f"{origin} names the mask {path}, which is not here to be compared with the server's; copy it here, give"
            " the config.toml of the server's run, which has the mask's digest, or leave --config out"
        )
    return config_hash(pinned(config))
