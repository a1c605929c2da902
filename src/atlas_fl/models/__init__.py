"""Stock transformers as frozen backbones, LoRA adapters on them, and vision transformers with all their weights.

In: a model's name or folder, tokens or pixels. Out: features, logits, and parameters by name.
Not here: clients, rounds, or losses.
"""
