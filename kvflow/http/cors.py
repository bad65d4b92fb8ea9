"""Cross-origin requests from browsers (CORS), for the origins in --allowed-origins."""

from __future__ import annotations

from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from kvflow.http.access import REQUEST_ID_HEADER

ANY = "*"
PREFLIGHT_AGE_S = 600


def cross_origin(origins: Collection[str]) -> Middleware:
    """Return the middleware that responds to preflight requests, which carry no key."""

    @web.middleware
    async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not asks or not _allowed(request, origins):
            return await handler(request)
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Allow-Headers": request.headers.get(
                "Access-Control-Request-Headers", ""
            ),
            "Access-Control-Max-Age": str(PREFLIGHT_AGE_S),
        }
        return web.Response(status=204, headers=headers)

    return answered


class AllowOrigin:
    """The signal handler that adds the CORS headers to a response, even to a streamed one."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = origins

    async def __call__(self, request: web.Request, response: web.StreamResponse) -> None:
        if origin := _allowed(request, self._origins):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = REQUEST_ID_HEADER
            # The response depends on the origin, so a cache must not serve it to another origin.
            if origin != ANY:
                response.headers["Vary"] = "Origin"


def _allowed(request: web.Request, origins: Collection[str]) -> str:
    """Return the value of Access-Control-Allow-Origin, or "" if the origin is not allowed."""
    origin = request.headers.get("Origin", "")
    if not origin:
        return ""
    return ANY if ANY in origins else origin if origin in origins else ""
