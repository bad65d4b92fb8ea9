"""A role as a process: it announces itself, serves until a signal, drains, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from aiohttp import web

from kvflow.aio import Threads
from kvflow.http.draining import Drainable
from kvflow.http.listening import listening_on
from kvflow.protocols.errors import KvflowError
from kvflow.serve.config.settings import Settings
from kvflow.serve.launch.logs import set_up_logging
from kvflow.transports.host.descriptors import prepare_descriptors

READY_FD = "KVFLOW_READY_FD"
PARENT_PID = "KVFLOW_PARENT_PID"
NOTIFY_SOCKET = "NOTIFY_SOCKET"  # systemd's name for it
_PR_SET_PDEATHSIG = 1
LAST_WORDS_S = 1.0  # time to send errors to the requests that a drain ends
MAX_OPEN_FILES = 1 << 16
DESCRIPTORS = 1 << 14  # for which the kernel makes room at the start
# Longest time that the event loop waits for a thread that runs Python code. The default is 5 ms.
SWITCH_INTERVAL_S = 0.001
# Number of middle-generation collections before a full one. Python's default is 10.
FULL_COLLECTION_THRESHOLD = 1000
_log = logging.getLogger("kvflow.serve")


class Ready(msgspec.Struct, frozen=True):
    """The announcement that a started role sends to its supervisor, as one line of JSON."""

    role: str
    url: str
    pid: int
    bootstrap_port: int | None = None


def die_with_parent() -> None:
    """Make the kernel kill this process when its supervisor ends, even by kill -9."""
    parent = os.environ.pop(PARENT_PID, "")
    if not parent:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # If the supervisor ended before the prctl call, no signal will come.
    if os.getppid() != int(parent):
        os._exit(1)


def leave_at_once_on_signals() -> None:
    """End the process at once on SIGTERM and SIGINT: it has no requests to drain yet."""

    def leave(*_: object) -> None:
        os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)


def allow_many_connections() -> None:
    """Raise the limit on open files. A request is one connection, or three at a router."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, MAX_OPEN_FILES) if hard != resource.RLIM_INFINITY else MAX_OPEN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def announce(ready: Ready) -> None:
    """Log that the role is ready, and write the announcement to the supervisor's pipe, if any."""
    extra = f" (bootstrap port {ready.bootstrap_port})" if ready.bootstrap_port else ""
    _log.info("%s ready at %s%s", ready.role, ready.url, extra)
    descriptor = os.environ.pop(READY_FD, "")
    if descriptor:
        with contextlib.suppress(OSError), os.fdopen(int(descriptor), "wb") as pipe:
            pipe.write(msgspec.json.encode(ready) + b"\n")
    notify_systemd("READY=1")


def notify_systemd(state: str) -> None:
    """Send a state to systemd if it waits for one (Type=notify), as sd_notify(3) describes."""
    address = os.environ.get(NOTIFY_SOCKET, "")
    if not address.startswith(("/", "@")):
        return
    # "@" stands for the zero byte of an address in Linux's abstract namespace.
    place = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
            made.sendto(state.encode(), place)
    except OSError as error:
        _log.warning("cannot report %s to systemd at %s: %s", state, address, error)


class StopSignals:
    """A listener for SIGTERM and SIGINT. The first one sets `requested`, the second `forced`."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.forced = asyncio.Event()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.forced if self.requested.is_set() else self.requested).set()


async def drain_requests(server: Drainable, stop: StopSignals, timeout_s: float) -> None:
    """Refuse new requests, and wait until the running ones end.

    After `timeout_s` or a second signal, the running ones are ended. /health answers 503 from the
    start of this call.
    """
    server.stop()
    notify_systemd("STOPPING=1")
    if not server.running:
        return
    _log.info("draining %d requests, at most %g s", server.running, timeout_s)
    waits = [asyncio.create_task(event.wait()) for event in (server.idle, stop.forced)]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if server.running:
            _log.warning("ending %d requests that did not finish", server.running)
            server.end_requests()
            await asyncio.wait(waits[:1], timeout=LAST_WORDS_S)
    finally:
        for wait in waits:
            wait.cancel()


def settle() -> None:
    """Set what a process that serves for long wants of the interpreter and of the kernel, once its
    parts exist.
    """
    prepare_descriptors(DESCRIPTORS)
    # Objects that exist now stay, so full collections skip them and are a hundred times rarer.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION_THRESHOLD)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


async def serve_until_stopped(
    app: web.Application,
    made: socket.socket,
    server: Drainable,
    ready: Ready,
    drain_timeout_s: float,
    member: AbstractAsyncContextManager[None] | None = None,
    lost: asyncio.Future[KvflowError] | None = None,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Announce a role whose parts are running, serve, and drain.

    Handlers that still run after the drain are cancelled. `member` is entered when clients can
    reach the role, and left before it drains. `lost` completes with an error if the role cannot
    continue. Its requests end with that error, and have a moment to send it.

    Raises: the error in `lost`.
    """
    stop = StopSignals()
    async with listening_on(app, made, tls):
        stop.listen()
        settle()
        announce(ready)
        async with member or contextlib.nullcontext():
            await _stopped(stop, lost)
        cannot_go_on = lost is not None and lost.done()
        await drain_requests(server, stop, 0.0 if cannot_go_on else drain_timeout_s)
    if lost is not None and lost.done():
        raise lost.result()


async def _stopped(stop: StopSignals, lost: asyncio.Future[KvflowError] | None) -> None:
    requested = asyncio.create_task(stop.requested.wait())
    ends: list[asyncio.Future[Any]] = [requested, *([] if lost is None else [lost])]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    requested.cancel()


def run_role(role: str, main: Callable[[Settings], Any], settings: Settings) -> None:
    """Run a role's coroutine on uvloop, and log to stderr. Raises: MisuseError."""
    import uvloop
    from prometheus_client import disable_created_metrics

    disable_created_metrics()  # type: ignore[no-untyped-call]
    set_up_logging(
        settings.log_level,
        log_format=settings.log_format,
        access_log=settings.access_log,
        role=role,
    )
    die_with_parent()
    allow_many_connections()
    leave_at_once_on_signals()
    uvloop.run(main(settings))
    leave_past_hung_threads()


def leave_past_hung_threads(patience_s: float = 1.0) -> None:
    """End the process now if one of kvflow's threads still runs after `patience_s`.

    If such a thread returned while Python shuts down, it could abort the process (status 134).
    """
    Threads.close_all()
    until_s = time.monotonic() + patience_s
    ours = [
        thread
        for thread in threading.enumerate()
        if thread.daemon and thread.name.startswith("kvflow-")
    ]
    for thread in ours:
        thread.join(max(0.0, until_s - time.monotonic()))
    hung = sorted(thread.name for thread in ours if thread.is_alive())
    if hung:
        _log.warning("not waiting for threads that hang: %s", ", ".join(hung))
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
