"""What is in front of every route of every role: the turns in which a crowd of requests goes on."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from kvflow.http.app import BODIES_PER_TURN, _MalformedRequestFilter, build_app
from kvflow.serve.http.metrics import RoleMetrics
from tests.fakes.servers import Server

CROWD = 64


async def entered(last: str) -> list[tuple[str, int]]:
    """Send a crowd of requests, then `last`; return whose handler began in which turn."""
    turns, found = itertools.count(), list[tuple[str, int]]()
    turn = next(turns)

    async def handler(request: web.Request) -> web.StreamResponse:
        found.append((request.path, turn))
        return web.Response()

    routes = [
        web.post("/generate", handler),
        web.post("/abort_request", handler),
        web.get("/health", handler),
    ]
    async with Server(build_app(routes, RoleMetrics())) as server:
        connections = [
            await asyncio.open_connection("127.0.0.1", server.port) for _ in range(CROWD + 1)
        ]
        for request, (_, writer) in zip(
            ["POST /generate"] * CROWD + [last], connections, strict=True
        ):
            head = f"{request} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n"
            body = "Content-Length: 2\r\n\r\n{}" if request.startswith("POST") else "\r\n"
            writer.write((head + body).encode())
        while len(found) <= CROWD:
            await asyncio.sleep(0)
            turn = next(turns)
        for reader, writer in connections:
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
    return found


async def test_a_crowd_of_requests_goes_on_in_turns_and_what_has_no_body_at_once() -> None:
    """They all went on in one turn of the loop, which a crowd of 256 held for 50 ms."""
    async with asyncio.timeout(20):
        found = await entered("GET /health")
    by_turn = Counter(turn for path, turn in found if path == "/generate")
    assert by_turn.total() == CROWD
    # aiohttp's own start of a request may fall into two turns.
    assert max(by_turn.values()) <= 2 * BODIES_PER_TURN
    assert [path for path, _ in found].index("/health") < 3 * BODIES_PER_TURN


async def test_an_abort_does_not_overtake_the_requests_before_it() -> None:
    """It found none of those that waited for their turn, and they went on."""
    async with asyncio.timeout(20):
        found = await entered("POST /abort_request")
    assert [path for path, _ in found].index("/abort_request") > CROWD - 3 * BODIES_PER_TURN


def test_what_is_no_http_is_not_logged_with_a_traceback() -> None:
    def kept(error: BaseException | None) -> bool:
        exc_info = None if error is None else (type(error), error, None)
        return _MalformedRequestFilter().filter(
            logging.LogRecord("aiohttp.server", logging.ERROR, "", 0, "text", None, exc_info)
        )

    assert kept(None) and kept(ValueError("a bug"))
    assert not kept(BadHttpMessage("nonsense")) and not kept(ConnectionResetError())
