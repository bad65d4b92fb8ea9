"""When a store is left alone after errors, and for how long. Pure: the time is not its business."""

from __future__ import annotations

from kvflow.protocols.errors import MisuseError

FAILURES = 3  # in a row
PAUSE_S, MAX_PAUSE_S = 1.0, 30.0


class Breaker:
    """Opens after some failures in a row, or at once; a probe closes it.

    Until something real has succeeded after that, a single failure opens it again, for twice as
    long."""

    def __init__(
        self, failures: int = FAILURES, pause_s: float = PAUSE_S, max_pause_s: float = MAX_PAUSE_S
    ) -> None:
        if failures < 1:
            raise MisuseError(f"failures {failures} is below 1")
        if not 0 < pause_s <= max_pause_s:
            raise MisuseError(f"pause_s {pause_s:g} is outside 0..{max_pause_s:g}")
        self._limit, self._first_pause_s, self._max_pause_s = failures, pause_s, max_pause_s
        self._failures, self._next_pause_s = 0, pause_s
        self.is_open = False
        self.pause_s = 0.0
        """While it is open: how long until the next probe."""

    def succeed(self) -> None:
        """What was asked of the store has worked. Late news of an open one change nothing."""
        if not self.is_open:
            self._failures, self._next_pause_s = 0, self._first_pause_s

    def fail(self) -> bool:
        """It has not. True when this has opened it."""
        if self.is_open:
            return False
        self._failures += 1
        return self._failures >= self._limit and self.open()

    def open(self) -> bool:
        """Open it at once. False when it was open."""
        if self.is_open:
            return False
        self.is_open = True
        self._grow()
        return True

    def probed(self, works: bool) -> None:
        """The answer of a probe."""
        if works:
            self.is_open, self.pause_s, self._failures = False, 0.0, self._limit - 1
        else:
            self._grow()

    def _grow(self) -> None:
        self.pause_s = self._next_pause_s
        self._next_pause_s = min(2 * self._next_pause_s, self._max_pause_s)
