"""A base model with an adapter in its weights, as a folder of stock transformers."""

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from atlas_fl.models.loading import loading_lock, loading_options
from atlas_fl.models.peft_io import adapter_labels


def export_merged(folder: Path, to: Path, *, base: str, auto: Any, multilabel: bool = False) -> None:
    """Write the base, in float32, with the adapter of a PEFT folder in its weights, as the stock class `auto` loads it.

    Classes are those of the folder's head and `labels.json`; without names it is a regression. What prepares the input
    goes with it.
    """
    labels, head = adapter_labels(folder), dict[str, Any]()
    if auto in (AutoModelForSequenceClassification, AutoModelForImageClassification):
        head = {"id2label": dict(enumerate(labels)), "label2id": {name: index for index, name in enumerate(labels)}}
    if auto is AutoModelForImageClassification:
        head["ignore_mismatched_sizes"] = True
    elif head and not labels:
        head = {"num_labels": 1, "problem_type": "regression"}
    elif multilabel:
        head["problem_type"] = "multi_label_classification"
    with loading_lock(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers under an old name
        model = auto.from_pretrained(base, dtype=torch.float32, **head, **loading_options(base))
        PeftModel.from_pretrained(model, str(folder), trust_remote_code=False).merge_and_unload().save_pretrained(to)
        processor = AutoImageProcessor if auto is AutoModelForImageClassification else AutoTokenizer
        processor.from_pretrained(base, **loading_options(base)).save_pretrained(to)
