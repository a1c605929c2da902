"""Phase 4: the graph of clients, the matrix of a rule, and its application to the models."""
