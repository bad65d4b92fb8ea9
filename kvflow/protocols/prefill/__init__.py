"""Prefill's side of the protocol: an endpoint that decides and returns commands for a shell."""
