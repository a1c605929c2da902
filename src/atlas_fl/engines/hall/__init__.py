"""Clients on other machines: where a server's clients wait for work, who hosts whom, and the clients' own side."""
