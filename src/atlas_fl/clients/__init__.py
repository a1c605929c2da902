"""What a client can be asked to do."""

from collections.abc import Mapping

from atlas_fl.clients.base import Action
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
