"""Paths that a worker serves and the router forwards."""

TOKENIZE_PATHS = ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize")
WORKERS_PATH = "/workers"  # of the router: workers join and leave here
