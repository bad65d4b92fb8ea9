"""Clock of a run and record of its first violation, and the node as rules know it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvflow.proof.rules.outcome import Violation

Promise = tuple[int, int, int]
"""Source incarnation, target incarnation and grant: who may write, into whose pages."""


class Side(Protocol):
    """Node, as far as its fate is concerned."""

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    @property
    def up(self) -> bool:
        """True while alive and not halted."""

    @property
    def displaced(self) -> bool:
        """True while alive, after another process took over its address."""

    @property
    def troubled_at_s(self) -> float:
        """Time at which it was last cut off or halted."""

    @property
    def stalled_until_s(self) -> float:
        """Time at which its data plane begins to move bytes again."""

    @property
    def proven_at_s(self) -> float:
        """Time at which every watcher knows of its death."""

    def reaches(self, target: int) -> bool:
        """Return False if this prefill gave up that decode, which notices this by silence."""


class Judge:
    """Judge of one run. It keeps the first violation, and stops the run at it."""

    def __init__(
        self,
        now_s: Callable[[], float],
        later: Callable[..., object],
        stop: Callable[[], object],
        tell: Callable[[str], None] | None,
    ) -> None:
        """`later(delay_s, do, *arguments)` calls back also while nodes are halted."""
        self.now_s, self.later, self._stop, self._tell = now_s, later, stop, tell
        self.violation: Violation | None = None
        # True during the clean-up after a run, whose events prove no violation.
        self.over = False

    def broken(self, invariant: str, text: str) -> None:
        if self.violation is None and not self.over:
            self.violation = Violation(invariant, text, self.now_s())
            self.trace(lambda: f"VIOLATION of {invariant}: {text}")
            self._stop()

    def trace(self, line: Callable[[], str]) -> None:
        """Add a line to the story. The line is made only if the story has a reader."""
        if self._tell is not None:
            self._tell(line())
