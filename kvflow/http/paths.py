"""Paths that workers and the router share."""

TOKENIZE_PATHS = ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize")
COUNT_PATH = "/v1/messages/count_tokens"
WORKERS_PATH = "/workers"  # the router's path for workers that join and leave
