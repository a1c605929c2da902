"""Consent of a site (`--allow`, `--least-examples`, `--max-rounds-per-example`, `--most-sketch`): what it lets out.

Settings are checked against it once, when a site connects (`deployment.settings_policy`), and every job against the
settings (`deployment.job_policy`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from atlas_fl.errors import ConfigError, short_repr

Allowance: TypeAlias = Literal["cut", "labels", "hosting", "hub-model", "linear-steps", "partial-training"]
"""Words of `--allow`."""

ALLOWANCES: Mapping[Allowance, str] = {
    "cut": "activations of its texts go to the server, which can read nearly all of the text in them",
    "labels": "the label of every example goes to the server, where the head is",
    "hosting": "sites compute for each other, so what crosses a cut goes to other sites too",
    "hub-model": "a model of the hub that the server names is fetched and loaded",
    "linear-steps": "an update of SGD is a sum of gradients, out of which a server that chose the models, and knew the"
    " order of the examples, has read all texts of a site",
    "partial-training": "training that leaves out the head or the factors A has given the same away as linear steps",
}
"""The consequence of each word."""


@dataclass(frozen=True, kw_only=True)
class Consent:
    """The consent of a site beside adapters, heads, sketches and counts."""

    allow: tuple[Allowance, ...] = ()
    """Words of `ALLOWANCES`."""
    least_examples: int = 16
    """Fewest training examples behind an update, a fingerprint or what a rule asks for beside updates, and fewest by
    which two of them differ."""
    max_rounds_per_example: float = 0.5
    """Most rounds of training for each training example. Each update is one equation for as many unknowns as there are
    examples: with as many rounds as examples a server that knew their order has solved them, with half as many it
    cannot."""
    most_sketch: int = 4096
    """Most numbers of a sketch."""


def check_consent(consent: Consent) -> None:
    """Raise `ConfigError` unless this can be agreed to."""
    if wrong := [word for word in consent.allow if word not in ALLOWANCES]:
        raise ConfigError(f"--allow has {short_repr(wrong[0])}; allowed: {', '.join(get_args(Allowance))}")
    if consent.least_examples < 1:
        raise ConfigError(f"--least-examples is {consent.least_examples}; allowed: at least 1")
    if not consent.max_rounds_per_example > 0:
        raise ConfigError(f"--max-rounds-per-example is {consent.max_rounds_per_example:g}; allowed: above 0")
    if consent.most_sketch < 2:
        raise ConfigError(f"--most-sketch is {consent.most_sketch}; allowed: at least 2")
