"""The live page, and the routes by which it and `kvflow top` read the overview."""

from __future__ import annotations

import asyncio
from importlib import resources

from aiohttp import web

from kvflow.http.errors import Failure
from kvflow.router.overview.gathering import Overview

MAX_VIEWERS = 100
# Time in which a viewer must read a snapshot. One that does not read is disconnected.
READ_TIMEOUT_S = 20.0
PAGE_PATH = "/ui"
_FILES = {
    "index.html": "text/html",
    "style.css": "text/css",
    "format.js": "text/javascript",
    "plots.js": "text/javascript",
    "views.js": "text/javascript",
    "story.js": "text/javascript",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_HEADERS = {
    # Everything comes from this router, and no script or style stands in the page itself.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_EVENTS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}


def routes(overview: Overview) -> list[web.RouteDef]:
    """Return the routes of the page and of its data."""
    return [*_page(), *_data(overview)]


def _page() -> list[web.RouteDef]:
    folder = resources.files("kvflow.router") / "page"
    files = {name: (folder / name).read_bytes() for name in _FILES}

    async def index(_: web.Request) -> web.StreamResponse:
        return _file("index.html")

    async def one(http: web.Request) -> web.StreamResponse:
        name = http.match_info["file"]
        return _file(name) if name in files else _no_file(name)

    def _file(name: str) -> web.Response:
        return web.Response(
            body=files[name], content_type=_FILES[name], charset="utf-8", headers=_HEADERS
        )

    return [web.get(PAGE_PATH, index), web.get(f"{PAGE_PATH}/{{file}}", one)]


def _no_file(name: str) -> web.Response:
    return Failure(404, "http_404", f"the page has no file {name[:40]!r}").response()


def _data(overview: Overview) -> list[web.RouteDef]:
    async def latest(_: web.Request) -> web.StreamResponse:
        body = await overview.latest()
        headers = {"Cache-Control": "no-store"}
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def events(http: web.Request) -> web.StreamResponse:
        """Stream the history once, and then each snapshot."""
        if overview.viewers >= MAX_VIEWERS:
            text = f"{MAX_VIEWERS} viewers look at this router already, which is the limit"
            return Failure(503, "overloaded", text).response()
        response = web.StreamResponse(headers=_EVENTS)
        with overview.viewing():
            await response.prepare(http)
            await _send(http, response, b"history", overview.history())
            async for snapshot in overview.snapshots():
                await _send(http, response, b"snapshot", snapshot)
        await response.write_eof()
        return response

    return [web.get("/overview", latest), web.get("/overview/events", events)]


async def _send(http: web.Request, response: web.StreamResponse, event: bytes, data: bytes) -> None:
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            await response.write(b"event: %b\ndata: %b\n\n" % (event, data))
    except TimeoutError:
        # `close` would wait for the viewer to read the buffered bytes.
        if http.transport is not None:
            http.transport.abort()
        text = f"the viewer has not read its snapshot within {READ_TIMEOUT_S:g} s"
        raise ConnectionResetError(text) from None
