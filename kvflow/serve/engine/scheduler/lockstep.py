"""The other ranks of a prefill, as the engine of the first rank sees them."""

from __future__ import annotations

from typing import Protocol

from kvflow.protocols.errors import Cause
from kvflow.serve.engine.model.step import Row
from kvflow.serve.engine.scheduler.prefill_steps import PrefillRequest


class Lockstep(Protocol):
    """The other ranks, which also run each step that the first rank announces."""

    @property
    def ready(self) -> bool:
        """True while all ranks are present, so that a step may be announced."""

    @property
    def most_places(self) -> tuple[int, int]:
        """The fewest pages and the fewest rows that any rank's pool has."""

    def announce(self, rows: list[Row], requests: list[PrefillRequest]) -> None: ...

    def preempt(self, request: PrefillRequest) -> None:
        """Announce that a request lost its places at this rank.

        A later step may name it again, from its first token.
        """

    def find(self, request: PrefillRequest, tokens: int) -> None:
        """Ask how many of the first `tokens` tokens of a request every rank has cached.

        The answer arrives through `PrefillEngine.agreed`, unless the request is preempted or
        dropped first.
        """

    def flush(self) -> None:
        """Flush the caches of all other ranks.

        They also release the prefixes locked for requests that no step has named yet.
        """

    def stepped(self, *, failed: bool = False) -> None:
        """Report that the most recently announced step ended at this rank, or `failed` here."""

    def break_off(self, cause: Cause) -> None:
        """End the current generation of steps, because a step failed at this rank and the other
        ranks wait for data that will not come.
        """
