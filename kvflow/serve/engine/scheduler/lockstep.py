"""The other ranks of a prefill, as the engine of the first one sees them."""

from __future__ import annotations

from typing import Protocol

from kvflow.protocols.errors import Cause
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.scheduler.prefill_steps import PrefillRequest


class Lockstep(Protocol):
    """The ranks that run each step too, after they have been told of it."""

    @property
    def ready(self) -> bool:
        """All of them are there: a step may be announced."""

    @property
    def most_places(self) -> tuple[int, int]:
        """Pages and rows of the smallest pool among them."""

    def announce(self, rows: list[Row], requests: list[PrefillRequest]) -> None: ...

    def preempt(self, request: PrefillRequest) -> None:
        """It has lost its places here; a step may name it again, from its beginning."""

    def find(self, request: PrefillRequest, tokens: int) -> None:
        """Ask how many of its first `tokens` tokens every rank has cached: `PrefillEngine.agreed`
        is told, unless it is preempted or dropped before."""

    def flush(self) -> None:
        """Forget what is cached everywhere, and what was found for requests that no step has named
        yet.
        """

    def stepped(self) -> None:
        """The step that was announced last has ended here."""

    def break_off(self, cause: Cause) -> None:
        """A step failed here: the others wait for what will not come."""
