"""Masks over weights: Fisher information, mask strategies, masked SGD, sparse messages, task vectors.

In: parameters and scores by name. Out: boolean masks, masked steps, bytes.
Not here: which client makes a mask and when; that is `planning.masks`.
"""
