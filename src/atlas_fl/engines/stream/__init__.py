"""One message path between a server and its clients: frames of tensors over mutual TLS, each request exactly once."""
