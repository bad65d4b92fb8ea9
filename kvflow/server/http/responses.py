"""What several routes answer with."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web


def json_response(body: Any, status: int = 200) -> web.Response:
    """`body` as a JSON answer."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
