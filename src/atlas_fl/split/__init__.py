"""Phase 3: a model cut in two at one of its blocks, what crosses the cut, and where to cut."""
