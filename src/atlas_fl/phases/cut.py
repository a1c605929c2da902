"""Phase 3: whether a client's model is cut, and where."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from atlas_fl.assemble import Assembly
from atlas_fl.config.splitting import AUTO, NONE, cut_word
from atlas_fl.errors import BudgetError, ConfigError
from atlas_fl.options import cut_of
from atlas_fl.phases.cost import assign, predict
from atlas_fl.ranks.assign import Assignment
from atlas_fl.ranks.devices import Device
from atlas_fl.ranks.predict import Prediction, cut_utilities
from atlas_fl.split.cut import Candidate, choose
from atlas_fl.split.step import Cut
from atlas_fl.tasks.clients import ClientData


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What was decided for one client on its device."""

    assignment: Assignment
    prediction: Prediction
    cut: Cut | None
    reason: str
    """Why there is this cut, or none; empty where splitting was not asked for."""


Fitter: TypeAlias = Callable[[int | None, str], Fit]
"""(blocks on the client, reason) -> what that comes to; raises `BudgetError` where it does not fit."""


def decide(
    assembly: Assembly,
    client: ClientData,
    device: Device,
    importance: np.ndarray,
    *,
    communicates: bool,
    factor: float = 1.0,
) -> Fit:
    """Ranks and cut of one client, from its importance (layers,) by layer; `factor` scales the budget of the ranks.

    With `auto` a device that can hold the model gets no cut. Raises `BudgetError` where nothing fits, `ConfigError`
    for a cut beyond the model.
    """
    word = _word(assembly, client, device)

    def fit(blocks: int | None, reason: str) -> Fit:
        cut = cut_of(assembly.config, blocks)
        assignment = assign(assembly, client, device, importance, factor=factor, cut=cut)
        prediction = predict(assembly, client, device, assignment.ranks, cut=cut, communicates=communicates)
        return Fit(assignment=assignment, prediction=prediction, cut=cut, reason=reason)

    if word == NONE:
        return _whole(fit, assembly)
    if word != AUTO:
        return fit(_checked(int(word), assembly), "set by --split")
    try:
        return fit(None, "the device holds the whole model")
    except BudgetError:
        # Anything but memory is in the way of every cut as well, and is told there.
        fits = list(_fits(fit, assembly))
    if not fits:
        raise _nothing_fits(fit, device, assembly)
    best, reason = choose([_candidate(own, importance) for own in fits], assembly.config.split.split_objective)
    return fit(best.blocks, reason)


def cuts_while_planning(assembly: Assembly) -> dict[str, Cut]:
    """How clients are cut while they are planned, by name; nothing of those that are whole then.

    As `--split` says; with `auto`, which decides by what is measured, a device that cannot hold the model has one block
    until then. Raises `BudgetError` for a device that not even the smallest ranks fit, before anything is measured.
    """
    found, even = {}, np.full(assembly.shape.num_layers, 1.0 / assembly.shape.num_layers)
    for client, device in zip(assembly.clients, assembly.devices, strict=True):
        fit = decide(assembly, client, device, even, communicates=True)
        if fit.cut is not None:
            found[client.name] = replace(fit.cut, blocks=1) if _word(assembly, client, device) == AUTO else fit.cut
    return found


def _word(assembly: Assembly, client: ClientData, device: Device) -> str:
    return cut_word(assembly.config.split.split, client=client.name, task=client.task.name, device=device.name)


def shared_fits(assembly: Assembly, fits: Sequence[Fit], clusters: Sequence[int], *, communicates: bool) -> list[Fit]:
    """What was decided, where the cut clients of a cluster share the adapters above their cuts.

    A shared block has the largest rank that one of those who share it was given there: no device holds it or sends it,
    so no device's budget is in its way. Who is in no cluster (-1) shares with nobody.
    """
    found = list(fits)
    for k, own in enumerate(fits):
        if own.cut is None or clusters[k] < 0:
            continue
        fellows = [one for one, cluster in zip(fits, clusters, strict=True) if cluster == clusters[k] and one.cut]
        ranks = tuple(
            rank if layer < own.cut.blocks else _largest(fellows, layer)
            for layer, rank in enumerate(own.assignment.ranks)
        )
        client, device, cut = assembly.clients[k], assembly.devices[k], replace(own.cut, shared=clusters[k])
        prediction = predict(assembly, client, device, ranks, cut=cut, communicates=communicates)
        found[k] = replace(own, assignment=replace(own.assignment, ranks=ranks), prediction=prediction, cut=cut)
    return found


def _largest(fellows: Sequence[Fit], layer: int) -> int:
    return max(one.assignment.ranks[layer] for one in fellows if one.cut is not None and one.cut.blocks <= layer)


def num_owners(fits: Sequence[Fit], cut: Cut, layers: int) -> tuple[int, ...]:
    """By block, how many clients share the adapters that the server has there for this one; 1 where it shares none."""
    fellows = [one.cut for one in fits if one.cut is not None and one.cut.shared == cut.shared is not None]
    return tuple(max(1, sum(own.blocks <= layer for own in fellows)) for layer in range(layers))


def _whole(fit: Fitter, assembly: Assembly) -> Fit:
    try:
        return fit(None, "" if assembly.config.split.split == NONE else "left whole by --split")
    except BudgetError as error:
        # models of images are not cut
        if assembly.site.backbone.vision is None and any(_fits(fit, assembly)):
            raise BudgetError(f"{error}; or cut the model with --split auto, which fits") from error
        raise


def _fits(fit: Fitter, assembly: Assembly) -> Iterator[Fit]:
    """What every cut comes to that the device holds."""
    return (found for blocks in range(1, assembly.shape.num_layers) if (found := _tried(fit, blocks)))


def _tried(fit: Fitter, blocks: int) -> Fit | None:
    try:
        return fit(blocks, "")
    except BudgetError:
        return None


def _nothing_fits(fit: Fitter, device: Device, assembly: Assembly) -> BudgetError:
    try:
        fit(1, "")
    except BudgetError as error:
        return BudgetError(f"{device.name} fits no cut of {assembly.site.backbone.name}; with one block on it: {error}")
    raise AssertionError("a cut that has just been refused fits")


def _candidate(fit: Fit, importance: np.ndarray) -> Candidate:
    assert fit.cut is not None
    prediction, blocks = fit.prediction, fit.cut.blocks
    below, above = cut_utilities(importance, fit.assignment.ranks)[blocks]
    return Candidate(
        blocks=blocks,
        memory=prediction.memory.used_bytes / prediction.memory.total_bytes,
        importance=float(above / (below + above)) if below + above else 0.0,
        client_seconds=prediction.compute_seconds,
        server_seconds=prediction.server_seconds,
        link_seconds=prediction.transfer_seconds,
    )


def _checked(blocks: int, assembly: Assembly) -> int:
    most = assembly.shape.num_layers - 1
    if not 1 <= blocks <= most:
        allowed = f"none, auto, or 1 to {most}" if most else "none"
        raise ConfigError(
            f"--split cuts at block {blocks}, and {assembly.site.backbone.name} has {most + 1} blocks with at least one"
            f" on each side; allowed: {allowed}"
        )
    return blocks
