"""The bootstrap server of a prefill: SGLang's own, which also serves kvflow's registry.

Every rank registers with SGLang's PUT /route. The field `kvflow` of that request describes the
rank's node. Decodes read the nodes of all ranks with GET /ranks, as from any registry of kvflow.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

from kvflow.connectors.sglang.counterpart import FIELD
from kvflow.protocols.errors import PeerError, WireError
from kvflow.protocols.wire.json_text import decode_json
from kvflow.protocols.wire.ranks import rank_from_json
from kvflow.transports.control.registry import RankTable


class KvflowBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """SGLang's bootstrap server with kvflow's registry."""

    def __init__(self, host: str, port: int) -> None:
        # SGLang's constructor starts to serve.
        self._ranks = RankTable()
        super().__init__(host, port)

    def _setup_routes(self) -> None:
        super()._setup_routes()
        self.app.router.add_get("/ranks", self._list_ranks)

    async def _list_ranks(self, _request: web.Request) -> web.Response:
        return web.Response(
            body=msgspec.json.encode(self._ranks.document()), content_type="application/json"
        )

    async def _handle_route_put(self, request: web.Request) -> Any:
        try:
            body = decode_json(await request.read())
            described = body.get(FIELD) if isinstance(body, dict) else None
            self._ranks.register(rank_from_json(described), is_trusted=False)
        except WireError as error:
            return web.Response(text=f"the field {FIELD}: {error}", status=400)
        except PeerError as error:
            return web.Response(text=str(error), status=409)
        return await super()._handle_route_put(request)
