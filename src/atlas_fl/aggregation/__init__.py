"""What the server makes of the clients' updates: strategies, mixing matrices, and their application.

In: models and updates by client, and the graph. Out: the next model of every client, and the strategy's state.
Not here: rounds, transport, or files.
"""
