"""What users and the data plane hold of rooms: decode's room,
the engine's leg at prefill, a write.
"""

from __future__ import annotations

from typing import Protocol

from kvflow.proof.bare.job import DecodeJob, PrefillJob
from kvflow.proof.bare.pages import Pages
from kvflow.proof.sim.both_sides import Promise, Side, promise_of, promises_of
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.errors import Cause
from kvflow.protocols.ports import WriteOutcome
from kvflow.protocols.prefill.records import PrefillRoomRecord


class Who(Side, Protocol):
    name: str
    routes: set[int]  # decodes that it can write to


class Room:
    """What decode's user holds."""

    __slots__ = (
        *(
            "begun",
            "cause",
            "freed",
            "held_back",
            "home",
            "job",
            "keys",
            "linked",
            "node",
            "over",
            "pages",
            "record",
        ),
        "told",
    )

    def __init__(self, node: Who, home: Pages, record: DecodeRoomRecord, job: DecodeJob) -> None:
        self.node, self.home, self.record, self.job = node, home, record, job
        self.keys = promises_of(node.incarnation, record)
        self.pages: list[int] = []
        self.linked = False  # pages are to be taken
        self.held_back = job.waits or job.offers_after_s is not None
        self.begun = False  # it was told that prefill has begun
        self.told = False
        self.cause: Cause | None = None
        self.over = self.freed = False


class Leg:
    """What the engine holds of one room."""

    __slots__ = (
        *(
            "cause",
            "chunks",
            "computing",
            "job",
            "matched",
            "number",
            "pages",
            "queues",
            "record",
            "released",
            "sent",
        ),
        "told",
    )

    def __init__(self, record: PrefillRoomRecord, job: PrefillJob) -> None:
        self.record, self.job = record, job
        self.pages: list[int] = []  # ours, one for each page of the prompt
        self.chunks: list[int] = []
        self.number = 0  # of the chunk that comes next
        self.sent = 0  # how many of `pages` were sent, or are at decode already
        self.matched = self.computing = False
        self.queues = False  # it waits for its turn
        self.told = self.released = False
        self.cause: Cause | None = None


class Write:
    """`sources` and `targets` page by page, `next` of them in the target's memory."""

    __slots__ = ("home", "key", "leg", "next", "number", "outcome", "sources", "targets")

    def __init__(
        self,
        number: int,
        key: Promise,
        leg: Leg,
        sources: list[int],
        home: Pages,
        targets: list[int],
    ) -> None:
        self.number, self.key, self.leg = number, key, leg
        self.sources, self.home, self.targets = sources, home, targets
        self.next = 0
        self.outcome: WriteOutcome | None = None


def key_of(node: Who, record: PrefillRoomRecord) -> Promise:
    """Of a room at prefill that decode's half has come to."""
    promise = promise_of(node.incarnation, record)
    assert promise is not None
    return promise
