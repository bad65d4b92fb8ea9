"""Data planes: they move pages from one pool into another."""
