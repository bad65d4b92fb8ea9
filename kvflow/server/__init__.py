"""The embedded server: HTTP in front of an engine and a node,
the bootstrap registry, the router.
"""
