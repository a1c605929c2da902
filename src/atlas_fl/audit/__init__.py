"""An independent witness: every round recomputed in dense float64, and every digest checked.

In: a run folder. Out: an `AuditReport`.
Not here: the server's own code for mixing; that is the point.
"""
