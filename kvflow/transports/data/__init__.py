"""Data planes, which move pages from one pool into another."""
