"""The bootstrap registry of a prefill: an HTTP application with the addresses of its ranks.

`transports.control.registry` has its table and its client, and describes the routes.
"""

from __future__ import annotations

from aiohttp import web

from kvflow.http.app import build_app
from kvflow.http.authorization import NO_KEYS, Keys
from kvflow.http.errors import Failure, RequestError
from kvflow.http.responses import json_response
from kvflow.protocols.errors import PeerError, WireError
from kvflow.serve.http.metrics import RoleMetrics
from kvflow.transports.control.registry import RankTable


def registry_app(table: RankTable, metrics: RoleMetrics, keys: Keys = NO_KEYS) -> web.Application:
    """Return the application with PUT /ranks/{rank}, GET /ranks and GET /health."""

    async def put(http: web.Request) -> web.StreamResponse:
        rank, body = http.match_info["rank"], await http.read()
        try:
            return json_response(table.register_body(rank, body, is_trusted=bool(keys.admin)))
        except WireError as error:
            raise RequestError(str(error)) from None
        except PeerError as error:
            return Failure(409, "conflict", str(error)).response()

    async def get(_: web.Request) -> web.StreamResponse:
        return json_response(table.document())

    async def health(_: web.Request) -> web.StreamResponse:
        return json_response({"status": "ok"})

    routes = [web.put("/ranks/{rank}", put), web.get("/ranks", get), web.get("/health", health)]
    return build_app(routes, metrics, keys)
