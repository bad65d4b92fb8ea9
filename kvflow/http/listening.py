"""Listening sockets. A server binds its socket before it loads a model."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import web

from kvflow.http.app import new_runner
from kvflow.protocols.errors import MisuseError
from kvflow.transports.host.address import bracketed

_BACKLOG = 1024


def bound_socket(host: str, port: int, flag: str) -> socket.socket:
    """Return a bound TCP socket.

    Raises: MisuseError. If the port is in use, the error says to choose another one with `flag`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise _cannot_listen(error, host, port, flag) from None
    return made


def _cannot_listen(error: OSError, host: str, port: int, flag: str) -> MisuseError:
    if error.errno == errno.EADDRINUSE:
        return MisuseError(f"port {port} on {host} is in use; choose another one with {flag}")
    return MisuseError(f"cannot listen on {host}:{port}: {error.strerror or error}")


def url_of(made: socket.socket, host: str, tls: ssl.SSLContext | None = None) -> str:
    """Return the URL of a bound socket, as clients on this machine reach it."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, bracketed(host))
    return f"{'http' if tls is None else 'https'}://{shown}:{made.getsockname()[1]}"


def reachable(host: str) -> str:
    """Return the address at which peers reach a server that listens on `host`.

    If it listens on every interface, this is the address of this machine on the default route, or
    the loopback address if there is no route.
    """
    if host not in ("0.0.0.0", "::"):
        return host
    family, outside = (
        (socket.AF_INET, "192.0.2.1") if host == "0.0.0.0" else (socket.AF_INET6, "2001:db8::1")
    )
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends no packet: it makes the kernel choose a route.
            probe.connect((outside, 9))
        except OSError:
            return "127.0.0.1" if family == socket.AF_INET else "::1"
        return str(probe.getsockname()[0])


@asynccontextmanager
async def listening_on(
    app: web.Application, made: socket.socket, tls: ssl.SSLContext | None = None
) -> AsyncGenerator[None, None]:
    """Serve `app` on a bound socket until the block ends: by HTTPS if there is a context."""
    host, port = made.getsockname()[:2]
    runner = new_runner(app)
    await runner.setup()
    try:
        try:
            # uvloop would hide that another process already listens on the port.
            made.listen(_BACKLOG)
        except OSError as error:
            raise _cannot_listen(error, host, port, "--port") from None
        await web.SockSite(runner, made, ssl_context=tls, backlog=_BACKLOG).start()
        yield
    finally:
        await runner.cleanup()
        made.close()
