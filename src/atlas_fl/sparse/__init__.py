"""Which weights may move: their sensitivity, masks, the masked optimizer, sparse messages, and task vectors."""
