"""A circuit breaker: when a store is left alone after errors, and for how long. It has no clock."""

from __future__ import annotations

from kvflow.protocols.errors import MisuseError

FAILURES = 3  # in a row
PAUSE_S, MAX_PAUSE_S = 1.0, 30.0


class Breaker:
    """A breaker that opens after some failures in a row, or by `open`; a probe closes it.

    After that a single failure opens it again, for twice as long, until a call succeeds."""

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
        """Time until the next probe, while the breaker is open."""

    def succeed(self) -> None:
        """Record a call that succeeded."""
        # A call that began before the breaker opened may end well after it; only a probe may close
        # it.
        if not self.is_open:
            self._failures, self._next_pause_s = 0, self._first_pause_s

    def fail(self) -> bool:
        """Record a call that failed. Return True when this opens the breaker."""
        if self.is_open:
            return False
        self._failures += 1
        return self._failures >= self._limit and self.open()

    def open(self) -> bool:
        """Open the breaker at once. Return False when it was open."""
        if self.is_open:
            return False
        self.is_open = True
        self._grow()
        return True

    def probed(self, works: bool) -> None:
        """Record the result of a probe, which closes the breaker if it `works`."""
        if works:
            # One failure below the limit: a store that answers probes but fails real calls is left
            # alone again after the first of them. `_next_pause_s` stays for the same reason.
            self.is_open, self.pause_s, self._failures = False, 0.0, self._limit - 1
        else:
            self._grow()

    def _grow(self) -> None:
        self.pause_s = self._next_pause_s
        self._next_pause_s = min(2 * self._next_pause_s, self._max_pause_s)
