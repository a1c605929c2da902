"""Jobs and updates as messages; of a model only what the other end lacks is sent.

In: jobs and updates. Out: messages, and back, checked.
Not here: connections.
"""
