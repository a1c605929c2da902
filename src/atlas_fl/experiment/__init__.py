"""Runs: backends, round loop, late clients, recorder, resume, summary, export, sweeps, search.

In: a `Config`. Out: a run folder.
Not here: how a client trains, or how models are aggregated.
"""
