"""A request after its room succeeded. Like an engine, `Residence` drives a shipped `Resident` and
model steps.

The content of a place identifies its request. Wrong bytes are therefore detected in each model
step, after each return, and in the places that the request left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

from kvflow.aio import Threads, run_to_end, wait_or_cancel
from kvflow.handlers.rooms import DecodeRoom
from kvflow.memory.residency import Resident
from kvflow.node import DecodeNode
from kvflow.proof.rules.transfers import handoff_of
from kvflow.proof.sim.oracle import Oracle
from kvflow.proof.sim.pages import books_of
from kvflow.proof.sim.snapshots import CopyFailedError, Snapshots
from kvflow.proof.sim.state import Squatter, State
from kvflow.proof.sim.stay import ABORT, CANCEL_TWICE, GROW, RETRACT, STEP, Act, Disturbance, Stay
from kvflow.protocols.errors import CapacityError, HostMemoryError
from kvflow.protocols.machines.residency import ResidencyPhase as P
from kvflow.protocols.pages.layout import NO_PLACES, PageIndices, Places
from kvflow.protocols.ports import PageStore
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.model.thread import ModelThread

T = TypeVar("T")
TRIES, TRY_AGAIN_S = 5, 0.02  # number of tries to come back, and the pause between two tries


class _Running:
    """The part of a sequence that `ModelThread` uses."""

    def __init__(self, places: Places) -> None:
        self.pages, self.rows = places[0], places[1] if len(places) > 1 else NO_PLACES


class _Threads(Threads):
    """The model thread of an engine with any number of spaces, which holds what a step uses."""

    def __init__(self, places: PageStore) -> None:
        super().__init__("model")
        self._places = places

    async def step(self, used: PageIndices, compute: Callable[[], None]) -> None:
        self._places.hold(used)
        try:
            await run_to_end(self.start(lambda _: compute()).ended)
        finally:
            self._places.unhold(used)


class Residence:
    def __init__(
        self, node: DecodeNode, snapshots: Snapshots, oracle: Oracle, digest: bytes, plan: Stay
    ) -> None:
        self._snapshots, self._oracle, self._digest, self._plan = snapshots, oracle, digest, plan
        self._pool, self._layout, self._books = node.pool, node.pool.layout, books_of(node.pages)
        # The shipped engine has one space of pages, and at most one of rows.
        self._shipped = len(self._layout.spaces) <= 1 + bool(self._layout.num_rows)
        self._threads = _Threads(node.pages)
        self._thread = ModelThread(self._threads, node.pages, self._layout)
        self._here: Resident | None = None  # set after its room landed
        self._handoff = b""

    async def play(self, room: DecodeRoom, handoff: bytes) -> bool:
        """Take over the room's places, and play the plan. Return True if the plan was completed."""
        owner = ("sequence", room.room, room.grant)
        places = room.keep(owner)
        self._handoff = handoff
        self._state = State(self._books, self._digest, places.tolist(), self._broken)
        pool, store = self._pool, self._snapshots.store
        own = self._layout.split(places)
        self._here = here = Resident(owner, own, allocators=pool.allocators, store=store)
        try:
            for act in self._plan.acts:
                await asyncio.sleep(act.pause_s)
                if not await self._is_here(here):
                    return False
                await self._do(here, act)
            return await self._is_here(here) if self._plan.returns else here.phase is not P.ENDED
        finally:
            # Closing is idempotent in every state (I5), so the second call must have no effect.
            here.close()
            here.close()

    def abort(self) -> None:
        if self._here is not None:
            self._here.close()

    async def _do(self, here: Resident, act: Act) -> None:
        if act.kind == STEP:
            await self._step(here, act.disturbed)
        elif act.kind == GROW:
            # Requests of odd sizes grow in the last space that has pages, the others in the first.
            paged = [n for n, space in enumerate(self._layout.spaces) if not space.in_rows]
            space = paged[-(here.sizes[0] % 2)]
            try:
                here.add(self._pool.allocators[space].take(1, here.owner), space)
            # The pool is short of pages, so the request leaves, as in an engine.
            except CapacityError:
                return await self._retract(here, act)
            self._state.add_page(space)
            await self._step(here, act.disturbed)
        elif act.kind == RETRACT:
            await self._retract(here, act)
        else:
            self._drop(here)
            await self._away(here, act)
        return None

    # --- model steps

    async def _step(self, here: Resident, disturbed: Disturbance | None) -> None:
        await self._carry_out(here, self._stepping(here), disturbed)

    async def _stepping(self, here: Resident) -> None:
        places, readers = here.places, self._books.readers
        held = self._layout.numbered(places)
        used: list[int] = held.tolist()
        for place in used:
            readers[place] += 1

        def compute() -> None:
            self._state.check(used, "in a model step")
            self._state.compute(used)
            for place in used:
                readers[place] -= 1

        if self._shipped:
            await self._thread.run([cast(Sequence, _Running(places))], compute)
        else:
            await self._threads.step(held, compute)

    # --- away and back

    async def _retract(self, here: Resident, act: Act) -> None:
        self._trace("leaves")
        try:
            await self._move(here, here.retract(), act.disturbed)
        # Without host memory the state is dropped, and computed again later.
        except HostMemoryError:
            self._drop(here)
        except CopyFailedError:
            pass
        if here.phase is P.AWAY:
            await self._away(here, act)
        elif here.phase is P.RESIDENT:
            self._check(here, "after a retract that failed")

    def _drop(self, here: Resident) -> None:
        self._trace("is dropped")
        here.drop()
        self._state.lose()

    async def _away(self, here: Resident, act: Act) -> None:
        squatter = Squatter(self._pool, self._books, here.sizes, act.squats, self._broken)
        try:
            await asyncio.sleep(act.away_s)
            if act.squats_on or act.return_disturbed is not None:
                await self._come_back(here, act.return_disturbed)
        finally:
            squatter.leave()

    async def _is_here(self, here: Resident) -> bool:
        """Bring the request back if it is away. Return True if it is resident afterwards."""
        if here.phase is P.AWAY:
            await self._come_back(here, None)
        return here.phase is P.RESIDENT

    async def _come_back(self, here: Resident, disturbed: Disturbance | None) -> None:
        """Bring the request back. It may end meanwhile, or still be away after all tries."""
        for _ in range(TRIES):
            if _phase(here) is not P.AWAY:
                return
            self._trace("comes back")
            try:
                whole = await self._move(here, here.resume(), disturbed)
            except CapacityError:
                await asyncio.sleep(TRY_AGAIN_S)
            except CopyFailedError:
                pass
            else:
                if _phase(here) is P.RESIDENT:
                    await self._back(here, whole)
            # Only the first try is disturbed, so that the others can succeed.
            disturbed = None

    async def _back(self, here: Resident, whole: bool | None) -> None:
        if self._handoff != handoff_of(self._digest):
            text = f"{here.owner}: its handoff is another one after its return"
            self._oracle.broken("I9", text)
        if bool(whole) is self._state.lost:
            self._broken("it comes back with state that was dropped, or without state that was not")
        if whole:
            self._check(here, "after its return")
        else:
            await self._step(here, None)

    async def _move(
        self, here: Resident, work: Coroutine[Any, Any, T], disturbed: Disturbance | None
    ) -> T | None:
        try:
            return await self._carry_out(here, work, disturbed)
        finally:
            if here.owner in self._snapshots.copies.owners:
                text = f"{here!r}: it is said to have moved, or not to, while it is copied"
                self._oracle.broken("I12", text)

    # --- what happens beside it

    async def _carry_out(
        self, here: Resident, work: Coroutine[Any, Any, T], disturbed: Disturbance | None
    ) -> T | None:
        if disturbed is None:
            return await work
        task = asyncio.ensure_future(work)
        self._disturb(disturbed, here.close if disturbed.how == ABORT else task.cancel)
        await wait_or_cancel(task)
        return None if task.cancelled() else task.result()

    def _disturb(self, disturbed: Disturbance, do: Callable[[], object]) -> None:
        loop, turns = self._oracle.loop, disturbed.turns
        for again in range(1 + (disturbed.how == CANCEL_TWICE)):
            if turns is None:
                loop.call_later(disturbed.after_s + again * 0.0005, do)
            else:
                self._snapshots.copies.after_next(turns + again, do)

    def _check(self, here: Resident, when: str) -> None:
        self._state.check(self._layout.numbered(here.places).tolist(), when)

    def _broken(self, text: str) -> None:
        self._oracle.broken("I14", f"{self._here!r}: {text}")

    def _trace(self, what: str) -> None:
        self._oracle.trace(lambda: f"{what}: {self._here!r}")


def _phase(here: Resident) -> P:
    """Return the phase. A type checker would assume that an await leaves `here.phase` as it was."""
    return here.phase
