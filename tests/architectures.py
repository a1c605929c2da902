"""The architectures of the tiny models."""

import pytest

ARCHITECTURES = (
    "bert",
    "roberta",
    "distilbert",
    "gpt2",
    "qwen2",
    "llama",
    "mistral",
    "xlm-roberta",
    "electra",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3_text",
)
"""Every family that the models package knows."""
QUICK_ARCHITECTURES = ("bert", "llama")
"""An encoder and a decoder: what `make test` takes where architectures are not the subject."""


def architectures_in_turn() -> list[object]:
    """Parameters of a test; laws of all models try what has the blocks of another in `make test-all` alone."""
    marks = {
        **dict.fromkeys(ARCHITECTURES, (pytest.mark.slow,)),
        **dict.fromkeys(QUICK_ARCHITECTURES, ()),
        **dict.fromkeys(
            ("mistral", "xlm-roberta", "electra", "qwen2", "qwen3", "gemma2"), (pytest.mark.slow, pytest.mark.product)
        ),
    }
    return [pytest.param(name, marks=marks[name]) for name in ARCHITECTURES]
