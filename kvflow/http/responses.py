"""Responses that several routes share."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from kvflow.http.growing import BLOCK_BYTES, encode, write

# Time in which a client must read a response that exceeds the buffers on the way to the client.
READ_TIMEOUT_S = 60.0


def json_response(body: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )


async def long_json_response(http: web.Request, body: Any) -> web.StreamResponse:
    """Return a JSON response with `body`, which may contain growing values.

    When this function returns, a large response has already been sent.

    Raises: ConnectionError if the client disconnects, or does not read the response in time.
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
        # `close` would wait for the client to read the buffered bytes, so the transport is aborted.
        if http.transport is not None:
            http.transport.abort()
        raise ConnectionResetError(
            f"the client has not read its answer within {READ_TIMEOUT_S:g} s"
        ) from None
    return response
