"""Engines that run clients' jobs: in this process, in worker processes, on Ray, on other machines.

In: an action and jobs. Out: updates, in the order of the jobs.
Not here: what the action does; that is `client`.
"""
