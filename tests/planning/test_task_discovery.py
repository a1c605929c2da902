"""The settings that two fingerprints must have in common to be compared."""

from atlas_fl import find_preset
from atlas_fl.planning.task_discovery import fingerprint_signature
from atlas_fl.setup.options import fingerprint_options


def test_everything_that_decides_a_fingerprint_is_in_its_signature() -> None:
    config = find_preset("quick")
    signature = fingerprint_signature(config, fingerprint_options(config))
    assert {
        "model",
        "targets",
        "rank",
        "adapted_blocks",
        "image_size",
        "kind",
        "sketch_dim",
        "train",
    } <= signature.keys()
    assert {"seed", "lr", "batch_size", "label_smoothing", "optimizer"} <= signature["train"].keys()
