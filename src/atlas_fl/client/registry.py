"""ACTIONS: what a client can be asked to do, by name: train, evaluate, fingerprint, importance, calibration."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from atlas_fl.client.calibration import ridge_sums, scale_losses, sensitivity
from atlas_fl.client.evaluation import evaluate
from atlas_fl.client.fingerprint import fingerprint
from atlas_fl.client.importance import importance
from atlas_fl.client.job import Action, Job, Site, Update
from atlas_fl.client.reports import train_and_report
from atlas_fl.client.split_client import ClientSide, evaluate_below, fingerprint_below, importance_below, train_below
from atlas_fl.client.split_planning import FingerprintHalf, ImportanceHalf
from atlas_fl.client.split_server import EvaluationHalf, ServerHalf, TrainingHalf


def _one_by_one(action: Callable[[Job, Site], Update], jobs: Sequence[Job], site: Site) -> list[Update]:
    return [action(job, site) for job in jobs]


ACTIONS: Mapping[str, Action] = {
    "fingerprint": fingerprint,
    "importance": partial(_one_by_one, importance),
    "ridge": partial(_one_by_one, ridge_sums),
    "scale": partial(_one_by_one, scale_losses),
    "sensitivity": partial(_one_by_one, sensitivity),
    "train": train_and_report,
    "evaluate": evaluate,
}

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
