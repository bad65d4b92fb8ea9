"""Prefill's side of the protocol: an endpoint that decides, and does nothing by itself."""
