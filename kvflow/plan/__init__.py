"""`kvflow plan`: how many workers, and what pools, a trace needs, from measured step times."""
