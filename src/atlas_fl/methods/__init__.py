"""Federated methods, one module each: who is mixed with whom, and what travels and stays beside the models.

In: models, updates and reports by client. Out: the next model of every client, and the method's state.
Not here: rounds, packs, transport, or files.
"""
