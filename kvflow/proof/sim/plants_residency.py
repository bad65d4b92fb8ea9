"""Planted bugs in requests that leave the device and come back: state shared or left out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, contextmanager
from typing import Any

from kvflow.handlers.decode import DecodeShell
from kvflow.memory import residency as residents
from kvflow.memory import snapshot as snapshots
from kvflow.memory.residency import Resident
from kvflow.memory.snapshot import Snapshot, SnapshotStore
from kvflow.proof.plant import Installed, Plant, planting
from kvflow.proof.sim.loop import Process, current_process
from kvflow.proof.sim.swap import swapped, swapped_cells, swapped_item
from kvflow.protocols.commands import RoomLanded
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

PLANTS: list[Plant] = []
bug = planting(PLANTS, "no request leaves a device")

P, K, C = ResidencyPhase, ResidencyKind, ResidencyCommand


@bug("view instead of copy", nodes=(0, "I14"))
def _view_instead_of_copy() -> Installed:
    """A snapshot refers to the pool's pages."""
    # Defer each copy to host memory until the snapshot is read.
    original, views = SnapshotStore._copy, dict[tuple[Any, ...], Places]()

    def key(store: SnapshotStore, places: Places) -> tuple[Any, ...]:
        return (store, *(tuple(own.tolist()) for own in places))

    async def copy(
        self: SnapshotStore, pairing: Pairing, source: Places, target: Places, other: SnapshotStore
    ) -> None:
        if pairing is self._out:
            views[key(self, target)] = source
            return
        await original(other, other._out, views[key(other, source)], source, other)
        await original(self, pairing, source, target, other)

    return swapped(SnapshotStore, "_copy", copy)


@bug("handoff is a view", nodes=(0, "I9"))
def _handoff_is_a_view() -> Installed:
    """A handoff lies in a slot that is used again."""
    original, slots = DecodeShell._landed, dict[Process | None, bytearray]()

    def landed(self: DecodeShell, command: RoomLanded) -> None:
        slot = slots.setdefault(current_process(), bytearray(len(command.handoff)))
        slot[:] = command.handoff
        view: Any = memoryview(slot)
        original(self, RoomLanded(command.grant, view))

    return swapped(DecodeShell, "_landed", landed)


def _left_out(*names: str) -> Callable[[], Installed]:
    every = plan._typed_stretches

    class Forgetful(Pairing):
        def __init__(self, source: PoolLayout, target: PoolLayout, sides: tuple[str, str]) -> None:
            skipped = {(c.buffer, c.offset) for c in source.components if c.name in names}

            def some(*layouts: Any) -> Iterator[Any]:
                return (stretch for stretch in every(*layouts) if stretch[:2] not in skipped)

            with swapped(plan, "_typed_stretches", some):
                super().__init__(source, target, sides)

    return lambda: swapped(snapshots, "Pairing", Forgetful)


@bug("host memory freed twice", nodes=(0, "I1"))
def _host_memory_freed_twice() -> Installed:
    """Each close of a request frees its snapshot."""
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


@bug("resumed before the copy has ended", nodes=(0, "I13"))
def _resumed_before_the_copy_has_ended() -> Installed:
    """A request is resident as soon as its copy has begun."""
    original = SnapshotStore._copy

    async def copy(
        self: SnapshotStore, pairing: Pairing, source: Places, target: Places, other: SnapshotStore
    ) -> None:
        copying = asyncio.ensure_future(original(self, pairing, source, target, other))
        if pairing is self._out:
            await copying
        else:
            # Retrieve the copy's error, or asyncio would log that nobody retrieved it.
            copying.add_done_callback(lambda _: copying.cancelled() or copying.exception())
            # The copy begins in this turn, and the request does not await its end.
            await asyncio.sleep(0)

    return swapped(SnapshotStore, "_copy", copy)


@bug("row given away in a step", nodes=(18, "I13"))
def _row_given_away_in_a_step() -> Installed:
    """A model step holds pages, and no row."""
    original = ModelThread.run

    class PagesOnly:
        def __init__(self, pages: Any) -> None:
            self.pages, self.rows = pages, NO_PLACES

    async def run(self: ModelThread, sequences: SequenceOf[Any], work: Callable[[], Any]) -> Any:
        held: Any = [PagesOnly(s.pages) for s in sequences]
        return await original(self, held, work)

    return swapped(ModelThread, "run", run)


@bug("copy cancelled, not drained", nodes=(3, "I12"))
def _cancelled_and_not_drained() -> Installed:
    """A request that was to move goes on while its copy still runs."""

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


bug("index keys left out", "snapshots lack a stream beside K and V", nodes=(0, "I14"))(
    _left_out("0.index_k")
)


bug("scales left out", "snapshots lack what there is one of a page", nodes=(0, "I14"))(
    _left_out("0.scale")
)


bug("row left out", "snapshots lack the state row", nodes=(0, "I14"))(_left_out("1.conv", "1.ssm"))


bug("window left out", "snapshots lack the pages of a window", nodes=(1, "I14"))(
    _left_out("2.k", "2.v", "2.scale")
)


@bug("places let go in a copy", nodes=(3, "I13"))
def _places_let_go_in_a_copy() -> Installed:
    """A copy holds nothing of what it reads or writes."""
    return swapped(snapshots, "_held", _nothing_held)
