"""ACTIONS: what a client can be asked to do, by name: train, evaluate, fingerprint, importance, calibration."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from atlas_fl.client import calibration, evaluation, reports, split_client, split_planning, split_server, trainers
from atlas_fl.client.fingerprint import fingerprint
from atlas_fl.client.importance import importance
from atlas_fl.client.job import Action, Job, Site, Update


def _one_by_one(action: Callable[[Job, Site], Update], jobs: Sequence[Job], site: Site) -> list[Update]:
    return [action(job, site) for job in jobs]


CLIENT_SIDE: Mapping[str, Callable[[Job, Site, split_client.ClientSide], Update]] = {
    "fingerprint": split_client.fingerprint_below,
    "importance": split_client.importance_below,
    "train": split_client.train_below,
    "evaluate": split_client.evaluate_below,
}
"""Client's side of an action of a cut client."""

SERVER_SIDE: Mapping[str, Callable[[Job, Site], split_server.ServerHalf]] = {
    "fingerprint": split_planning.FingerprintHalf,
    "importance": split_planning.ImportanceHalf,
    "train": split_server.TrainingHalf,
    "evaluate": split_server.EvaluationHalf,
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
    crossing = split_client.client_side_of(half.side.below, site, indices=half.places, server=half.ask)
    update = CLIENT_SIDE[name](half.side.below, site, crossing)
    return split_server.merge_updates(half.side, update, half.end(crossing.closing))


_TRAIN = partial(_over_cuts, "train", trainers.train_clients)
_EVALUATE = partial(_over_cuts, "evaluate", evaluation.evaluate)

ACTIONS: Mapping[str, Action] = {
    "fingerprint": partial(_over_cuts, "fingerprint", fingerprint),
    "importance": partial(_over_cuts, "importance", partial(_one_by_one, importance)),
    "ridge": partial(_one_by_one, calibration.ridge_sums),
    "scale": partial(_one_by_one, calibration.scale_losses),
    "sensitivity": partial(_one_by_one, calibration.sensitivity),
    "train": partial(reports.train_and_report, train=_TRAIN, evaluate=_EVALUATE),
    "evaluate": _EVALUATE,
}
