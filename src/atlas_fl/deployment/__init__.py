"""A federation across machines: the server of a run, a site, and what the site consents to.

In: a config, certificates, consent. Out: a run folder at the server, a model at each site.
Not here: the wire format; that is `runtime`.
"""
