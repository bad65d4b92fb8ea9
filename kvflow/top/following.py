"""Follows a router's overview, and shows it until a signal, or once."""

from __future__ import annotations

import asyncio
import functools
import ssl
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing
from typing import Any, NamedTuple

import aiohttp
import msgspec
from rich.console import Console, ConsoleRenderable
from rich.live import Live

from kvflow.http.authorization import bearer
from kvflow.http.errors import Failure
from kvflow.protocols.errors import LostError, MisuseError
from kvflow.top.screen import lost, screen

CONNECT_TIMEOUT_S = 5.0
# A router sends a snapshot every second, so this long a silence is a lost connection.
SILENCE_S = 10.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
MAX_EVENT_BYTES = 8 << 20
_SNAPSHOT = b"event: snapshot"
_DATA = b"data: "
_LOST = (LostError, aiohttp.ClientError, OSError, TimeoutError, ValueError, RecursionError)


class Source(NamedTuple):
    """A router whose overview is shown."""

    url: str
    key: str
    tls: ssl.SSLContext | None = None
    """Verifies a router at an https:// URL; without it, the system's certificates do."""


def show_top(
    router: Source, interval_s: float, *, once: bool = False, as_json: bool = False
) -> None:
    """Run `kvflow top`.

    With `once` or `as_json`, it prints one picture or one JSON object, and returns.

    Raises: MisuseError if the router refuses; LostError if one picture is wanted and none comes.
    """
    if not router.url.startswith(("http://", "https://")):
        raise MisuseError(f"--url: {router.url!r} is not an http:// or https:// URL")
    router = router._replace(url=router.url.rstrip("/"))
    try:
        if once or as_json:
            asyncio.run(_once(router, as_json=as_json))
        else:
            asyncio.run(_live(router, interval_s))
    except KeyboardInterrupt:
        return


async def _once(router: Source, *, as_json: bool = False) -> None:
    url = router.url
    try:
        async with aclosing(snapshots(router)) as following:
            # Rates need two looks.
            await anext(following)
            snapshot = await anext(following)
    except StopAsyncIteration:
        raise LostError(f"{url} ended the stream") from None
    except _LOST as error:
        raise LostError(f"{url}: {_reason(error)}") from None
    if as_json:
        sys.stdout.write(msgspec.json.encode(snapshot).decode() + "\n")
    else:
        _print(screen(snapshot, url))


async def _live(router: Source, interval_s: float) -> None:
    """Show the overview every `interval_s`, and go on after the router comes back."""
    url = router.url
    console = Console()
    pause_s, shown_at_s = FIRST_PAUSE_S, 0.0
    latest: Any = None
    with ExitStack() as stack:
        # Without a terminal, each picture follows the last, as with `top -b`.
        show: Callable[[ConsoleRenderable], None] = _print
        if console.is_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False, screen=True))
            show = functools.partial(live.update, refresh=True)

        while True:
            reason = "the stream ended"
            try:
                async for latest in snapshots(router):
                    pause_s = FIRST_PAUSE_S
                    if time.monotonic() - shown_at_s >= interval_s * 0.9:
                        shown_at_s = time.monotonic()
                        show(screen(latest, url, console.height if console.is_terminal else None))
            except _LOST as error:
                reason = _reason(error)
            show(lost(latest, url, reason))
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)


async def snapshots(router: Source) -> AsyncGenerator[Any, None]:
    """Yield the snapshots of a router until the stream ends.

    Raises: MisuseError if the router refuses, and the errors of aiohttp and of decoding.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_S)
    # `trust_env` stays off: only this router may receive the operator's key, and no proxy.
    async with (
        aiohttp.ClientSession(
            headers=bearer(router.key), timeout=timeout, read_bufsize=MAX_EVENT_BYTES
        ) as session,
        session.get(
            f"{router.url}/overview/events", allow_redirects=False, ssl=router.tls or True
        ) as answer,
    ):
        if answer.status != 200:
            message = Failure.read(answer.status, await answer.read()).message
            if answer.status >= 500:
                raise LostError(f"it answered {answer.status}: {message}")
            raise MisuseError(f"{router.url} refused ({answer.status}): {message}")
        is_snapshot = False
        async for line in answer.content:
            if line.startswith(b"event: "):
                is_snapshot = line.rstrip() == _SNAPSHOT
            elif is_snapshot and line.startswith(_DATA):
                yield msgspec.json.decode(line[len(_DATA) :])


def _print(what: ConsoleRenderable) -> None:
    # A pipe has no width. A narrow one would cut the names of workers.
    width = None if sys.stdout.isatty() else 120
    Console(width=width).print(what)


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return str(error) or type(error).__name__
