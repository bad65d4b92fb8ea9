"""HTTP servers in front of an engine and a node."""
