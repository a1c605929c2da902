"""Mathematics of aggregation: mixing rules and matrices, products of factors, distances, checks of updates.

In: models and updates by client, and the graph. Out: the next model of every client, and the strategy's state.
Not here: rounds, transport, or files.
"""
