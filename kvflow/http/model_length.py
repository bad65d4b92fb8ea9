"""The longest request that all pairs of a router serve, which the router states to its workers."""

from __future__ import annotations

from aiohttp import web

MAX_MODEL_LEN_HEADER = "X-Kvflow-Max-Model-Len"
"""Header in which a router states the tokens that all its pairs can serve.

A router passes some questions on to one worker, which knows its own limit only.
"""


def served_length(http: web.Request, own: int) -> int:
    """Return the smaller of a worker's `own` limit and that of its router, in tokens."""
    given = http.headers.get(MAX_MODEL_LEN_HEADER, "")
    return min(own, int(given)) if given.isascii() and given.isdigit() and len(given) < 16 else own
