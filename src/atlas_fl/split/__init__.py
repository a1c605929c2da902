"""A model cut in two: both forward passes, what crosses the cut, and who hosts whose upper half.

In: a backbone and the block of the cut. Out: activations and gradients as bytes, and their counts.
Not here: training loops; those are `client.split_client` and `client.split_server`.
"""
