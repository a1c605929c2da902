"""Attacks on what clients send: what a server, or whoever gets a model, learns of training examples (`atlas attack`).

In: an assembly, whose clients train here as those of a run do. Out: rows, with the level of guessing beside.
Not here: clients that spoil a model (`runtime.attacks`); what activations at a cut give away (`planning.leakage`).
"""
