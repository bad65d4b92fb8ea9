"""Planted bugs that runs of bare endpoints must find.

Some are bugs in endpoints and tables that whole nodes or the walk find too. The others are too rare
for whole nodes, too large for a walk, or concern `Begun` messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from kvflow.proof.bare.decode import Decode
from kvflow.proof.plant import Installed, Plant, planting
from kvflow.proof.sim.plants import PLANTS as OF_NODES
from kvflow.proof.sim.swap import swapped, swapped_item
from kvflow.proof.walk.plants import PLANTS as WALKED
from kvflow.protocols import arguments
from kvflow.protocols.commands import Linked, QuarantinePages, RoomBegun, StartWrite
from kvflow.protocols.decode import endpoint as decode_endpoint
from kvflow.protocols.decode.core import DecodeCore
from kvflow.protocols.decode.links import PrefillPeer
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.earlier import EarlierLoans
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.machines.ranges import GrantRanges
from kvflow.protocols.pages import fine
from kvflow.protocols.pages.fine import FinePages
from kvflow.protocols.pages.layout import PageIndices, PoolLayout
from kvflow.protocols.prefill import core as prefill_core
from kvflow.protocols.prefill import records as prefill_records
from kvflow.protocols.prefill.core import PrefillCore
from kvflow.protocols.prefill.records import PrefillRoomRecord
from kvflow.protocols.wire.messages import Begun

PLANTS: list[Plant] = []
bug = planting(PLANTS)
BY_NAME = {plant.name: plant for plant in WALKED}


def _begun_told(when: Callable[[DecodeRoomRecord, int], bool]) -> Installed:
    """Make decode notify its user of every Begun for which `when(room, ranks)` holds.

    `ranks` is a bit mask of the ranks that have begun the room.
    """

    def on_begun(core: DecodeCore, peer: PrefillPeer, message: Begun, now: float) -> None:
        if (record := core.rooms.get(message.grant)) is not None:
            begun = record.begun | 1 << record.peers.index(peer)
            if when(record, begun):
                core.outbox.append(RoomBegun(record.grant))
            record.begun = begun

    return swapped_item(decode_endpoint.HANDLERS, Begun, on_begun)


def _everyone(record: DecodeRoomRecord) -> int:
    return (1 << len(record.peers)) - 1


@bug("pages taken too soon", bare=(23, "I5"))
@contextmanager
def _taken_too_soon() -> Iterator[None]:
    """Decode takes pages before prefill has begun: rooms wait for each other."""
    original = Decode.RUN[Linked]

    def linked(node: Decode, command: Linked) -> None:
        original(node, command)
        if (room := node.rooms[command.grant]).held_back and room.job.waits:
            node.turns.ask(room, node.take_turn)

    with (
        swapped_item(Decode.RUN, Linked, linked),
        swapped_item(Decode.RUN, RoomBegun, lambda *_: None),
    ):
        yield


@bug("frees one space of a room early", bare=(1, "I2"))
def _frees_one_space_early() -> Installed:
    """The places of the last space are free when a room goes into quarantine."""
    original = Decode.RUN[QuarantinePages]

    def quarantine(node: Decode, command: QuarantinePages) -> None:
        original(node, command)
        room, spaces = node.rooms[command.grant], node.pages.spaces
        if spaces[-1]:
            last = [place for place in room.pages if spaces[place] == spaces[-1]]
            room.pages = [place for place in room.pages if spaces[place] != spaces[-1]]
            node.pages.give_back(last, room.lease)

    return swapped_item(Decode.RUN, QuarantinePages, quarantine)


def _tell_begun(core: PrefillCore, record: PrefillRoomRecord) -> None:
    if record.phase is PrefillPhase.ANNOUNCED:
        assert record.peer is not None
        core.send(record.peer, Begun(**core.header(record.room, record.grant, record.peer)))


@bug("settled range begins again", bare=(1194, "I6"))
def _settled_range_begins_again() -> Installed:
    """A grant that decode has settled above an open one is not known to have ended."""
    return swapped(GrantRanges, "add", lambda *_: None)


@bug("begun before it has", bare=(0, "I4"))
def _begun_before_it_has() -> Installed:
    """Prefill says so of every announced room."""
    return swapped(PrefillCore, "tell_begun", _tell_begun)


@bug("one rank has begun", bare=(5, "I4"))
def _one_rank_has_begun() -> Installed:
    """Decode waits for no other rank."""
    return _begun_told(lambda record, _: not record.begun)


@bug("begun told twice", bare=(23, "I4"))
def _begun_told_twice() -> Installed:
    """Decode tells of a repeated Begun."""
    return _begun_told(lambda record, begun: begun == _everyone(record))


@bug("begun after the end", bare=(148, "I4"))
def _begun_after_the_end() -> Installed:
    """Decode reports that a draining room has begun."""
    return _begun_told(lambda record, begun: begun == _everyone(record) != record.begun)


@bug("earlier loans not inherited", bare=(34, "I2"))
def _earlier_loans_not_inherited() -> Installed:
    """The next decode over a pool takes over no loan of the one before it."""
    return swapped(EarlierLoans, "inherit", lambda *_: {})


@bug("small pages of a large one in another order", bare=(4, "I8"))
def _small_pages_in_another_order() -> Installed:
    """Prefill writes the small pages of a large page from its end."""
    original = FinePages.of

    def of(self: FinePages, layout: PoolLayout, *given: Any) -> PageIndices:
        found = original(self, layout, *given)
        # Only prefill gives the number of places before a chunk.
        return found[::-1].copy() if len(given) > 1 and len(layout.spaces) == 1 else found

    return swapped(FinePages, "of", of)


@bug("a chunk counted in prefill's own pages", bare=(4, "I3"))
def _counted_in_own_pages() -> Installed:
    """Prefill reports how many of its own pages a chunk has, although decode's differ in size."""
    original = prefill_records.fine_write

    def fine_write(layout: PoolLayout, record: PrefillRoomRecord, *of: Any) -> StartWrite:
        command = original(layout, record, *of)
        record.chunks[-1].fine = ()
        return command

    return swapped(prefill_core, "fine_write", fine_write)


@bug("the prefix of a large page written again", bare=(2, "I8"))
def _prefix_written_again() -> Installed:
    """A room whose prefix ends inside of a large page of prefill begins with the whole page."""
    original = fine.fine_pages

    def fine_pages(*of: Any) -> FinePages:
        found = original(*of)
        return msgspec.structs.replace(found, skipped=(0,) * len(found.skipped))

    return swapped(arguments, "fine_pages", fine_pages)


OF_THE_WALK = {
    "chunk gap ignored": (23, "I4"),
    "resurrect after terminal (walk)": (0, "I5"),
    "double ending": (1, "I4"),
    "last cause kept": (12, "I4"),
    "another life accepted": (5, "I5"),
    "refused link stays usable": (13, "I5"),
    "a displaced peer's doubts forgotten": (20, "I2"),
    "displaced with open grants": (257, "I2"),
    "abort of an unknown grant not remembered": (314, "I6"),
    "low water not raised": (61, "I6"),
    "source back not fed": (20, "I5"),
    "lost bootstrap not reported": (23, "I5"),
    "nothing sent again": (25, "I5"),
    "settled past open loans": (2, "I4"),
    "checksum ignored": (0, "I8"),
    "lent after the end": (0, "I7"),
    "goodbye names nothing": (20, "I2"),
    "goodbye without its loans": (11, "I5"),
    "leaving still opens": (34, "I4"),
    "earlier loans end with a link": (380, "I2"),
    "chunk without pages lands at once": (2, "I4"),
}
"""Plants of the walk that bare endpoints find too, with a seed that finds each and the invariant
that it breaks. Other plants of the walk are among those of whole nodes, or concern pages that only
shells have.
"""


for name, first in OF_THE_WALK.items():
    # A name in `OF_THE_WALK` has a suffix if a different plant has the same name.
    walked = BY_NAME[name.removesuffix(" (walk)")]
    PLANTS.append(Plant(name, walked.text, walked.install, {"bare": first}))
PLANTS += [plant for plant in OF_NODES if "bare" in plant.found]
