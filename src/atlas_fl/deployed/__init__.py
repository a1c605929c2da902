"""A federation across machines: the server's workplace of a run, and a site."""
