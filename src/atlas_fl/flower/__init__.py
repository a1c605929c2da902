"""ATLAS as a Flower app: Flower says who takes part, starts and stops; the stream of `serving` carries the work."""
