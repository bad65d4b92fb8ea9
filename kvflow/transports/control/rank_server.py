"""A registry for processes without an HTTP server: `serve_ranks` needs only asyncio streams.

The registry serves the routes listed in `transports.control.registry`. It takes one request per
connection, and limits bytes, time and connections. A prefill puts its own rank (`node.info`) into
the table.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from http.client import HTTPException, HTTPMessage, parse_headers
from io import BytesIO
from typing import Any

import msgspec

from kvflow.aio import Threads
from kvflow.protocols.errors import MisuseError, PeerError, WireError
from kvflow.transports.control.registry import RankTable

MAX_HEAD_BYTES = 16 << 10
MAX_BODY_BYTES = 64 << 10
MAX_CONNECTIONS = 256
DOCUMENTS = 4  # documents built at a time, each in a thread
REQUEST_S = 5.0
log = logging.getLogger("kvflow.registry")
Answer = tuple[HTTPStatus, str, bytes]
"""An HTTP answer: status, content type, body."""
Document = Callable[[], Answer]


@asynccontextmanager
async def serve_ranks(
    table: RankTable,
    host: str,
    port: int = 0,
    api_key: str = "",
    *,
    documents: Mapping[str, Document] | None = None,
) -> AsyncGenerator[int, None]:
    """Serve `table` until the `with` statement ends; yield the port, which is any free one if
    `port` is 0.

    `documents` maps further paths to functions that answer GET requests for them. The functions are
    called in threads. A function for "/health" replaces the built-in answer. That path never needs
    the key.

    Raises: MisuseError (the port cannot be bound).
    """
    connections = _Connections(table, api_key, documents or {})
    try:
        server = await asyncio.start_server(connections.accept, host, port, limit=MAX_HEAD_BYTES)
    except (OSError, OverflowError) as error:
        raise MisuseError(f"the registry cannot listen on {host}:{port}: {error}") from None
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        # asyncio may still pass on connections that it accepted. `accept` then aborts them.
        connections.closing = True
        await _stop_accepting(server)
        server.close()
        await connections.close()


async def _stop_accepting(server: asyncio.Server) -> None:
    """Stop listening, and let asyncio set up the connections that it has already accepted.

    asyncio accepts a connection, and creates its transport in the next turn of the loop. Closing
    the server in between would leak the socket of that connection, so this function waits one turn.
    """
    for listening in server.sockets:
        asyncio.get_running_loop().remove_reader(listening.fileno())
    await asyncio.sleep(0)


class _Refused(Exception):  # noqa: N818
    """A request that is answered with an HTTP error."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Connections:
    def __init__(self, table: RankTable, api_key: str, documents: Mapping[str, Document]) -> None:
        self._table, self._documents = table, documents
        self._key = f"Bearer {api_key}".encode() if api_key else b""
        self._threads = Threads("registry", DOCUMENTS)
        self._open: set[asyncio.Task[None]] = set()
        self.closing = False

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.closing or len(self._open) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        # A task that is cancelled before its first step runs none of its own code.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def close(self) -> None:
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        self._threads.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                writer.write(await self._answer(reader))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            # The client disconnected, or is too slow.
            log.debug("a request ended early: %r", error)

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            status, kind, body = await self._document(reader)
        except _Refused as refused:
            status, kind, body = json_answer({"error": {"message": str(refused)}}, refused.status)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body

    async def _document(self, reader: asyncio.StreamReader) -> Answer:
        method, path, headers = await _head(reader)
        document = self._documents.get(path) if method == "GET" else None
        if (method, path) == ("GET", "/health"):
            if document is None:
                return json_answer({"status": "ok"})
            return await self._threads.ask(document)
        given = (headers["Authorization"] or "").encode("utf-8", "surrogateescape")
        if self._key and not hmac.compare_digest(given, self._key):
            raise _Refused(HTTPStatus.UNAUTHORIZED, "missing or wrong API key")
        if (method, path) == ("GET", "/ranks"):
            return json_answer(self._table.document())
        if method == "PUT" and path.startswith("/ranks/"):
            return self._put(path.removeprefix("/ranks/"), await _body(reader, headers))
        if document is not None:
            return await self._threads.ask(document)
        more = "".join(f", GET {path}" for path in self._documents if path != "/health")
        raise _Refused(
            HTTPStatus.NOT_FOUND,
            f"{method} {path[:80]} is not a route; there are GET /health, GET /ranks{more} and PUT "
            "/ranks/RANK",
        )

    def _put(self, rank: str, body: bytes) -> Answer:
        try:
            return json_answer(self._table.register_body(rank, body, is_trusted=bool(self._key)))
        except WireError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, str(error)) from None
        except PeerError as error:
            raise _Refused(HTTPStatus.CONFLICT, str(error)) from None


def json_answer(document: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Answer:
    return status, "application/json", msgspec.json.encode(document)


async def _head(reader: asyncio.StreamReader) -> tuple[str, str, HTTPMessage]:
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
        line, _, rest = raw.partition(b"\r\n")
        method, path, version = line.decode("ascii").split(" ")
        headers = parse_headers(BytesIO(rest))
    except asyncio.LimitOverrunError:
        raise _Refused(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the headers are over the limit of {MAX_HEAD_BYTES} bytes",
        ) from None
    except (ValueError, HTTPException):
        raise _Refused(HTTPStatus.BAD_REQUEST, "the request is not HTTP/1") from None
    if not version.startswith("HTTP/1."):
        raise _Refused(HTTPStatus.BAD_REQUEST, "the request is not HTTP/1")
    return method, path.partition("?")[0], headers


async def _body(reader: asyncio.StreamReader, headers: HTTPMessage) -> bytes:
    length = headers["Content-Length"] or ""
    if not (length.isascii() and length.isdigit()) or headers["Transfer-Encoding"]:
        raise _Refused(HTTPStatus.LENGTH_REQUIRED, "PUT needs a Content-Length")
    if len(length) > 9 or int(length) > MAX_BODY_BYTES:
        raise _Refused(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is over the limit of {MAX_BODY_BYTES} bytes",
        )
    return await reader.readexactly(int(length))
