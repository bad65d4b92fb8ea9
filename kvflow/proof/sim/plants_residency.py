"""Planted bugs of requests that leave the device and come back: snapshots that refer to the pool,
state left out or released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

from kvflow.handlers.rooms import DecodeRoom
from kvflow.memory import residency as residents
from kvflow.memory import snapshot as snapshots
from kvflow.memory.residency import Resident
from kvflow.memory.snapshot import Snapshot, SnapshotStore
from kvflow.proof.sim.loop import Process, current_process
from kvflow.proof.sim.swap import swapped, swapped_cells, swapped_item
from kvflow.protocols.machines.residency import (
    TABLE,
    ResidencyCommand,
    ResidencyKind,
    ResidencyPhase,
)
from kvflow.protocols.machines.tables import Cell, Move
from kvflow.protocols.pages import plan
from kvflow.protocols.pages.layout import NO_PLACES, Places, PoolLayout
from kvflow.protocols.pages.plan import Pairing
from kvflow.serve.engine.model.thread import ModelThread

Installed = AbstractContextManager[object]
P, K, C = ResidencyPhase, ResidencyKind, ResidencyCommand


class ResidencyPlant(NamedTuple):
    """Fields of a `plants.Plant`."""

    name: str
    text: str
    install: Callable[[], Installed]
    invariant: str


def _view_instead_of_copy() -> Installed:
    """Note a copy to host memory, and make it only when the snapshot is read."""
    original, views = SnapshotStore._copy, dict[tuple[Any, ...], Places]()

    def key(store: SnapshotStore, places: Places) -> tuple[Any, ...]:
        return (store, *places.pages.tolist(), -1, *places.rows.tolist())

    async def copy(
        self: SnapshotStore, pairing: Pairing, source: Places, target: Places, other: SnapshotStore
    ) -> None:
        if pairing is self._out:
            views[key(self, target)] = source
            return
        await original(other, other._out, views[key(other, source)], source, other)
        await original(self, pairing, source, target, other)

    return swapped(SnapshotStore, "_copy", copy)


def _handoff_is_a_view() -> Installed:
    original, slots = DecodeRoom.tell_landed, dict[Process | None, bytearray]()

    def tell_landed(self: DecodeRoom, handoff: bytes) -> None:
        slot = slots.setdefault(current_process(), bytearray(len(handoff)))
        slot[:] = handoff
        original(self, memoryview(slot))  # type: ignore[arg-type]

    return swapped(DecodeRoom, "tell_landed", tell_landed)


def _left_out(*names: str) -> Callable[[], Installed]:
    """Leave these streams out of every copy to host memory and back."""
    every = plan._typed_stretches

    class Forgetful(Pairing):
        def __init__(self, source: PoolLayout, target: PoolLayout, sides: tuple[str, str]) -> None:
            skipped = {(c.buffer, c.offset) for c in source.components if c.name in names}

            def some(*layouts: Any) -> Iterator[Any]:
                return (stretch for stretch in every(*layouts) if stretch[:2] not in skipped)

            with swapped(plan, "_typed_stretches", some):
                super().__init__(source, target, sides)

    return lambda: swapped(snapshots, "Pairing", Forgetful)


def _host_memory_freed_twice() -> Installed:
    """Free a snapshot whenever its request is closed, although it was freed before."""
    homes: dict[Snapshot, SnapshotStore] = {}

    def close(self: Snapshot) -> None:
        store = homes.setdefault(self, self._store)  # type: ignore[arg-type]
        store._open.add(self)
        store.forget(self)

    def free(here: Resident) -> None:
        if here._snapshot is not None:
            here._snapshot.close()

    again: Cell[ResidencyPhase, ResidencyCommand] = Move(P.ENDED, (C.FREE_SNAPSHOT,))
    swaps = ExitStack()
    swaps.enter_context(swapped(Snapshot, "close", close))
    swaps.enter_context(swapped_item(residents._RUN, C.FREE_SNAPSHOT, free))
    swaps.enter_context(
        swapped_cells(TABLE, {(P.ENDED, kind): again for kind in (K.COPY_ENDED, K.CLOSE)})
    )
    return swaps


def _resumed_before_the_copy_has_ended() -> Installed:
    original = SnapshotStore._copy

    async def copy(
        self: SnapshotStore, pairing: Pairing, source: Places, target: Places, other: SnapshotStore
    ) -> None:
        copying = asyncio.ensure_future(original(self, pairing, source, target, other))
        if pairing is self._out:
            await copying
        else:
            # Retrieve an error of the copy, or asyncio would log it as never retrieved.
            copying.add_done_callback(lambda _: copying.cancelled() or copying.exception())
            # The copy begins in this turn, and the request does not await its end.
            await asyncio.sleep(0)

    return swapped(SnapshotStore, "_copy", copy)


def _row_given_away_in_a_step() -> Installed:
    """Make a step hold the pages that it uses, but not the row."""
    original = ModelThread.run

    class PagesOnly:
        def __init__(self, pages: Any) -> None:
            self.pages, self.rows = pages, NO_PLACES

    async def run(self: ModelThread, sequences: SequenceOf[Any], work: Callable[[], Any]) -> Any:
        return await original(
            self,
            [PagesOnly(s.pages) for s in sequences],  # type: ignore[misc]
            work,
        )

    return swapped(ModelThread, "run", run)


def _cancelled_and_not_drained() -> Installed:
    async def wait_or_cancel(running: asyncio.Future[Any], _: Callable[[Any], object]) -> None:
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.sleep(0)
            raise

    return swapped(residents, "wait_or_cancel", wait_or_cancel)


@contextmanager
def _nothing_held(*_: object) -> Iterator[None]:
    yield


def _cells(
    cells: Mapping[tuple[ResidencyPhase, ResidencyKind], Cell[ResidencyPhase, ResidencyCommand]],
) -> Callable[[], Installed]:
    return lambda: swapped_cells(TABLE, cells)


PLANTS = (
    ResidencyPlant(
        "view instead of copy",
        "a snapshot refers to the pool's pages",
        _view_instead_of_copy,
        "I14",
    ),
    ResidencyPlant(
        "hand-over is a view",
        "a hand-over lies in a slot that is used again",
        _handoff_is_a_view,
        "I9",
    ),
    ResidencyPlant(
        "index keys left out",
        "snapshots lack a stream beside K and V",
        _left_out("0.index_k"),
        "I14",
    ),
    ResidencyPlant(
        "scales left out", "snapshots lack what there is one of a page", _left_out("0.scale"), "I14"
    ),
    ResidencyPlant(
        "row left out", "snapshots lack the state row", _left_out("1.conv", "1.ssm"), "I14"
    ),
    ResidencyPlant(
        "host memory freed twice",
        "each close of a request frees its snapshot",
        _host_memory_freed_twice,
        "I1",
    ),
    ResidencyPlant(
        "resumed before the copy has ended",
        "a request is resident as soon as its copy has begun",
        _resumed_before_the_copy_has_ended,
        "I13",
    ),
    ResidencyPlant(
        "row given away in a step",
        "a model step holds pages, and no row",
        _row_given_away_in_a_step,
        "I13",
    ),
    ResidencyPlant(
        "places let go in a copy",
        "a copy holds nothing of what it reads or writes",
        lambda: swapped(snapshots, "_held", _nothing_held),
        "I13",
    ),
    ResidencyPlant(
        "copy cancelled, not drained",
        "a request that was to move goes on while its copy still runs",
        _cancelled_and_not_drained,
        "I12",
    ),
    ResidencyPlant(
        "abort forgets host memory",
        "a request that is aborted while it is away keeps its snapshot",
        _cells({(P.AWAY, K.CLOSE): Move(P.ENDED)}),
        "I5",
    ),
    ResidencyPlant(
        "failed return taken for one",
        "a request whose way back was broken off goes on",
        _cells({(P.RETURNING, K.COPY_ENDED): Move(P.RESIDENT, (C.FREE_SNAPSHOT,))}),
        "I14",
    ),
    ResidencyPlant(
        "failed retract taken for one",
        "a request that could not be copied leaves all the same",
        _cells({(P.LEAVING, K.COPY_ENDED): Move(P.AWAY, (C.GIVE_BACK,))}),
        "I14",
    ),
)
