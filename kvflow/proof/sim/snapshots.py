"""Host memory of one decode: shipped snapshots whose copies take virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any

from kvflow.aio import Job
from kvflow.memory.pool import PagedPool
from kvflow.memory.snapshot import SnapshotStore
from kvflow.proof.sim.copies import FAILED, Copy
from kvflow.proof.sim.faults import Faults
from kvflow.proof.sim.loop import VirtualThread
from kvflow.proof.sim.oracle import Oracle
from kvflow.proof.sim.pages import Books, watch
from kvflow.proof.sim.variety import host_counts


class CopyFailedError(Exception):
    """Copy failure that the simulator injected."""

    def __init__(self) -> None:
        super().__init__(FAILED)


class Snapshots:
    """Host memory of one decode, allocated when the first request leaves the device."""

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
            layout = self._pool.layout
            limit_bytes = layout.room_bytes(host_counts(layout, self._host))
            rows = self._host[1] if layout.num_rows else 0
            self._store = store = SnapshotStore(self._pool, limit_bytes, num_rows=rows)
            who = f"host memory of {self._who}"
            self.copies.host = watch(store.host, who, self._oracle, self._faults.of_host_memory)
            store._thread.executor = self.copies
        return self._store

    def left(self) -> list[str]:
        if (store := self._store) is None:
            return []
        counts = {
            "snapshots": store.count,
            "bytes of host memory": store.used_bytes,
            "copies": len(self.copies.owners),
        }
        return [f"{self._who}: {count} {what}" for what, count in counts.items() if count]

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()

    def unmap(self) -> None:
        if self._store is not None:
            self._store.host.close()


class CopyThread(VirtualThread):
    """Replacement for the executor of copies. All of its copies may run at once."""

    def __init__(self, pool: PagedPool, books: Books, oracle: Oracle, faults: Faults) -> None:
        self._pool, self._books, self._oracle, self._faults = pool, books, oracle, faults
        self.host: Books | None = None
        self.owners: list[Hashable] = []  # owners of copies under way
        self._after_next: list[tuple[int, Callable[[], object]]] = []

    def after_next(self, turns: int, do: Callable[[], object]) -> None:
        """Call `do` once the event loop has made `turns` turns after the end of the next copy."""
        self._after_next.append((turns, do))

    def begin(self, done: asyncio.Future[Any], job: Job[Any]) -> None:
        job.begin()
        out, fault = job.arguments[0].source is self._pool.layout, self._faults.of_copy()
        assert self.host is not None
        homes = (self._books, self.host) if out else (self.host, self._books)
        copy = Copy(job, *homes, fault, lambda answer: self._end(done, owner, answer))
        owner = next(books.owners[place] for books, place in copy.used if books is self._books)
        self.owners.append(owner)
        count = len(job.arguments[1][0])
        self._oracle.trace(
            lambda: f"copies {count} pages {'out' if out else 'in'}, {fault or 'no fault'}"
        )
        copy.begin(self._oracle.loop)

    def _end(self, done: asyncio.Future[Any], owner: Hashable, answer: bool | None) -> None:
        self.owners.remove(owner)
        if answer is None:
            done.set_exception(CopyFailedError())
        else:
            done.set_result(answer)
        waiting, self._after_next = self._after_next, []
        for turns, do in waiting:
            self._in_turns(turns, do)

    def _in_turns(self, turns: int, do: Callable[[], object]) -> None:
        if turns:
            self._oracle.loop.call_soon(self._in_turns, turns - 1, do)
        else:
            do()
