"""Paths that workers and the router share."""

TOKENIZE_PATHS = ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize")
MESSAGES_PATH, COUNT_PATH = "/v1/messages", "/v1/messages/count_tokens"
RESPONSES_PATH = "/v1/responses"
# Clients of Anthropic's API call these routes, and read errors in its form.
MESSAGES_PATHS = frozenset({MESSAGES_PATH, COUNT_PATH})
WORKERS_PATH = "/workers"  # the router's path for workers that join and leave
