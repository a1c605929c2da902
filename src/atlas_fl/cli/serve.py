"""`atlas serve`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from atlas_fl.cli.live import going_on, show, show_progress
from atlas_fl.cli.parse import parse
from atlas_fl.cli.settings import base_config
from atlas_fl.cli.words import split
from atlas_fl.config import Config, validate


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
    """Of a complete run, clients that get their model once more: they had it, and its files are lost."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def serve(words: Sequence[str]) -> int:
    """Serve what these words say; 0."""
    groups = split(words)
    options = parse(ServeOptions(settings=base_config(groups)), groups, command="atlas serve")
    config = validate(options.settings, at_sites=True)
    # gRPC writes its own view of every refused certificate to the terminal, where ours stands already.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

    from pathlib import Path

    from atlas_fl.cli.tables import outcome
    from atlas_fl.deployed.handing import give_again, hand_out
    from atlas_fl.deployed.listening import Service
    from atlas_fl.deployed.serving import across_machines
    from atlas_fl.run import run as run_config

    service = Service(
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
        if options.again:
            give_again(config, options.again)
        hand_out(config, service, on_event)
        result = run_config(config, on_event=on_event, resume=True, workplace=across_machines(service))
    show(outcome(result.folder, result.summary, complete=result.complete))
    return 0
