"""`atlas fetch`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from atlas_fl.cli.live import show
from atlas_fl.cli.parse import parse
from atlas_fl.cli.words import split


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """Get what the default run needs, the model all-MiniLM-L6-v2 and the labelled texts, or what the vision presets
    need, a DINOv2 ViT-S/14 and Fashion-MNIST, into a cache of the user's; checked by SHA-256, and nothing is fetched
    twice. ATLAS_CACHE names another folder."""

    what: Annotated[Literal["embedded", "vision"], tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")] = "embedded"
    """What is fetched."""


def fetch(words: Sequence[str]) -> int:
    """Fetch what these words name; 0."""
    options = parse(FetchOptions(), split(words), command="atlas fetch")

    from atlas_fl.io.fetch import embedded_dir, fetch_embedded, fetch_vision

    fill = {"embedded": fetch_embedded, "vision": fetch_vision}[options.what]
    fill(embedded_dir(), report=lambda line: show([line]))
    return 0
