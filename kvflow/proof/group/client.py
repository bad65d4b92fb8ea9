"""One request of a group: the answer to its client, and the job for the engine of each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

from kvflow.proof.bare.job import Issue, PrefillJob
from kvflow.proof.sim.variety import LAYOUT
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.group.member import TicketKey
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.wire.group import Ticket


class Fate(NamedTuple):
    """The misfortunes of one request. None stands for a misfortune that does not happen.

    A field that holds a rank concerns only this rank.
    """

    deadline_s: float | None = None
    rendezvous_s: float | None = None
    refused_at: int | None = None
    fails_rank: int | None = None
    fails_at: int | None = None  # index of the chunk before which the engine breaks down


NO_FATE = Fate()


class StageJob(PrefillJob):
    key: TicketKey


@dataclass(eq=False)
class Client:
    """A client, which sends one request to the leader and expects one answer."""

    number: int
    room: int
    tokens: int
    digest: bytes
    chunks: tuple[int, ...]
    issue: Issue
    broken: Callable[[str, str], None]
    _: KW_ONLY
    group: int = 0
    layout: PoolLayout = LAYOUT
    fate: Fate = NO_FATE
    ticket: Ticket | None = field(default=None, init=False)
    asked: bool = field(default=False, init=False)
    told: bool = field(default=False, init=False)
    succeeded: bool = field(default=False, init=False)

    @property
    def request(self) -> bytes:
        return self.number.to_bytes(4, "big")

    def tell(self, cause: Cause | None) -> None:
        if self.told:
            text = f"the client of room {self.room} is told two endings, the second: {cause}"
            self.broken("once", text)
        self.told, self.succeeded = True, cause is None

    def cause(self, code: Code, text: str) -> Cause:
        return self.issue(self.room, Cause(code, f"{text} #{self.room}"))

    def job(self, rank: int, key: TicketKey) -> StageJob:
        fate = self.fate
        job = StageJob(
            self.room,
            self.tokens,
            self.digest,
            self.issue,
            self.chunks,
            layout=self.layout,
            deadline_s=fate.deadline_s,
            refused=fate.refused_at == rank,
            fails_at=fate.fails_at if fate.fails_rank == rank else None,
            rendezvous_s=fate.rendezvous_s,
        )
        job.key = key
        return job
