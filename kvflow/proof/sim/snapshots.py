"""Host memory of one decode: a shipped store of snapshots over watched allocators, whose copies
take virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from kvflow.aio import Job
from kvflow.memory.pool import PagedPool
from kvflow.memory.snapshot import SnapshotStore
from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.loop import VirtualLoop, VirtualThread
from kvflow.proof.sim.oracle import Oracle
from kvflow.proof.sim.pages import Books, watch
from kvflow.proof.sim.times import COPY_S, SLOW_COPY_S
from kvflow.protocols.pages.layout import NO_PLACES, Places


class CopyFailedError(Exception):
    """Failure of a copy, on purpose."""

    def __init__(self) -> None:
        super().__init__("a copy fails half-way (on purpose)")


def after_half_a_copy(
    loop: VirtualLoop, fault: str, do: Callable[..., object], *arguments: object
) -> None:
    """Call `do` after the time that half of a copy with this fault takes."""
    span = SLOW_COPY_S if fault == "slow copy" else COPY_S
    loop.call_later(loop.rng.uniform(*span), do, *arguments)


class Snapshots:
    """Host memory of one decode. It is made when the first request leaves, because most decodes of
    a run need none.
    """

    def __init__(
        self,
        who: str,
        pool: PagedPool,
        books: Books,
        host: tuple[int, int],
        oracle: Oracle,
        faults: Faults,
    ):
        self._who, self._pool, self._books, self._host = who, pool, books, host
        self._oracle, self._faults = oracle, faults
        self._store: SnapshotStore | None = None
        self.copies = CopyThread(pool, books, oracle, faults)

    @property
    def store(self) -> SnapshotStore:
        if self._store is None:
            layout, (pages, rows) = self._pool.layout, self._host
            rows = rows if layout.num_rows else 0
            limit_bytes = pages * layout.page_bytes + rows * layout.row_bytes
            self._store = store = SnapshotStore(self._pool, limit_bytes, num_rows=rows)
            who = f"host memory of {self._who}"
            self.copies.host = watch(store.host, who, self._oracle, self._faults.of_host_memory)
            store.host_rows = store.host.rows if rows else None
            store._thread.executor = self.copies
        return self._store

    def left(self) -> list[str]:
        """Return a line for everything that is not at rest."""
        if (store := self._store) is None:
            return []
        counts = {
            "snapshots": store.count,
            "bytes of host memory": store.used_bytes,
            "copies": len(self.copies.owners),
        }
        return [f"{self._who}: {count} {what}" for what, count in counts.items() if count]

    async def close(self) -> None:
        """Close the store as an engine that ends: copies stop, and requests find their snapshots
        closed.
        """
        if self._store is not None:
            await self._store.close()

    def unmap(self) -> None:
        """Unmap the host memory, after the run."""
        if self._store is not None:
            self._store.host.close()


class CopyThread(VirtualThread):
    """Copies in two halves, with time before each. The places of a copy are in use from its begin
    to its end.
    """

    def __init__(self, pool: PagedPool, books: Books, oracle: Oracle, faults: Faults) -> None:
        self._pool, self._books, self._oracle, self._faults = pool, books, oracle, faults
        self.host: Books | None = None
        self.owners: list[Hashable] = []  # of copies under way
        self._after_next: list[tuple[int, Callable[[], object]]] = []

    def after_next(self, turns: int, do: Callable[[], object]) -> None:
        """Call `do` so many turns of the event loop after the end of the next copy."""
        self._after_next.append((turns, do))

    def begin(self, done: asyncio.Future[Any], job: Job[Any]) -> None:
        """Start a copy, and count it as a reader of its places on both sides."""
        work, (pairing, source, target, *rest) = job.work, job.arguments
        job.begin()
        out = pairing.source is self._pool.layout
        assert self.host is not None
        used = [
            *_used(self._books, source if out else target),
            *_used(self.host, target if out else source),
        ]
        for books, place in used:
            books.readers[place] += 1
        owner = self._books.owners[used[0][1]]
        self.owners.append(owner)
        fault = self._faults.of_copy()
        self._oracle.trace(
            lambda: (
                f"copies {len(source.pages)} pages {'out' if out else 'in'}, {fault or 'no fault'}"
            )
        )
        self._next(
            _Copy(
                done,
                lambda half: work(pairing, *half, *rest, job.is_cancelled),
                _halves(source, target),
                used,
                owner,
                fault,
            )
        )

    def _next(self, copy: _Copy) -> None:
        after_half_a_copy(self._oracle.loop, copy.fault, self._half, copy)

    def _half(self, copy: _Copy) -> None:
        whole = copy.work(copy.halves.pop(0))
        if not whole or not copy.halves:
            self._end(copy, whole)
        elif copy.fault == "failed copy":
            self._end(copy, CopyFailedError())
        else:
            self._next(copy)

    def _end(self, copy: _Copy, result: bool | Exception) -> None:
        for books, place in copy.used:
            books.readers[place] -= 1
        self.owners.remove(copy.owner)
        if isinstance(result, Exception):
            copy.done.set_exception(result)
        else:
            copy.done.set_result(result)
        waiting, self._after_next = self._after_next, []
        for turns, do in waiting:
            self._in_turns(turns, do)

    def _in_turns(self, turns: int, do: Callable[[], object]) -> None:
        if turns:
            self._oracle.loop.call_soon(self._in_turns, turns - 1, do)
        else:
            do()


Half = tuple[Places, Places]
"""Source and target of one half of a copy."""


class _Copy(NamedTuple):
    done: asyncio.Future[Any]
    work: Callable[[Half], bool]
    halves: list[Half]
    used: list[tuple[Books, int]]
    owner: Hashable
    fault: str


def _halves(source: Places, target: Places) -> list[Half]:
    """Return the halves of a copy. A row, if there is one, is in the second half."""
    half = len(source.pages) // 2
    first, last = (
        [Places(both.pages[part], both.rows if whole else NO_PLACES) for both in (source, target)]
        for part, whole in ((slice(half), False), (slice(half, None), True))
    )
    return [(first[0], first[1]), (last[0], last[1])]


def _used(books: Books, places: Places) -> list[tuple[Books, int]]:
    rows = places.rows + books.num_pages
    return [(books, place) for place in (*places.pages.tolist(), *rows.tolist())]
