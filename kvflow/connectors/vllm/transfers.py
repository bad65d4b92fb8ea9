"""Counters for one worker's transfers."""

from __future__ import annotations

import threading
from typing import Any

WAYS = ("sent", "received")
LISTS = tuple(f"{way}_{what}" for way in WAYS for what in ("seconds", "bytes"))


def no_transfers() -> dict[str, Any]:
    """Return empty counters.

    They hold the seconds and bytes of each prompt by direction, and the number of failures by code.
    For each worker whose number of blocks in quarantine changed, they hold the new number.
    """
    return {name: [] for name in LISTS} | {"failed": {}, "quarantine": {}}


class Transfers:
    """The counters of one worker. Any thread may update them."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._data = no_transfers()
        self._quarantine: int | None = None  # the last reported value

    def sent(self, size_bytes: int, seconds: float) -> None:
        self._moved("sent", size_bytes, seconds)

    def received(self, size_bytes: int, seconds: float) -> None:
        self._moved("received", size_bytes, seconds)

    def failed(self, code: str) -> None:
        with self._lock:
            failed = self._data["failed"]
            failed[str(code)] = failed.get(str(code), 0) + 1

    def quarantine(self, blocks: int) -> None:
        with self._lock:
            if blocks != self._quarantine:
                self._quarantine = self._data["quarantine"][self._worker] = blocks

    def take(self) -> dict[str, Any] | None:
        """Return the counts since the last call; None if there are none."""
        with self._lock:
            if not any(self._data.values()):
                return None
            found, self._data = self._data, no_transfers()
        return found

    def _moved(self, way: str, size_bytes: int, seconds: float) -> None:
        with self._lock:
            self._data[f"{way}_seconds"].append(seconds)
            self._data[f"{way}_bytes"].append(size_bytes)
