"""The server's side of connected clients, split computation, and the client loop of a site.

In: clients that connect. Out: their answers to jobs; requests of cut clients, answered.
Not here: rounds; those are `experiment.rounds`.
"""
