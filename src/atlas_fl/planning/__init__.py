"""Everything that is decided before round one: clusters, graph, ranks, cuts, masks, hosts, costs.

In: an assembly and an engine. Out: a `Plan`.
Not here: federated training.
"""
