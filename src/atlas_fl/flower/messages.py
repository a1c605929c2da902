"""Messages between Flower's ServerApp and ClientApp, and `--node-config`; the only importer of Flower, an extra."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from atlas_fl.config.settings import check_kind, declared_settings
from atlas_fl.deployment.consent import SiteChoices, check_consent
from atlas_fl.errors import ConfigError, ProtocolError, unknown_name
from atlas_fl.runtime.transport.certificates import CA, CERT, KEY, check_name
from atlas_fl.storage.extras import install_command
from atlas_fl.storage.folder_access import write_atomic

try:
    from flwr import app as app
    from flwr import clientapp as clientapp
    from flwr import serverapp as serverapp
    from flwr.common.config import get_project_dir as get_project_dir
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("flwr"):
        raise
    raise ConfigError(f"Flower is not installed here; it is an extra: {install_command('flower')}") from None


RECORD = "atlas"
"""Name of the one record in every message."""
INVITATION = ("address", "token", CA, CERT, KEY)
"""Keys of the long message: the address of the stream, a token for one session, and this node's certificate."""
SAMPLE = 'name="site-1" task="mine=reviews.csv" device="laptop_8gb"'


class Node(SiteChoices):
    """Choices of a node: keys of `--node-config` with `_` for `-`; `allow` is there one text with spaces between."""

    name: str
    """Name of the client in the federation; the node's number where the config gives none."""
    config: str | None = None
    """A TOML or YAML file of settings here; this node works for no run with others, as `--config` of `atlas join`."""
    patience: float = 60.0
    """Seconds to try a server again that has gone."""


def node_of(config: Mapping[str, Any], *, node_id: int) -> Node:
    """The node that its `--node-config` describes; raises `ConfigError` where it does not."""
    hints = get_type_hints(Node)
    values: dict[str, Any] = {"name": str(node_id)}
    for key, value in config.items():
        name = key.replace("-", "_")
        if name not in hints:
            raise unknown_name("key in --node-config:", key, [known.replace("_", "-") for known in hints])
        is_list = get_origin(hints[name]) is tuple and isinstance(value, str)
        values[name] = tuple(value.split()) if is_list else value
    for key in ("task", "device"):
        if key not in values:
            raise ConfigError(f"--node-config of node {node_id} has no {key}; start its SuperNode as with '{SAMPLE}'")
    node = Node(**values)
    for choice in declared_settings(Node, group=""):
        check_kind(choice, getattr(node, choice.name))
    check_name(node.name)
    check_consent(node)
    return node


def write_certs(invitation: Mapping[str, Any], folder: Path) -> None:
    """Put the certificates of an invitation where `open_certs` finds them; the folder must be this user's alone.

    Raises `ProtocolError` for a record that is no invitation.
    """
    if missing := [key for key in INVITATION if key not in invitation]:
        raise ProtocolError(f"the server's message has no {missing[0]}; install the same atlas-fl on both ends")
    for name in (CA, CERT, KEY):
        write_atomic(folder / name, bytes(invitation[name]), mode=0o600)
