"""ACTIONS: what a client can be asked to do, by name: train, evaluate, fingerprint, importance, calibration."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from atlas_fl.client.calibration import ridge_sums, scale_losses, sensitivity
from atlas_fl.client.evaluation import evaluate
from atlas_fl.client.fingerprint import fingerprint
from atlas_fl.client.importance import importance
from atlas_fl.client.job import Action, Job, Site, Update
from atlas_fl.client.reports import train_and_report
from atlas_fl.client.split_client import (
    ClientSide,
    client_side_of,
    evaluate_below,
    fingerprint_below,
    importance_below,
    train_below,
)
from atlas_fl.client.split_planning import FingerprintHalf, ImportanceHalf
from atlas_fl.client.split_server import EvaluationHalf, ServerHalf, TrainingHalf, merge_updates
from atlas_fl.client.trainers import train_clients


def _one_by_one(action: Callable[[Job, Site], Update], jobs: Sequence[Job], site: Site) -> list[Update]:
    return [action(job, site) for job in jobs]


CLIENT_SIDE: Mapping[str, Callable[[Job, Site, ClientSide], Update]] = {
    "fingerprint": fingerprint_below,
    "importance": importance_below,
    "train": train_below,
    "evaluate": evaluate_below,
}
"""Client's side of an action of a cut client."""

SERVER_SIDE: Mapping[str, Callable[[Job, Site], ServerHalf]] = {
    "fingerprint": FingerprintHalf,
    "importance": ImportanceHalf,
    "train": TrainingHalf,
    "evaluate": EvaluationHalf,
}
"""The server's half of an action for a cut client."""


def _over_cuts(name: str, action: Action, jobs: Sequence[Job], site: Site) -> list[Update]:
    """The updates of these jobs, in their order: of whole models by the action, of cut ones by both of its sides."""
    uncut = [job for job in jobs if job.cut is None]
    updates = iter(action(uncut, site) if uncut else ())
    return [next(updates) if job.cut is None else _over_cut(name, job, site) for job in jobs]


def _over_cut(name: str, job: Job, site: Site) -> Update:
    """The update of a cut client both of whose sides compute here, with nothing but their messages between them."""
    half = SERVER_SIDE[name](job, site)
    crossing = client_side_of(half.side.below, site, indices=half.places, server=half)
    update = CLIENT_SIDE[name](half.side.below, site, crossing)
    return merge_updates(half.side, update, half.end(crossing.closing))


_TRAIN = partial(_over_cuts, "train", train_clients)
_EVALUATE = partial(_over_cuts, "evaluate", evaluate)

ACTIONS: Mapping[str, Action] = {
    "fingerprint": partial(_over_cuts, "fingerprint", fingerprint),
    "importance": partial(_over_cuts, "importance", partial(_one_by_one, importance)),
    "ridge": partial(_one_by_one, ridge_sums),
    "scale": partial(_one_by_one, scale_losses),
    "sensitivity": partial(_one_by_one, sensitivity),
    "train": partial(train_and_report, train=_TRAIN, evaluate=_EVALUATE),
    "evaluate": _EVALUATE,
}
