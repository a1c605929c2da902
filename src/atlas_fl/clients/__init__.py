"""What a client can be asked to do."""

from collections.abc import Callable, Mapping

from atlas_fl.clients.base import Action, Job, Site, Update
from atlas_fl.clients.cut.client_side import Crossing, evaluate_below, train_below
from atlas_fl.clients.cut.half import Half
from atlas_fl.clients.cut.halves import EvaluationHalf, TrainingHalf
from atlas_fl.clients.cut.measure_above import importance_half
from atlas_fl.clients.cut.measure_below import importance_below
from atlas_fl.clients.cut.warm_above import fingerprint_half
from atlas_fl.clients.cut.warm_below import fingerprint_below
from atlas_fl.clients.evaluate import evaluate
from atlas_fl.clients.fingerprint import fingerprint
from atlas_fl.clients.importance import importance
from atlas_fl.clients.train import train

ACTIONS: Mapping[str, Action] = {
    "fingerprint": fingerprint,
    "importance": importance,
    "train": train,
    "evaluate": evaluate,
}

CLIENT_SIDE: Mapping[str, Callable[[Job, Site, Crossing], Update]] = {
    "fingerprint": fingerprint_below,
    "importance": importance_below,
    "train": train_below,
    "evaluate": evaluate_below,
}
"""What a client does of an action on its side of the cut."""

SERVER_SIDE: Mapping[str, Callable[[Job, Site], Half]] = {
    "fingerprint": fingerprint_half,
    "importance": importance_half,
    "train": TrainingHalf,
    "evaluate": EvaluationHalf,
}
"""The server's half of an action for a cut client."""
