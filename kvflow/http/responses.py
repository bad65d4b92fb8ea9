"""Answers that several routes give."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from kvflow.http.growing import BLOCK_BYTES, encode, write

# The time that a client has to read an answer that is larger than the buffers on the way to it.
READ_TIMEOUT_S = 60.0


def json_response(body: Any, status: int = 200) -> web.Response:
    """Return `body` as a JSON answer."""
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )


async def long_json_response(http: web.Request, body: Any) -> web.StreamResponse:
    """Return `body`, a part of which may have grown large, as a JSON answer. A large answer is sent
    before this returns.

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
        # Closing the transport would wait for the buffered bytes that the client does not read.
        if http.transport is not None:
            http.transport.abort()
        raise ConnectionResetError(
            f"the client has not read its answer within {READ_TIMEOUT_S:g} s"
        ) from None
    return response
