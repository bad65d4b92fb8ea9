"""Objects that users hold for a room: decode's room, and the engine's leg at prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvflow.proof.bare.job import DecodeJob, PrefillJob
from kvflow.proof.bare.pages import DecodePages, Lease
from kvflow.proof.rules.both_sides import promises_of
from kvflow.proof.rules.judge import Side
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.machines.ownership import Ownership
from kvflow.protocols.prefill.records import PrefillRoomRecord


class Who(Side, Protocol):
    """The members of a node that rooms and writes use."""

    routes: set[int]  # incarnations of the decodes that the node can write to


class Room:
    """A room, as decode's user holds it."""

    def __init__(
        self, node: Who, home: DecodePages, record: DecodeRoomRecord, job: DecodeJob
    ) -> None:
        self.node, self.home, self.record, self.job = node, home, record, job
        self.lease: Lease = (node.incarnation, record.grant)
        self.keys = promises_of(node.incarnation, record)
        self.pages: list[int] = []
        self.linked = False  # True once every rank is linked
        self.held_back = job.waits or job.offers_after_s is not None
        self.owned = Ownership()
        self.told = self.over = False


class Leg:
    """A room, as prefill's engine holds it."""

    def __init__(self, record: PrefillRoomRecord, job: PrefillJob) -> None:
        self.record, self.job = record, job
        self.pages: list[int] = []  # prefill's places for the whole prompt
        self.chunks: Sequence[Sequence[int]] = ()  # positions of each chunk among the places
        self.number = 0  # index of the next chunk
        self.matched = self.computing = False
        self.queues = False  # True while it waits for its turn
        self.told = self.failed = self.released = False
