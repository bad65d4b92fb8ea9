"""A role as a process: bind first, build, announce, serve until a signal, drain, leave with status 0."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from kvflow.config import Settings
from kvflow.server.http.listening import Busy, serving

READY_FD = "KVFLOW_READY_FD"
PARENT_PID = "KVFLOW_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_log = logging.getLogger("kvflow.serve")


class Ready(msgspec.Struct, frozen=True):
    """What a started role tells its supervisor, as one line of JSON."""

    role: str
    url: str
    pid: int
    bootstrap_port: int | None = None


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
