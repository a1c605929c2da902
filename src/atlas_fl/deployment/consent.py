"""Consent of a site's owner: `--allow`, numbers of examples, what leaves it.

Settings are checked against it once, when a site connects (`deployment.settings_policy`), and every job against the
settings (`deployment.job_policy`).
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeAlias

from atlas_fl.config.settings import check_range, declared_settings
from atlas_fl.errors import ConfigError
from atlas_fl.frozen import Frozen
from atlas_fl.ranges import Range

Allowance: TypeAlias = Literal["cut", "labels", "hub-model", "linear-steps", "partial-training"]
"""Words of `--allow`."""

ALLOWANCES: Mapping[Allowance, str] = {
    "cut": "activations of its texts go to the server, which can read nearly all of the text in them",
    "labels": "the label of every example goes to the server, where the head is",
    "hub-model": "a model of the hub that the server names is fetched and loaded",
    "linear-steps": "an update of SGD is a sum of gradients, out of which a server that chose the models, and knew the"
    " order of the examples, has read all texts of a site",
    "partial-training": "training that leaves out the head or the factors A has given the same away as linear steps",
}
"""The consequence of each word."""


class SiteChoices(Frozen):
    """Data, model, device and consent of a site, as its owner gives them: options of `atlas join`, and keys of Flower's
    `--node-config`."""

    allow: tuple[Allowance, ...] = ()
    """Consent beyond adapters, head, sketches and counts: `cut` (the model may be cut, and activations tell
    the server nearly all of the text), `labels` (they go to the server, where the head of a cut model is), `hub-model`
    (a model of the hub that the server names is loaded), `linear-steps` (--optimizer sgd, whose updates are sums of
    gradients) and `partial-training` (--trained-parts without the head or the factors A): under the last two texts were
    read out of updates."""
    least_examples: Annotated[int, Range(least=1)] = 16
    """Fewest training examples behind an update or a fingerprint, and fewest by which two of them differ; settings that
    take fewer are refused."""
    # Each update is one equation for as many unknowns as there are examples: with as many rounds as examples a server
    # that knew their order has solved them, with half as many it cannot.
    max_rounds_per_example: Annotated[float, Range(above=0)] = 0.5
    """Most rounds of training for each training example here; settings with more are refused."""
    most_sketch: Annotated[int, Range(least=2)] = 4096
    """Most numbers of a sketch of this data; settings with longer ones are refused."""
    dp: Literal["none", "example", "client"] = "none"
    """`example` refuses a server whose settings have no differential privacy of examples, `client` one whose settings
    have none of whole sites."""
    epsilon: Annotated[float | None, Range(above=0)] = None
    """Most epsilon that the training examples here, or with --dp client this site, spend in all runs together, by
    NAME-privacy or NAME-runs beside the secret; --dp needs it. Settings with a larger one are refused."""
    delta: Annotated[float | None, Range(above=0, below=1)] = None
    """Most delta of settings with --dp; by default n^-1.1 of n training examples here, and .001 with --dp client: it is
    to be below one over the sites, which no site can count."""
    secure: int = 0
    """Fewest sites at the end of a secure sum that this one takes part in, 3 or more: settings without --secure are
    refused then. 0 makes no demand."""
    task: str
    """The data: your own as `name=path`, with text=, pair= and label= as needed, or a task's name."""
    device: str
    """This machine's profile: a name (`atlas list devices`) or your own description."""
    part: int | None = None
    """Index of the task's part that is here, from 0 to below --clients-per-task, dealt as in a simulation; all of it by
    default."""
    model: str | None = None
    """The server's model as it lies here, a folder or a name; needed where the server names a folder, or a model that
    is not on this machine."""
    data_dir: str | None = None
    """A directory that holds data sets which would else come from the hub or its cache."""
    plugin: tuple[str, ...] = ()
    """Plug-ins of the federation as they lie here, a .py file or a module each; may be repeated. Only these are loaded,
    and they must have the digests of the server's."""

    patience: Annotated[float, Range(above=0)] = 600.0
    """Seconds to try a server again that has gone."""
    private: str | None = None
    """Where what the settings' --share leaves out is kept until the run is complete; NAME-private beside --to by
    default. A site that is started again needs it."""
    secret: str | None = None
    """File of the secret from which order, subsets and augmentation of this site's examples, dropout and noise are
    drawn; NAME-secret beside --to by default, made where there is none. It is never sent; keep it with the data."""
    to: str | None = None
    """Where this client's own model is written at the end, in PEFT's format, or a whole model in transformers' own;
    NAME-adapter by default."""


class ServiceChoices(Frozen):
    """Address and waiting times of a server, as its owner gives them: options of `atlas serve`, and keys of Flower's
    `--run-config`."""

    host: str = "0.0.0.0"
    """Address of this machine to listen on; 0.0.0.0 for all."""
    port: Annotated[int, Range(least=0, most=65535)] = 8470
    """Port to listen on; 0 for a free one."""
    min_clients: Annotated[int, Range(least=0)] = 0
    """Fewest clients that the plan and every round need; 0 for all that are listed."""
    wait: Annotated[float, Range(above=0)] = 600.0
    """Seconds to wait for all of them before the run begins with fewer, or ends; of a complete run, for those who have
    not got their model."""
    deadline: Annotated[float, Range(above=0)] = 600.0
    """Seconds that a client has for a job; who lets it pass misses the round."""
    without: tuple[str, ...] = ()
    """Clients of the plan without which the run goes on, such as who was taken off the list; may be repeated. Start it
    without this once they are back."""
    late: bool = True
    """Let listed clients join that come after the plan was made; they take part from the next round on."""


def choices_of(kind: type[Any], options: Any) -> dict[str, Any]:
    """The choices of this kind by name, without those of a class that extends it."""
    return {field.name: getattr(options, field.name) for field in fields(kind)}


def check_choices(kind: type[Any], options: Any) -> None:
    """Raise `ConfigError` unless the choices of this kind are in their ranges."""
    for choice in declared_settings(kind, group=""):
        check_range(choice, getattr(options, choice.name))


def check_consent(consent: SiteChoices) -> None:
    """Raise `ConfigError` unless this can be agreed to."""
    from atlas_fl.secure_sums import LEAST, MOST  # numpy and cryptography, which no help page waits for

    check_choices(SiteChoices, consent)
    if consent.secure and not LEAST <= consent.secure <= MOST:
        raise ConfigError(f"--secure is {consent.secure}; allowed: {LEAST} to {MOST} sites, or 0 for no demand")
    if consent.dp == "none" and (consent.epsilon is not None or consent.delta is not None):
        raise ConfigError("--epsilon and --delta are most of what --dp spends; say --dp example or client, too")
