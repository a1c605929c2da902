"""The README.md of an exported model: code that loads it with the names of its classes, and what its files lack.

PEFT loads a base model by the path in `adapter_config.json` and has no place for the number of labels or their names,
so that `AutoPeftModelForSequenceClassification` takes them as arguments, which the code reads from `labels.json`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

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
"""By kind of folder: imports, and the lines that load it."""

_CLASSES = """\
labels = json.loads(Path(folder, "labels.json").read_text(encoding="utf-8"))
head = {"id2label": dict(enumerate(labels)), "label2id": {label: index for index, label in enumerate(labels)}}
"""
_REGRESSION = 'head = {"num_labels": 1, "problem_type": "regression"}\n'


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """The properties of a model that the card of its folder depends on."""

    base: str
    """The model that an adapter stands on."""
    images: bool
    writes: bool
    """Whether it writes text and has no head."""
    labels: Sequence[str]
    """The names of its classes; none of a regression."""
    missing_prior: Sequence[float] | None = None
    """Log frequencies of its client's classes, where the files cannot hold them."""


def model_card(exported: ExportedModel, *, kind: str) -> str:
    """The card, in Markdown: Python that leaves the model as `model`, and a line on what is missing."""
    auto = "AutoModelForCausalLM" if exported.writes else "AutoModelForSequenceClassification"
    auto = "AutoModelForImageClassification" if exported.images else auto
    imports, loading = _LOADING["image adapter" if kind == "adapter" and exported.images else kind]
    has_head = not exported.writes and kind != "whole model"
    names = {
        "auto": auto,
        "peft": auto.replace("Auto", "AutoPeft", 1),
        "base": json.dumps(exported.base),
        "head": ", **head" if has_head else "",
    }
    code = imports.format(**names) + '\n\nfolder = "."  # this one\n'
    if has_head and exported.labels:
        code = f"import json\nfrom pathlib import Path\n\n{code}{_CLASSES}"
    elif has_head:
        code += _REGRESSION
    code += loading.format(**names) + "\n"
    missing = ""
    if exported.missing_prior is not None:
        missing = f"Missing: {LACKS_PRIOR}.\n\n"
        code += f"log_frequencies = {list(exported.missing_prior)}\n"
    return f"# ATLAS: {kind}\n\n{missing}```python\n{code}```\n"
