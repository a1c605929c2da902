"""Clients whose model is cut in two: their own side, and the server's."""
