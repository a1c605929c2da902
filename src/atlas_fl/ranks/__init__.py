"""Phase 2: device profiles, LoRA ranks under a budget, and what they cost.

In: sizes and importances, as numbers. Out: ranks by layer, bytes, seconds.
Not here: tensors; who measures importance is `client.importance`.
"""
