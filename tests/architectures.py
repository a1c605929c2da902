"""The architectures of the tiny models."""

ARCHITECTURES = ("bert", "roberta", "distilbert", "gpt2", "qwen2", "llama", "mistral")
"""Every family that the models package knows."""
QUICK_ARCHITECTURES = ("bert", "llama")
"""An encoder and a decoder: what `make test` takes where architectures are not the subject."""
