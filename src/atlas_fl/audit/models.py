"""The models that a run kept for its audit, read with no help from the code that wrote them."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from atlas_fl.errors import CheckpointError

Models = dict[str, dict[str, Tensor]]
"""Tensors by client and parameter name."""


def models_in(path: Path) -> Models:
    """The models in this file, by client; raises CheckpointError if it is missing or damaged."""
    models: Models = {}
    for key, tensor in read_audited(path).items():
        client, _, parameter = key.partition("/")
        models.setdefault(client, {})[parameter] = tensor
    return models


def read_audited(path: Path | str) -> dict[str, Tensor]:
    """The tensors in a file of the audit by `<client>/<parameter>`; what several clients hold is one tensor.

    Raises CheckpointError if the file is missing or damaged.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        with safe_open(path, "pt") as file:
            flat: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            note = (file.metadata() or {}).get("same")
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:  # torch refuses what a header may say
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return flat if note is None else _for_all(flat, note, path)


def _for_all(kept: Mapping[str, Tensor], note: str, path: Path | str) -> dict[str, Tensor]:
    """Every tensor under the names of all its holders: whole models stand in a file once, and its metadata name them.

    Raises CheckpointError where they name a tensor that is not there, or two for one name.
    """
    flat = dict(kept)
    try:
        same = [(lead, client) for lead, clients in json.loads(note).items() for client in clients]
        for lead, client in same:
            name = f"{client}/{lead.partition('/')[2]}"
            if name in flat:
                raise CheckpointError(f"{path} is damaged: it holds {name} twice")
            flat[name] = kept[lead]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: its metadata say not who holds what ({error!r})") from error
    return {name: flat[name] for name in sorted(flat)}
