"""A cut client's side of the warm-up: both halves of its data train its own adapters, in step with the server's.

The halves are two models of one job, side by side in one row, as on a whole client. After every few steps the server is
asked whether they agree; each side gives the sketch what its own tensors add to it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from atlas_fl.clients.base import Job, Site, Update, line_of
from atlas_fl.clients.cut.client_side import Crossing, message_in
from atlas_fl.clients.cut.measure_below import gradients_below
from atlas_fl.clients.fingerprint import AGREED, FingerprintOptions, delta_parts, half_job, is_look, mean, parts_message
from atlas_fl.clients.train import train
from atlas_fl.errors import ProtocolError
from atlas_fl.io.tensors import encode
from atlas_fl.split.codec import read_message
from atlas_fl.types import Params


def fingerprint_below(job: Job, site: Site, crossing: Crossing) -> Update:
    """The client's side of its fingerprint, of whatever kind."""
    return _KINDS[job.options.kind](job, site, crossing)


def _warmed(job: Job, site: Site, crossing: Crossing) -> Update:
    """The mean of both halves' models, as far as they are here; the sketches are the server's."""
    halves = {half: half_job(replace(job, cut=None), half) for half in (0, 1)}
    crossing.lines = {half: line for half in halves if (line := line_of(job, site)) is not None}
    first, second = train(
        list(halves.values()),
        site,
        step=crossing.step,
        watch=lambda done, live: _agreed(job.options, done, live, crossing),
    )
    crossing.closing |= _parts({0: first.params, 1: second.params}, job.options)
    metrics = {"loss": (first.metrics["loss"] + second.metrics["loss"]) / 2}
    return Update(client=job.client, params=mean(first.params, second.params), examples=0, metrics=metrics)


def _agreed(options: FingerprintOptions, done: int, live: Mapping[int, Params], crossing: Crossing) -> Collection[int]:
    """The places whose training ends here: both where the server says that they agree."""
    if not is_look(done, options) or len(live) < 2:
        return ()
    sent, crossing.closing = {**crossing.closing, **_parts(live, options)}, {}
    found = read_message(message_in(crossing.far.ask("agree", done, sent), 0, "control")).get(AGREED)
    if found is None or found.numel() != 1:
        raise ProtocolError("the server does not say whether the warm-up ends; install its version of atlas-fl")
    return tuple(live) if bool(found.item()) else ()


def _parts(models: Mapping[int, Params], options: FingerprintOptions) -> dict[str, bytes]:
    return {
        f"{half}/fingerprint": encode(parts_message(list(delta_parts(own, options).values())))
        for half, own in models.items()
    }


_KINDS: Mapping[str, Callable[[Job, Site, Crossing], Update]] = {
    "delta": _warmed,
    "fisher": gradients_below,
    "gradient": gradients_below,
}
