"""What a server and its clients must have in common, compared before anything is computed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atlas_fl.errors import ProtocolError

REMEDIES: Mapping[str, str] = {
    "version": "install the same atlas-fl on both ends",
    "config": "join with the settings of this server, or leave --config out",
    "model": "give the server's model with --model",
}


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What both ends must have in common."""

    version: str
    """Of this package."""
    config: str
    """Hash of the config."""
    model: str
    """Digest of the backbone's weights."""

    def check(self, name: str, said: Mapping[str, Any]) -> None:
        """Nothing where what this client says is the same, or is left open; raises `ProtocolError` where it is not."""
        for key, own in vars(self).items():
            if said.get(key) not in (None, own):
                raise ProtocolError(
                    f"client {name!r} has {key} {said[key]!s:.16}, the server {own:.16}; {REMEDIES[key]}"
                )
