"""The server's side of connected clients, and the loop of a site.

In: clients that connect. Out: their answers to jobs, relayed halves of cut models.
Not here: rounds; those are `experiment.rounds`.
"""
