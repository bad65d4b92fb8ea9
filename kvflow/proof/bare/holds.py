"""Objects that users and the data plane hold for a room: decode's room, the engine's leg at
prefill, a write.
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
    """Node as rooms and writes know it."""

    name: str
    routes: set[int]  # decodes that it can write to


class Room:
    """Room as decode's user holds it."""

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
        self.linked = False  # every rank is linked, and pages are to be taken
        self.held_back = job.waits or job.offers_after_s is not None
        self.begun = False  # the user was notified that prefill has begun
        self.told = False
        self.cause: Cause | None = None
        self.over = self.freed = False


class Leg:
    """Room as prefill's engine holds it."""

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
        self.pages: list[int] = []  # prefill's own: for the whole prompt, and its row
        self.chunks: list[int] = []
        self.number = 0  # index of the next chunk
        self.sent = 0  # pages sent, or at decode from the start
        self.matched = self.computing = False
        self.queues = False  # waits for its turn
        self.told = self.released = False
        self.cause: Cause | None = None


class Write:
    """Write of a data plane: `sources` to `targets`, page by page; the first `next` targets have
    landed.
    """

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
    """Return the promise of a room at prefill at which decode's half arrived."""
    promise = promise_of(node.incarnation, record)
    assert promise is not None
    return promise
