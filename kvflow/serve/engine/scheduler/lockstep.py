"""The other ranks of a prefill, as the engine of the first rank sees them."""

from __future__ import annotations

from typing import Protocol

from kvflow.protocols.errors import Cause
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.scheduler.prefill_steps import PrefillRequest


class Lockstep(Protocol):
    """The ranks that run each step too, after the first rank announces it."""

    @property
    def ready(self) -> bool:
        """True while all of them are there: a step may be announced."""

    @property
    def most_places(self) -> tuple[int, int]:
        """Pages and rows of the smallest pool among them."""

    def announce(self, rows: list[Row], requests: list[PrefillRequest]) -> None: ...

    def preempt(self, request: PrefillRequest) -> None:
        """Announce that a request lost its places here; a step may name it again, from its
        beginning.
        """

    def find(self, request: PrefillRequest, tokens: int) -> None:
        """Ask how many of the first `tokens` tokens of a request every rank has cached.

        The answer calls `PrefillEngine.agreed`, unless the request is preempted or dropped before.
        """

    def flush(self) -> None:
        """Forget all cached pages everywhere, and what was found for requests that no step named
        yet.
        """

    def stepped(self) -> None:
        """Report that the step that was announced last ended here."""

    def break_off(self, cause: Cause) -> None:
        """End the group after a step failed here: the others wait for data that will not come."""
