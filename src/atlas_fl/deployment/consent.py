"""Consent of a site (the flags `--allow`, `--least-examples`, `--most-sketch`): what the person there lets out of it.

Settings are checked against it once, when a site connects (`deployment.settings_policy`), and every job against the
settings (`deployment.job_policy`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from atlas_fl.errors import ConfigError, short_repr

Allowance: TypeAlias = Literal["cut", "labels", "hosting", "hub-model"]
"""What `--allow` takes."""

ALLOWANCES: Mapping[Allowance, str] = {
    "cut": "activations of its texts go to the server, which can read nearly all of the text in them",
    "labels": "the label of every example goes to the server, where the head is",
    "hosting": "sites compute for each other, so what crosses a cut goes to other sites too",
    "hub-model": "a model of the hub that the server names is fetched and loaded",
}
"""What each word lets happen."""


@dataclass(frozen=True, kw_only=True)
class Consent:
    """What a site agrees to beside adapters, heads, sketches and counts."""

    allow: tuple[Allowance, ...] = ()
    """Words of `ALLOWANCES`."""
    least_examples: int = 16
    """Fewest training examples behind an update, a fingerprint or what a rule asks for beside updates."""
    most_sketch: int = 4096
    """Most numbers of a sketch."""


def check_consent(consent: Consent) -> None:
    """Nothing where this can be agreed to; raises `ConfigError` where it cannot."""
    if wrong := [word for word in consent.allow if word not in ALLOWANCES]:
        raise ConfigError(f"--allow has {short_repr(wrong[0])}; allowed: {', '.join(get_args(Allowance))}")
    if consent.least_examples < 1:
        raise ConfigError(f"--least-examples is {consent.least_examples}; allowed: at least 1")
    if consent.most_sketch < 2:
        raise ConfigError(f"--most-sketch is {consent.most_sketch}; allowed: at least 2")
