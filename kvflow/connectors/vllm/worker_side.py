"""The common part of both roles in a worker: a node in one thread, and a second thread (the
follower) that handles the node's events.

Events are handled as they arrive, not once per step, because a step of the model may take longer
than a transfer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from kvflow.connectors.vllm.transfers import Transfers
from kvflow.node.threads.decode import DecodeThread
from kvflow.node.threads.prefill import PrefillThread
from kvflow.node.threads.rooms import RoomEvent
from kvflow.protocols.ports import UnprovenLoan

log = logging.getLogger("vllm.kvflow")
T = TypeVar("T", PrefillThread, DecodeThread)
_POLL_S = 1.0


class WorkerSide(Generic[T]):
    """One role in a worker.

    A lock guards the records of its requests: vLLM's thread and the follower both change them.
    """

    def __init__(self, thread: T, stats: Transfers, wake: Callable[[], None]) -> None:
        """`wake` is called when there is news for vLLM."""
        self.thread: T = thread
        self.stats, self._wake = stats, wake
        self._lock = threading.Lock()
        self._closed = False
        self._follower = threading.Thread(
            target=self._follow, name=f"kvflow-{thread.role}-events", daemon=True
        )

    def start(self) -> None:
        """Start the node and the follower. Raises: any error from `thread.start`."""
        self.thread.start()
        self._follower.start()

    def close(self) -> Sequence[UnprovenLoan]:
        """Close every room and the node, and stop the follower. Idempotent.

        Returns the loans without proof. What was lent, blocks or places of the staging, stays busy
        until the process ends.
        """
        try:
            unproven = self.thread.close()
        finally:
            self._closed = True
            # It was not started if the node could not start.
            if self._follower.ident is not None:
                self._follower.join()
        if unproven:
            log.warning(
                "%d loans are without proof: a prefill may still write into this worker's memory, "
                "so the process must end before that is used",
                len(unproven),
            )
        return unproven

    def _follow(self) -> None:
        wait_s = _POLL_S
        while not self._closed:
            events = self.thread.poll(timeout_s=wait_s)
            with self._lock:
                for event in events:
                    self._handle(event)
                wait_s = self._expire()
            if events:
                self._wake()

    def _expire(self) -> float:
        """Close overdue rooms. Return the seconds for which the follower may wait for an event."""
        return _POLL_S

    def _handle(self, event: RoomEvent[Any]) -> None:
        raise NotImplementedError
