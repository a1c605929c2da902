"""The ServerApp: asks who is there, starts the stream, and sends every node one message that lasts until the end."""

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atlas_fl.cli.live import show, show_progress
from atlas_fl.errors import AtlasError, ConfigError
from atlas_fl.events import OnEvent
from atlas_fl.flower.api import Context, Grid, ServerApp, get_project_dir
from atlas_fl.flower.post import RUN_DAYS, Invitations, Question


@dataclass(frozen=True, kw_only=True)
class Order:
    """What `flwr run --run-config` says."""

    config: Path
    address: str
    """`host:port` under which the nodes reach the stream."""
    host: str
    """What the stream listens on."""
    nodes: int
    """How many SuperNodes are waited for; 0 for those that are connected."""
    min_clients: int
    wait_seconds: float
    deadline_seconds: float


def order_of(values: Mapping[str, Any], *, app_dir: Path) -> Order:
    """The order that this run config gives; its config file may lie in the app's folder."""
    try:
        return Order(
            config=app_dir / str(values["config"]),
            address=str(values["address"]),
            host=str(values["host"]),
            nodes=int(values["nodes"]),
            min_clients=int(values["min-clients"]),
            wait_seconds=float(values["wait"]),
            deadline_seconds=float(values["deadline"]),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"the run config cannot be read ({error!r}); begin with the one of examples/flower/pyproject.toml"
        ) from None


def natural(name: str) -> list[tuple[bool, int, str]]:
    """Sorts movie-2 before movie-10."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def begin(grid: Grid, context: Context) -> None:
    """Carry out the run of this context and leave its folder, as `atlas serve` does."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as in `atlas serve`
    run = grid.run
    try:
        order = order_of(context.run_config, app_dir=get_project_dir(run.fab_id, run.fab_version, run.fab_hash))
        with show_progress() as on_event:
            federate(grid, order, on_event=on_event)
    except AtlasError as error:
        show([f"atlas: {error}"])
        raise type(error)(str(error)) from None  # Flower logs where it comes from; that is no news


def federate(grid: Grid, order: Order, *, on_event: OnEvent) -> None:
    """Serve this order to the nodes of this grid."""
    from atlas_fl.config import load_config, validate
    from atlas_fl.engines.stream.probe import split_address

    config = validate(load_config(order.config), at_sites=True)
    host, port = split_address(order.address)
    question = Question(grid, count=order.nodes, seconds=order.wait_seconds)
    # The nodes take seconds to answer, and these to be imported.
    from atlas_fl.cli.tables import outcome
    from atlas_fl.deployed.handing import hand_out
    from atlas_fl.deployed.listening import Service
    from atlas_fl.deployed.serving import across_machines
    from atlas_fl.engines.stream.tokens import Tokens
    from atlas_fl.io.certs import make_certs
    from atlas_fl.run import run

    nodes = question.nodes()
    names = sorted(nodes, key=natural)
    with tempfile.TemporaryDirectory(prefix="atlas-") as folder:
        certs, tokens = Path(folder) / "certs", Tokens()
        make_certs(certs, servers=[host], clients=names, days=RUN_DAYS)
        invitations = Invitations(grid=grid, nodes=nodes, certs=certs, tokens=tokens, address=order.address)
        service = Service(
            certs=certs / "server",
            host=order.host,
            port=port,
            min_clients=order.min_clients,
            wait_seconds=order.wait_seconds,
            deadline_seconds=order.deadline_seconds,
            tokens=tokens,
            beside=invitations.beside,
        )
        hand_out(config, service, on_event)
        result = run(config, on_event=on_event, resume=True, workplace=across_machines(service))
    show(outcome(result.folder, result.summary, complete=result.complete))


app = ServerApp()
app.main()(begin)
