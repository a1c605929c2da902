"""Frames of tensors over mutual TLS, each request carried out exactly once.

In: messages as mappings of tensors. Out: the same at the other end.
Not here: what a message means; that is `runtime.protocol`.
"""
