"""Staging of a simulated decode, and a check of the order in which rooms get places."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from kvflow.aio import Job
from kvflow.handlers.decode import DecodeShell
from kvflow.handlers.rooms import DecodeRoom, Quarantined
from kvflow.memory.copies import HostCopier
from kvflow.memory.pool import PagedPool
from kvflow.memory.staging import StagedArrivals, Staging
from kvflow.node import DecodeNode
from kvflow.proof.rules.both_sides import OVER_AT_DECODE
from kvflow.proof.sim.copies import after_half_a_copy
from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.loop import Process, VirtualThread, current_process
from kvflow.proof.sim.oracle import Oracle
from kvflow.proof.sim.pages import Books, grant_of, watch
from kvflow.proof.sim.snapshots import CopyFailedError
from kvflow.proof.sim.swap import swapped
from kvflow.protocols.pages.plan import Blocks
from kvflow.protocols.pages.spaces import Counts, counts_fit
from kvflow.protocols.waiting import PASSED_FOR_S
from kvflow.protocols.wire.messages import GrantId

LOOK_S = 0.02
"""Time between two checks of the waiting rooms."""


class _Wait(NamedTuple):
    """Number of places that a room waits for, by space; when it began to wait; its process."""

    wanted: Counts
    since_s: float
    process: Process


class Staged:
    """Staging of one pool, shared by all decodes that use the pool one after another."""

    def __init__(
        self,
        who: str,
        pool: PagedPool,
        books: Books,
        size_bytes: int,
        oracle: Oracle,
        faults: Faults,
    ) -> None:
        self.staging = Staging(pool, size_bytes, shared=False)
        self.books = watch(self.staging.host, f"staging of {who}", oracle, lambda: False)
        self.waits = 0
        """Number of rooms that had to wait."""
        self._who, self._oracle, self._waiting = who, oracle, dict[DecodeRoom, _Wait]()
        self._rooms: Mapping[GrantId, DecodeRoom] = {}  # rooms of the current decode
        copier = _HalfCopier()
        self.staging._copier = copier
        self.copies = _Copies(copier, (self.books, books), oracle, faults)

    def serve(self, node: DecodeNode) -> None:
        assert isinstance(node._arrivals, StagedArrivals)
        node._arrivals._threads.executor = self.copies
        self._rooms = node.shell.rooms

    def close(self) -> None:
        self.staging.close()

    # --- rooms that wait

    def waits_now(self, room: DecodeRoom, wanted: Counts, process: Process) -> None:
        if room in self._waiting:
            return
        self.waits += 1
        if not self._waiting:
            self._oracle.loop.later(LOOK_S, self._look)
        self._waiting[room] = _Wait(wanted, self._oracle.loop.time(), process)
        self._oracle.trace(lambda: f"room {room.room} waits for {wanted} places of staging")

    def has_its_places(self, room: DecodeRoom) -> None:
        """Verify that a room which got its places passed no room that had waited too long (I7)."""
        for other, wait in self._still_waiting():
            if other is room:
                break
            if (waited_s := self._oracle.loop.time() - wait.since_s) >= PASSED_FOR_S:
                text = f"{self._who}: room {room.room} gets staging before room {other.room}"
                self._oracle.broken("I7", f"{text}, which has waited for {waited_s:.2f} s")
        self._waiting.pop(room, None)

    def _look(self) -> None:
        """Verify that the oldest waiting room does not wait for places that are free (I7)."""
        for room, wait in list(self._waiting.items()):
            if room.ended or wait.process.dead:
                del self._waiting[room]
        if not self._waiting:
            return
        # Only the oldest room has a turn: the others may have to wait behind it.
        for room, wait in self._still_waiting():
            if wait.process.parked is None and self._fits(wait.wanted, lambda owner: owner is None):
                text = f"room {room.room} waits for {wait.wanted} places that are free"
                self._oracle.broken("I7", f"{self._who}: {text}")
            break
        self._oracle.loop.later(LOOK_S, self._look)

    def _still_waiting(self) -> Iterator[tuple[DecodeRoom, _Wait]]:
        """Yield the rooms that wait, the oldest first.

        Rooms that need places in quarantine are left out, because such places may never return.
        """
        for room, wait in self._waiting.items():
            if not room.ended and self._fits(wait.wanted, lambda owner: not self._is_kept(owner)):
                yield room, wait

    def _is_kept(self, owner: Hashable | None) -> bool:
        """Return True if the places of this owner become free only after proof arrives."""
        room = self._rooms.get(GrantId(grant)) if (grant := grant_of(owner)) is not None else None
        return isinstance(owner, Quarantined) or (room is not None and room.phase in OVER_AT_DECODE)

    def _fits(self, wanted: Counts, counts: Callable[[Hashable | None], bool]) -> bool:
        """Return True if enough places that are not withheld have owners that satisfy `counts`."""
        books = self.books
        owners = enumerate(books.owners)
        places = [p for p, owner in owners if counts(owner) and p not in books.withheld]
        return counts_fit(wanted, books.counted(places))


class _HalfCopier:
    """Copier that copies the first half of the blocks, and keeps the second half for later."""

    def __init__(self) -> None:
        self._rest: list[Blocks] = []

    def copy(self, blocks: Blocks) -> None:
        half = blocks.sizes.size // 2
        HostCopier.copy(Blocks(*(column[:half] for column in blocks)))
        self._rest.append(Blocks(*(column[half:] for column in blocks)))

    def take_rest(self) -> list[Blocks]:
        rest, self._rest = self._rest, []
        return rest

    def pin(self, pool: PagedPool) -> None:
        """Do nothing: plain copies need no pinned memory."""

    def close(self) -> None:
        """Do nothing: there is no resource to release."""


class _Copies(VirtualThread):
    """Executor that runs shipped page tasks in two halves, with a delay before each.

    The places of a copy count as in use from its first half to its end.
    """

    def __init__(
        self, copier: _HalfCopier, books: tuple[Books, Books], oracle: Oracle, faults: Faults
    ) -> None:
        self._copier, self._books, self._oracle, self._faults = copier, books, oracle, faults
        self.ended = 0

    def begin(self, done: asyncio.Future[Any], job: Job[Any]) -> None:
        assert isinstance(job.work, partial)
        lent, pages, _ = job.work.args
        fault = self._faults.of_copy()
        self._oracle.trace(
            lambda: f"brings {lent.tolist()} of staging to {pages.tolist()}, {fault or 'no fault'}"
        )
        staged, own = self._books
        used = [(staged, place) for place in lent.tolist()]
        used += [(own, place) for place in pages.tolist()]
        after_half_a_copy(self._oracle.loop, fault, self._first_half, done, job, used, fault)

    def _first_half(
        self, done: asyncio.Future[Any], job: Job[bytes], used: list[tuple[Books, int]], fault: str
    ) -> None:
        if not job.begin():
            return None
        answer = job.work(job.is_cancelled)
        for books, place in used:
            books.readers[place] += 1
        rest = self._copier.take_rest()
        return after_half_a_copy(
            self._oracle.loop, fault, self._second_half, done, answer, rest, used, fault
        )

    def _second_half(
        self,
        done: asyncio.Future[Any],
        answer: bytes,
        rest: list[Blocks],
        used: list[tuple[Books, int]],
        fault: str,
    ) -> None:
        for books, place in used:
            books.readers[place] -= 1
        if fault == "failed copy":
            return done.set_exception(CopyFailedError())
        for blocks in rest:
            HostCopier.copy(blocks)
        self.ended += 1
        return done.set_result(answer)


def waits_observed(
    oracle: Oracle, by_pool: Mapping[PagedPool, Staged]
) -> AbstractContextManager[None]:
    """Make every decode in this process report the rooms that wait for the staging of its pool."""
    stage = DecodeShell._stage

    def staged(shell: DecodeShell, room: DecodeRoom, wanted: Counts) -> bool:
        seen = oracle.by_process[current_process()]
        got = stage(shell, room, wanted)
        if got:
            by_pool[seen.pool].has_its_places(room)
        else:
            by_pool[seen.pool].waits_now(room, wanted, seen.process)
        return got

    return swapped(DecodeShell, "_stage", staged)
