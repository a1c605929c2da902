"""Phase 2: what a device can hold and send, and the LoRA ranks that each of its layers gets. Pure functions."""
