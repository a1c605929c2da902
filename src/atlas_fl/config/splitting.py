"""The settings of phase 3: whose model is cut, where, and how what crosses is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from atlas_fl.config.kinds import mistake, whole_number

NONE, AUTO = "none", "auto"
EVERY = "*"
"""Stands for everyone who is not named."""


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """Phase 3: models cut in two, the lower part on the client and the upper one on the server."""

    split: str = NONE
    """Blocks that stay on the client: `none` (the whole model), a number, or `auto` (a cut where the device cannot hold
    the model); or one of these for each client, task or device that is named, `cpu_2gb=2,movie=auto,trec-0=1`, and none
    for the others. The client's name goes before its task's, and that before its device's."""
    split_objective: Literal["score", "time"] = "score"
    """What `auto` chooses by, among the cuts that fit: memory, communication, importance and balance weighed together,
    or the smallest predicted round time."""
    wire: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of activations and gradients on the way; int8 has a scale a token."""
    wire_noise: float = 0.0
    """Gaussian noise on what leaves a cut client, in root mean squares of each token."""
    head: Literal["client", "server"] = "server"
    """Where the head of a cut model is; at the client the labels stay there too."""
    server_adapters: Literal["per_client", "per_cluster"] = "per_client"
    """Whose the adapters above a cut are: each client's own, or one set for all cut clients of a cluster, which the
    mean of their gradients moves."""
    topology: Literal["server", "paired"] = "server"
    """Who computes the upper parts of cut models: the server, or clients that hold the whole model and have room, the
    server for the rest. It changes no model, but what goes where and how long it takes."""
    leakage: bool = False
    """Measure what the cuts give away of the clients' texts, for the plan (`atlas leakage` does so without a run)."""


def cuts_by_name(text: str) -> Mapping[str, str]:
    """What `--split` says: `none`, `auto` or a number by the name of a client, task or device, or by `EVERY`.

    >>> dict(cuts_by_name("cpu_2gb=2,movie=auto"))
    {'*': 'none', 'cpu_2gb': '2', 'movie': 'auto'}

    Raises:
        ConfigError: a word is none of these, or a name stands there twice.
    """
    if "=" not in text:
        return {EVERY: _checked(text, text)}
    found = {EVERY: NONE}
    for part in text.split(","):
        name, sign, word = (piece.strip() for piece in part.partition("="))
        if not sign or not name or name in found:
            raise mistake("--split", text, "none, auto, a number, or name=word with commas between and each name once")
        found[name] = _checked(word, text)
    return found


def cut_word(text: str, *, client: str, task: str, device: str) -> str:
    """What `--split` says for this client: by its own name, else its task's, else its device's.

    >>> cut_word("cpu_2gb=2,movie=auto", client="movie-0", task="movie", device="cpu_2gb")
    'auto'
    """
    words = cuts_by_name(text)
    return next(words[name] for name in (client, task, device, EVERY) if name in words)


def _checked(word: str, text: str) -> str:
    if word not in (NONE, AUTO) and not (whole_number(word) or 0) >= 1:
        raise mistake("--split", text, "none, auto or a number of blocks from 1, or name=word with commas between")
    return word
