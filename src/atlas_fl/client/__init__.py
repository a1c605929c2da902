"""Actions of a client: train, evaluate, fingerprint, measure importance; with its model whole or cut.

In: a `Job` with parameters. Out: an `Update` with parameters and metrics.
Not here: other clients' models, mixing, or files.
"""
