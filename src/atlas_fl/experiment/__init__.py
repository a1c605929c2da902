"""A run from its config to its folder: rounds, late clients, records, resume, sweeps, export.

In: a `Config`. Out: a run folder.
Not here: how a client trains or how models are mixed.
"""
