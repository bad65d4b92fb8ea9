"""Paths that a worker serves and the router passes on."""

TOKENIZE_PATHS = ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize")
WORKERS_PATH = "/workers"  # of the router: where a worker joins, and leaves
