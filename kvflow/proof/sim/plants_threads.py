"""Planted bugs in the front for engines without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvflow.memory.external import ExternalPages
from kvflow.memory.quarantine import PoolQuarantine
from kvflow.node.threads.decode import DecodeThread
from kvflow.node.threads.loop import LoopThread
from kvflow.node.threads.node import NodeThread
from kvflow.node.threads.rooms import DecodeThreadRoom
from kvflow.proof.plant import Installed, Plant, planting
from kvflow.proof.sim.swap import swapped
from kvflow.protocols.arguments import NO_PAGES
from kvflow.protocols.errors import Cause, KvflowError
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import PageStore

PLANTS: list[Plant] = []
bug = planting(PLANTS, "no engine stands before an endpoint")


@bug("pages idle before the drain", nodes=(33, "I2"))
def idle_before_the_drain() -> Installed:
    """Pages of a room at decode are idle as soon as it has failed."""
    original = NodeThread._fail

    def fail(self: NodeThread[Any, Any, Any], room: Any, error: KvflowError) -> None:
        original(self, room, error)
        handle = self._rooms.get(room)
        if not isinstance(room, DecodeThreadRoom) or handle is None or handle.when_released.given:
            return
        if handle.holding.state.own:
            self.pages.unhold(handle.pages)
            handle.holding.pages = NO_PAGES

    return swapped(NodeThread, "_fail", fail)


@bug("released as it fails", nodes=(7, "I2"))
def released_as_it_fails() -> Installed:
    """A room is called released as soon as it has failed."""
    original = NodeThread._followed

    def followed(
        self: NodeThread[Any, Any, Any], room: Any, handle: Any, error: BaseException | None
    ) -> None:
        if error is None:
            return original(self, room, handle, error)
        handle.close(self._explained(error, room).cause())
        self._fail(room, self._explained(error, room))
        return self._release(room)

    return swapped(NodeThread, "_followed", followed)


@bug("closed before it was opened", nodes=(9, "I4"))
def closed_before_opened_forgotten() -> Installed:
    """The end of a room is forgotten while the loop has not opened it yet."""

    def close_room(self: NodeThread[Any, Any, Any], room: Any, cause: Cause) -> None:
        handle = self._rooms.get(room)
        if self._thread is not None and handle is not None:
            self._thread.post(partial(self._close_room, room, cause))

    return swapped(NodeThread, "close_room", close_room)


@bug("last posted first", nodes=(9, "I7"))
def last_posted_first() -> Installed:
    """What waits for the loop runs in reverse."""
    original = LoopThread._run_posted

    def run_posted(self: LoopThread) -> None:
        with self._lock:
            self._posted.reverse()
        original(self)

    return swapped(LoopThread, "_run_posted", run_posted)


@bug("opened after the close", nodes=(973, "I4"))
def opened_after_the_close_forgotten() -> Installed:
    """A room whose turn comes when the node has closed gets no event."""
    original = NodeThread._open

    def open_room(
        self: NodeThread[Any, Any, Any], room: Any, opened: Any, pages: PageIndices
    ) -> None:
        if self._closed:
            return self.pages.unhold(pages)
        return original(self, room, opened, pages)

    return swapped(NodeThread, "_open", open_room)


@bug("offered too late and kept", nodes=(54, "I5"))
def offered_too_late_and_kept() -> Installed:
    """Pages that are offered to a room which has ended meanwhile stay busy."""
    original = NodeThread._pass_on

    def pass_on(
        self: NodeThread[Any, Any, Any], room: Any, pages: PageIndices, use: Callable[[Any], None]
    ) -> None:
        handle = self._rooms.get(room)
        if not isinstance(self, DecodeThread) or (handle is not None and not handle.ended):
            original(self, room, pages, use)

    return swapped(NodeThread, "_pass_on", pass_on)


@bug("events lost between polls", nodes=(7, "I4"))
def events_lost_between_polls() -> Installed:
    """Only the last of several rooms that fail between two polls is reported."""
    original = NodeThread._tell

    def tell(self: NodeThread[Any, Any, Any], event: Any) -> None:
        # One slot for all failures between two polls: the last one overwrites the others.
        if event.kind == "failed":
            kept: Sequence[Any] = [other for other in self._events if other.kind != "failed"]
            self._events.clear()
            self._events.extend(kept)
        original(self, event)

    return swapped(NodeThread, "_tell", tell)


@bug("earlier loans not busy", nodes=(111, "I1"))
def earlier_loans_forgotten() -> Installed:
    """Pages that an earlier node has lent are idle in the store of the next engine."""
    original = PoolQuarantine.keep_out_of

    def keep_out_of(self: PoolQuarantine, store: PageStore, *, always: bool = False) -> None:
        if not isinstance(store, ExternalPages):
            original(self, store, always=always)

    return swapped(PoolQuarantine, "keep_out_of", keep_out_of)
