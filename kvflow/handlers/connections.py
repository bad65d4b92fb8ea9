"""Decode's links to prefill ranks.

Each link has a socket, a task that reads the socket and, once the link is up, a task that watches
the writer's process.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

from kvflow.handlers.shell import Shell, fenced
from kvflow.protocols import commands as c
from kvflow.protocols.commands import PeerKey
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.ports import ControlSocket, DataPlane

log = logging.getLogger(__name__)

Connect = Callable[[str, int], ControlSocket]
"""Opens the socket to a prefill rank: (control endpoint, our incarnation) -> DEALER socket.

Raises: MisuseError for an endpoint to which it cannot connect.
"""
POLL_S = 0.1


class _Connection(NamedTuple):
    socket: ControlSocket
    reader: asyncio.Task[None]


class Connections:
    """Runs the endpoint's commands that concern links."""

    def __init__(
        self, shell: Shell, endpoint: DecodeEndpoint, plane: DataPlane, connect: Connect
    ) -> None:
        self._shell, self._endpoint, self._plane, self._connect = shell, endpoint, plane, connect
        self.open: dict[PeerKey, _Connection] = {}
        self._watches: dict[PeerKey, asyncio.Task[None]] = {}
        self._polled_at_s = 0.0

    def dial(self, command: c.Dial) -> None:
        key, shell = command.peer, self._shell
        try:
            socket = self._connect(key.control, self._endpoint.core.identity.incarnation)
            if not callable(getattr(socket, "receive", None)):
                raise MisuseError(f"connect() returned {socket!r}, which is no control socket")
        except BaseException as problem:  # noqa: BLE001 - `explained` raises what must pass
            error = shell.explained(problem, f"connecting to {key.control}")
            self._endpoint.locked_out(key, str(error), shell.now())
            return
        whose = f"prefill {key.incarnation:016x}"
        read = shell.consume(
            socket, lambda _, frame: self._endpoint.receive(key, frame, shell.now()), whose
        )
        self.open[key] = _Connection(socket, shell.spawn(read, f"kvflow-link-{key.control}"))

    def hang_up(self, command: c.HangUp) -> None:
        connection = self.open.pop(command.peer, None)
        if connection is not None:
            connection.reader.cancel()
            connection.socket.close()

    def poll(self, now: float) -> None:
        """Report to the endpoint every link that prefill rejects."""
        # Reading `lockout_reason` also empties the socket's queue of events, so links in every
        # phase are polled.
        if now - self._polled_at_s >= POLL_S:
            self._polled_at_s = now
            for key, connection in list(self.open.items()):
                try:
                    reason = connection.socket.lockout_reason
                except BaseException as problem:  # noqa: BLE001 - `explained` raises what must pass
                    reason = str(
                        self._shell.explained(problem, f"asking the socket to {key.control}")
                    )
                if reason:
                    self._endpoint.locked_out(key, reason, now)

    # --- writers

    def watch_writer(self, command: c.WatchWriter) -> None:
        key = command.peer
        task = self._watches[key] = self._shell.spawn(
            self._watch(command), f"kvflow-fence-{key.control}"
        )
        task.add_done_callback(functools.partial(self._watch_ended, key))

    async def _watch(self, command: c.WatchWriter) -> None:
        shell = self._shell
        if await fenced(self._plane, command.address, shell.timing, shell.counts):
            self._endpoint.writer_died(command.peer, shell.now())
            shell.run()

    def _watch_ended(self, key: PeerKey, task: asyncio.Task[None]) -> None:
        if self._watches.get(key) is task:
            del self._watches[key]

    def stop_watch(self, command: c.StopWatch) -> None:
        self._shell.cancel(self._watches.pop(command.peer, None))
