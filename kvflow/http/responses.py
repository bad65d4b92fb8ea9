"""What several routes answer with."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from kvflow.http.growing import BLOCK_BYTES, encode, write

READ_TIMEOUT_S = 60.0  # of an answer that is too large for the buffers between here and its client


def json_response(body: Any, status: int = 200) -> web.Response:
    """`body` as a JSON answer."""
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )


async def long_json_response(http: web.Request, body: Any) -> web.StreamResponse:
    """`body`, in which something may have grown large, as a JSON answer; a large one has been sent
    when this returns.

    Raises: ConnectionError when the client disconnects, or does not read.
    """
    pieces = encode(body)
    size = sum(map(len, pieces))
    if size <= BLOCK_BYTES:
        return web.Response(body=b"".join(pieces), content_type="application/json")
    response = web.StreamResponse(
        headers={"Content-Type": "application/json", "Content-Length": str(size)}
    )
    await response.prepare(http)
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            await write(response, pieces)
            await response.write_eof()
    except TimeoutError:
        if http.transport is not None:
            http.transport.abort()
        raise ConnectionResetError(
            f"the client has not read its answer within {READ_TIMEOUT_S:g} s"
        ) from None
    return response
