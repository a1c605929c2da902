"""Files: atomic writes, tensors, checkpoints, ledgers, digests, downloads.

In: values and paths. Out: files that are whole or not there.
Not here: what a run means.
"""
