"""The README.md of an exported model: code that loads it with the names of its classes, and what its files lack.

PEFT loads a base model by the path in `adapter_config.json` and has no place for the number of labels or their names,
so that `AutoPeftModelForSequenceClassification` takes them as arguments, which the code reads from `labels.json`.
"""

import json
from collections.abc import Sequence

CARD = "README.md"
LACKS_PRIOR = (
    "scores have the log frequencies of a client's classes (--prior-correction), and a head without a bias cannot hold"
    " them; add `log_frequencies` to the logits"
)
"""The one line of an export whose head has no bias."""

_LOADING = {
    "adapter": ("from peft import {peft}", "model = {peft}.from_pretrained(folder{head}).eval()"),
    "image adapter": (
        "from peft import PeftModel\nfrom transformers import {auto}",
        "model = {auto}.from_pretrained({base}{head}, ignore_mismatched_sizes=True)\n"
        "model = PeftModel.from_pretrained(model, folder).eval()",
    ),
    "gated adapter": (
        "import atlas_fl\nfrom transformers import {auto}",
        "model = {auto}.from_pretrained({base}{head}).eval()\nmodel = atlas_fl.load_gated_adapter(model, folder)",
    ),
    "whole model": ("from transformers import {auto}", "model = {auto}.from_pretrained(folder).eval()"),
}
"""Imports, and the lines that load it, by kind of folder."""

_CLASSES = """\
labels = json.loads(Path(folder, "labels.json").read_text(encoding="utf-8"))
head = {"id2label": dict(enumerate(labels)), "label2id": {label: index for index, label in enumerate(labels)}}
"""
_REGRESSION = 'head = {"num_labels": 1, "problem_type": "regression"}\n'


def model_card(
    *, kind: str, base: str, images: bool, writes: bool, labels: Sequence[str], missing_prior: Sequence[float] | None
) -> str:
    """The card, in Markdown: Python that leaves the model as `model`, and a line on what is missing.

    Args:
        kind: a kind of `_LOADING`.
        base: the model that an adapter stands on.
        images: true for a model of images.
        writes: true for a model that writes text and has no head.
        labels: the names of its classes; none of a regression.
        missing_prior: log frequencies of its client's classes, where the files cannot hold them.
    """
    auto = "AutoModelForCausalLM" if writes else "AutoModelForSequenceClassification"
    auto = "AutoModelForImageClassification" if images else auto
    imports, loading = _LOADING["image adapter" if kind == "adapter" and images else kind]
    has_head = not writes and kind != "whole model"
    names = {
        "auto": auto,
        "peft": auto.replace("Auto", "AutoPeft", 1),
        "base": json.dumps(base),
        "head": ", **head" if has_head else "",
    }
    code = imports.format(**names) + '\n\nfolder = "."  # this one\n'
    if has_head and labels:
        code = f"import json\nfrom pathlib import Path\n\n{code}{_CLASSES}"
    elif has_head:
        code += _REGRESSION
    code += loading.format(**names) + "\n"
    missing = ""
    if missing_prior is not None:
        missing = f"Missing: {LACKS_PRIOR}.\n\n"
        code += f"log_frequencies = {list(missing_prior)}\n"
    return f"# ATLAS: {kind}\n\n{missing}```python\n{code}```\n"
