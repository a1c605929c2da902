"""Tasks, their rows, and how rows are dealt out to clients.

In: names of tasks or a user's files, and a seed. Out: `Task`, the examples of each client, metrics.
Not here: models, rounds, or anything that trains.
"""
