"""A role as a process: bind first, build, announce, serve until a signal, drain, leave with status 0."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
from aiohttp import web

from kvflow.config import Settings
from kvflow.protocols.errors import AbortedError, Code, MisuseError
from kvflow.server.app import new_runner

READY_FD = "KVFLOW_READY_FD"
PARENT_PID = "KVFLOW_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_BACKLOG = 1024
_log = logging.getLogger("kvflow.serve")


class Busy:
    """The requests under way, and whether more are taken: what can be drained, a front or a router."""

    def __init__(self) -> None:
        self.draining = False
        self.running = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def refuse_when_draining(self) -> None:
        """Raises: AbortedError."""
        if self.draining:
            error = AbortedError("this server is shutting down")
            error.code = Code.SHUTDOWN
            raise error

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """One request more is running, until the block ends."""
        self.running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()


class Ready(msgspec.Struct, frozen=True):
    """What a started role tells its supervisor, as one line of JSON."""

    role: str
    url: str
    pid: int
    bootstrap_port: int | None = None


def bound_socket(host: str, port: int, flag: str) -> socket.socket:
    """A bound TCP socket, so that a taken port is known before a model is loaded.

    Raises: MisuseError, one line.
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


def url_of(made: socket.socket, host: str) -> str:
    """The URL under which this machine reaches a bound socket."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{made.getsockname()[1]}"


def reachable(host: str) -> str:
    """The address peers are told for a role that listens on `host`: that of the default route for "every interface"."""
    if host not in ("0.0.0.0", "::"):
        return host
    family, outside = (socket.AF_INET, "192.0.2.1") if host == "0.0.0.0" else (socket.AF_INET6, "2001:db8::1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((outside, 9))  # a documentation address, and a datagram socket: nothing is sent
        except OSError:
            return "127.0.0.1" if family == socket.AF_INET else "::1"
        return str(probe.getsockname()[0])


@asynccontextmanager
async def serving(app: web.Application, made: socket.socket) -> AsyncGenerator[None, None]:
    """Answer on a bound socket until the block ends."""
    host, port = made.getsockname()[:2]
    runner = new_runner(app)
    await runner.setup()
    try:
        try:
            made.listen(_BACKLOG)  # here and not in uvloop, which would swallow that somebody else listened first
        except OSError as error:
            raise _cannot_listen(error, host, port, "--port") from None
        await web.SockSite(runner, made, backlog=_BACKLOG).start()
        yield
    finally:
        await runner.cleanup()
        made.close()


def die_with_parent() -> None:
    """Have the kernel kill this process when the supervisor that started it dies, however it dies."""
    parent = os.environ.pop(PARENT_PID, "")
    if not parent:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before we asked
        os._exit(1)


def leave_at_once_on_signals() -> None:
    """Until a role serves there is nothing to drain: SIGTERM and SIGINT just end it."""

    def leave(*_: object) -> None:
        os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)


def announce(ready: Ready) -> None:
    """One line for people, one for the supervisor that asked for it."""
    extra = f" (bootstrap port {ready.bootstrap_port})" if ready.bootstrap_port else ""
    _log.info("%s ready at %s%s", ready.role, ready.url, extra)
    descriptor = os.environ.pop(READY_FD, "")
    if descriptor:
        with contextlib.suppress(OSError), os.fdopen(int(descriptor), "wb") as pipe:
            pipe.write(msgspec.json.encode(ready) + b"\n")


class Stop:
    """The signals that end a role: the first one drains, a second one does not wait."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        (self.hurried if self.asked.is_set() else self.asked).set()


async def drained(busy: Busy, stop: Stop, timeout_s: float) -> None:
    """Health says 503 and new requests are refused; return when the last one ended, in time or in a hurry."""
    busy.draining = True
    if not busy.running:
        return
    _log.info("draining %d requests, at most %g s", busy.running, timeout_s)
    waits = [asyncio.create_task(event.wait()) for event in (busy.idle, stop.hurried)]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    if busy.running:
        _log.warning("ending %d requests that did not finish", busy.running)


async def serve_until_stopped(
    app: web.Application, made: socket.socket, busy: Busy, ready: Ready, drain_timeout_s: float
) -> None:
    """The life of a role whose parts are running: announce, serve, drain. Leaving ends the handlers that are left."""
    stop = Stop()
    async with serving(app, made):
        stop.listen()
        announce(ready)
        await stop.asked.wait()
        await drained(busy, stop, drain_timeout_s)


def run_role(main: Callable[[Settings], Any], settings: Settings) -> None:
    """Run a role's coroutine on uvloop, logging to stderr. Raises: MisuseError for what cannot be started."""
    import uvloop
    from prometheus_client import disable_created_metrics

    disable_created_metrics()  # type: ignore[no-untyped-call]
    set_up_logging(settings.log_level)
    die_with_parent()
    leave_at_once_on_signals()
    uvloop.run(main(settings))


def set_up_logging(level: str) -> None:
    """One line per event on stderr; libraries only from warnings up."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname).1s %(name)s: %(message)s", force=True
    )
    logging.getLogger("kvflow").setLevel(level.upper())
