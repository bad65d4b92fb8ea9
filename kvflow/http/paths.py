"""Paths that workers and the router share."""

TOKENIZE_PATHS = ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize")
WORKERS_PATH = "/workers"  # served by the router; workers join and leave here
