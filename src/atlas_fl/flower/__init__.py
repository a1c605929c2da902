"""A Flower app: Flower starts and stops, ATLAS's own stream carries the work.

In: Flower's run config. Out: a run folder.
Not here: anything that runs without Flower.
"""
