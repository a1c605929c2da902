"""ATLAS as a Flower app: Flower says who takes part, starts and stops; the stream of `deployed` carries the work."""
