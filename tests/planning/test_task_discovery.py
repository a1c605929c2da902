"""Which settings two fingerprints must have in common to be compared."""

from atlas_fl import find_preset
from atlas_fl.planning.task_discovery import fingerprint_signature
from atlas_fl.setup.options import fingerprint_options

TRAIN = {
    "seed": 42,
    "rounds": 1,
    "epochs": 1,
    "max_steps": None,
    "batch_size": 16,
    "lr": 0.001,
    "schedule": "constant",
    "warmup": 0.0,
    "weight_decay": 0.0,
    "clip": 1.0,
    "dropout": 0.0,
    "frozen": [],
    "half": None,
    "most": None,
    "hash_loaded": False,
}
QUICK = {
    "model": "minilm",
    "targets": [],
    "precision": "fp32",
    "alpha": None,
    "rslora": False,
    "rank": 4,
    "max_length": None,
    "kind": "fisher",
    "sketch_dim": 1024,
    "train": TRAIN,
    "batches": 12,
    "steps": 60,
    "blocks": 2,
    "samples": None,
    "stride": 10,
    "reliability": 0.3,
}
"""What the plans of quick runs hold since November 2026."""


def test_the_fingerprint_of_an_older_run_can_still_be_compared() -> None:
    config = find_preset("quick")
    assert fingerprint_signature(config, fingerprint_options(config)) == QUICK, (
        "`atlas place` would refuse the newcomers of older runs. A new option that changes no fingerprint at its"
        " default belongs into _ADDED_LATER of src/atlas_fl/planning/task_discovery.py"
    )
