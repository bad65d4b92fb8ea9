"""The rule book of one run. It joins the judge with the rules for transfers and rooms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvflow.proof.rules.judge import Judge, Side
from kvflow.proof.rules.rooms import Rooms
from kvflow.proof.rules.transfers import Transfers


class Rules(Judge):
    def __init__(
        self,
        now_s: Callable[[], float],
        later: Callable[..., object],
        stop: Callable[[], object],
        tell: Callable[[str], None] | None,
        rooms: type[Rooms] = Rooms,
    ) -> None:
        super().__init__(now_s, later, stop, tell)
        self.transfers = Transfers(self)
        self.rooms = rooms(self, self.transfers)

    @property
    def sides(self) -> Mapping[int, Side]:
        return self.rooms.sides

    def left(
        self, source: Side, control: str, parted: Iterable[int], linked: Iterable[Side]
    ) -> None:
        """Check the goodbye of a prefill that has shut down.

        The decodes `linked` still consider it linked. The decodes `parted` acknowledged its goodbye
        or sent their own.
        """
        self.transfers.parted(source.incarnation, parted)
        self.rooms.has_left(source, control, linked)
