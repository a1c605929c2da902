"""From a config to what runs: clients with their data, the backbone, the numbers that functions take.

In: a `Config`. Out: an assembly, and options for clients and strategies.
Not here: decisions; those are `planning`.
"""
