"""Figures, tables and comparisons of finished runs.

In: run folders. Out: PNG, CSV, LaTeX, text.
Not here: anything that changes a run.
"""
