"""Phase 1: sketches of fingerprints, the similarity of clients, and their clusters.

In: a sketch per client, as arrays. Out: a `Clustering`.
Not here: how clients compute fingerprints; that is `client.fingerprint`.
"""
