"""A circuit breaker. It decides when, and for how long, calls to a failing store are paused."""

from __future__ import annotations

from kvflow.protocols.errors import MisuseError

FAILURES = 3  # failures in a row that open a breaker
PAUSE_S, MAX_PAUSE_S = 1.0, 30.0


class Breaker:
    """A circuit breaker. Consecutive failures or `open()` open it. A successful probe closes it.

    After it closes, a single failure opens it again, for twice as long. Once a call succeeds, the
    count of failures and the pause start anew.
    """

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
        self.pause_s = 0.0  # from the opening, or from a failed probe, to the next probe

    def succeed(self) -> None:
        # A call that began before the opening may succeed now. Only a probe closes the breaker.
        if not self.is_open:
            self._failures, self._next_pause_s = 0, self._first_pause_s

    def fail(self) -> bool:
        """Record a failed call. Return True if this opens the breaker."""
        if self.is_open:
            return False
        self._failures += 1
        return self._failures >= self._limit and self.open()

    def open(self) -> bool:
        """Open the breaker at once. Return False if it was open already."""
        if self.is_open:
            return False
        self.is_open = True
        self._grow()
        return True

    def probed(self, works: bool) -> None:
        """Record the result of a probe. The breaker closes if the store `works`."""
        if works:
            # The count is one below the limit now, and the pause is not reset. So a store that
            # answers probes but fails real calls is paused again after one failure.
            self.is_open, self.pause_s, self._failures = False, 0.0, self._limit - 1
        else:
            self._grow()

    def _grow(self) -> None:
        self.pause_s = self._next_pause_s
        self._next_pause_s = min(2 * self._next_pause_s, self._max_pause_s)
