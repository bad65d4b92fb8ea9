"""A thread that advances the writes of peers: over TCP, the process that receives a write carries
it out.

It sleeps until a connection of its agent has work: UCX watches its connections through an epoll
descriptor, and the thread polls that descriptor. An idle agent costs no CPU time.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time

from kvflow.transports.data.nixl.agent import Agent

_log = logging.getLogger(__name__)
_BLIND_MS = 1  # milliseconds between checks if UCX shows no descriptor to sleep on
_AFTER_ERROR_S = 0.01


class ProgressThread:
    """The thread of one agent. It runs from its creation until `close`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._wake_fd = os.eventfd(0)
        self._closing = False
        self.turns = self.errors = 0
        self._thread = threading.Thread(target=self._run, name="kvflow-nixl-progress", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread and wait for its end. Idempotent."""
        if not self._closing:
            self._closing = True
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
            os.close(self._wake_fd)

    def _run(self) -> None:
        poll = select.poll()
        for fd in (self._wake_fd, *self._agent.event_fds):
            poll.register(fd, select.POLLIN)
        longest_ms = None if self._agent.event_fds else _BLIND_MS
        while not self._closing:
            poll.poll(longest_ms)
            self.turns += 1
            try:
                self._agent.progress()
            except Exception as error:  # noqa: BLE001 - other peers' writes are to go on; counted
                self.errors += 1
                if self.errors == 1:
                    _log.warning(
                        "nixl cannot move on what peers send: %s: %s", type(error).__name__, error
                    )
                time.sleep(_AFTER_ERROR_S)
