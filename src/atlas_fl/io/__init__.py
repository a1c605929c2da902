"""Files: checkpoints, results, the ledger, run folders and the fetch of the embedded model and data."""
