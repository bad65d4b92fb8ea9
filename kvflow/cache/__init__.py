"""The prefix cache at work: what `protocols.cache` decides about is kept here, tier by tier."""
