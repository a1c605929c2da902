"""A client's whole model as a folder that stock transformers load."""

import copy
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoImageProcessor, AutoModelForImageClassification

from atlas_fl.io.atomic import new_folder
from atlas_fl.models.loading import one_at_a_time
from atlas_fl.models.vision import Vision, weights
from atlas_fl.models.vision_loading import quiet
from atlas_fl.tree import HEAD, head_keys
from atlas_fl.types import Params


def save_vision(vision: Vision, params: Params, folder: Path, *, labels: Sequence[str]) -> None:
    """Write config, weights and processor; stock `AutoModelForImageClassification` loads the folder to the same logits.

    Tensors that `params` lacks are the backbone's own. `labels` name the classes in order. The folder is there in full,
    or not at all (`io.atomic.new_folder`).
    """
    config = copy.deepcopy(vision.model.config)
    config.id2label = dict(enumerate(labels))
    config.label2id = {name: place for place, name in enumerate(labels)}
    with one_at_a_time(), quiet():
        model = AutoModelForImageClassification.from_config(config, trust_remote_code=False)
        held = {**weights(vision), **params}
        named = {vision.names[key]: held[key] for key in vision.names}
        named |= {f"classifier.{key.removeprefix(HEAD)}": params[key] for key in head_keys(params)}
        model.load_state_dict(named, strict=True)
        processor = AutoImageProcessor.from_pretrained(vision.source.path, trust_remote_code=False)
        with new_folder(folder) as draft:
            model.save_pretrained(draft)
            processor.save_pretrained(draft)
