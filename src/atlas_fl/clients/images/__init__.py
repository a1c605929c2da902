"""Clients that train a whole image model."""
