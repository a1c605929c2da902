"""Experiment trackers beside a run: one seam, and what each tracker makes of it."""
