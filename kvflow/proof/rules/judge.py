"""The judge, which keeps the first violation of a run, and the rules' view of a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvflow.proof.rules.outcome import Violation

Promise = tuple[int, int, int]
"""Incarnation of the writing prefill, incarnation of the decode that lends pages, and grant."""


class Side(Protocol):
    """The part of a node's state that the rules consult."""

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    @property
    def up(self) -> bool:
        """True while the node is alive and not halted."""

    @property
    def displaced(self) -> bool:
        """True while the node is alive although another process has taken over its address."""

    @property
    def troubled_at_s(self) -> float:
        """Time at which the node last recovered from a halt, a cut or a jam."""

    @property
    def stalled_until_s(self) -> float:
        """Time at which the node's data plane begins to move bytes again."""

    @property
    def proven_at_s(self) -> float:
        """Time by which every watcher knows of the node's death."""

    def reaches(self, target: int) -> bool:
        """Return False if this prefill gave up on `target`. Decode can tell only by the silence."""


class Judge:
    """Judge of one run. It records the first violation and then stops the run."""

    def __init__(
        self,
        now_s: Callable[[], float],
        later: Callable[..., object],
        stop: Callable[[], object],
        tell: Callable[[str], None] | None,
    ) -> None:
        """Call `stop` at the first violation, and pass the run's story to `tell`, line by line.

        `later(delay_s, do, *arguments)` calls `do` after the delay, even while nodes are halted.
        """
        self.now_s, self.later, self._stop, self._tell = now_s, later, stop, tell
        self.violation: Violation | None = None
        # True during the clean-up after a run, when nothing counts as a violation.
        self.over = False

    def broken(self, invariant: str, text: str) -> None:
        if self.violation is None and not self.over:
            self.violation = Violation(invariant, text, self.now_s())
            self.trace(lambda: f"VIOLATION of {invariant}: {text}")
            self._stop()

    def trace(self, line: Callable[[], str]) -> None:
        """Add a line to the story of the run. `line` is called only if the story has a reader."""
        if self._tell is not None:
            self._tell(line())
