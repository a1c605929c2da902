"""A search for good settings: each trial is a run, chosen by what the trials before it scored on validation."""
