"""The embedded server: HTTP in front of the engine and the node, the bootstrap registry, the router, `up`."""
