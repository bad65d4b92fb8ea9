"""Planted bugs of the simulator and of the walk that live in endpoints and tables: seeds must find
each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from kvflow.proof.bare.decode import Decode
from kvflow.proof.bare.run import simulate
from kvflow.proof.sim import plants_dp_groups, plants_residency, plants_staging, plants_threads
from kvflow.proof.sim.plants import Plant, hunted
from kvflow.proof.sim.plants import all_plants as of_nodes
from kvflow.proof.sim.swap import swapped, swapped_cells, swapped_item
from kvflow.proof.walk.plants import PLANTS as OF_THE_WALK
from kvflow.protocols.commands import Linked, RoomBegun
from kvflow.protocols.decode import inbox as decode_inbox
from kvflow.protocols.decode.core import DecodeCore
from kvflow.protocols.decode.links import PrefillPeer
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.earlier import EarlierLoans
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.machines.grants import TABLE as GRANTS
from kvflow.protocols.machines.grants import GrantKind, GrantPhase
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.machines.ranges import GrantRanges
from kvflow.protocols.machines.tables import IGNORE
from kvflow.protocols.prefill.core import PrefillCore
from kvflow.protocols.prefill.records import PrefillRoomRecord
from kvflow.protocols.wire.messages import Begun

UNSEEN = {
    "free on timer": "it is in decode's shell",
    "double close": "it is in the room that users hold",
    "resurrect after terminal": "decode's shell closes a room that has ended",
    "second cancel skips the drain": "there is no task to cancel",
    "source let go": "the allocator's holds are a shell's",
    "failed slice retried": "it is in the data plane",
    "failed handle taken for landed": "it is in the data plane",
    "garbage ends the loop": "there is no task that reads",
    "earlier loans forgotten": "stores are a shell's",
    "close taken for proof": "it is in the shell's watches",
    "earlier loans of a decode forgotten by prefill": (
        "it is in prefill's shell, and no node changes its role"
    ),
}
UNSEEN |= {plant.name: "no request leaves a device" for plant in plants_residency.PLANTS}
UNSEEN |= {name: "no decode has staging" for name, *_ in plants_staging.PLANTS}
UNSEEN |= {name: "no endpoint knows of groups" for name, *_ in plants_dp_groups.PLANTS}
UNSEEN |= {name: "no engine stands before an endpoint" for name, *_ in plants_threads.PLANTS}
"""Plants of the whole-node simulator in parts that are absent here, with the reason. Each of those
before "source let go" has a counterpart in a table.
"""


def _begun_told(when: Callable[[DecodeRoomRecord, int], bool]) -> AbstractContextManager[object]:
    """Make decode notify its user of every Begun for which `when` holds; `when` receives a room and
    the ranks that sent one, as bits.
    """

    def on_begun(core: DecodeCore, peer: PrefillPeer, message: Begun, now: float) -> None:
        if (record := core.rooms.get(message.grant)) is not None:
            begun = record.begun | 1 << record.peers.index(peer)
            if when(record, begun):
                core.outbox.append(RoomBegun(record.grant))
            record.begun = begun

    return swapped_item(decode_inbox.HANDLERS, Begun, on_begun)


def _everyone(record: DecodeRoomRecord) -> int:
    return (1 << len(record.peers)) - 1


@contextmanager
def _taken_too_soon() -> Iterator[None]:
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


def _tell_begun(core: PrefillCore, record: PrefillRoomRecord) -> None:
    if record.phase is PrefillPhase.ANNOUNCED:
        assert record.peer is not None
        core.send(record.peer, Begun(**core.header(record.room, record.grant, record.peer)))


OWN = (
    Plant(
        "settled range begins again",
        "a grant that decode has settled above an open one is not known to have ended",
        lambda: swapped(GrantRanges, "add", lambda *_: None),
        "I6",
    ),
    Plant(
        "begun said once",
        "a repeated announcement is not told that its room has begun: a Begun that is lost is lost "
        "for good",
        lambda: swapped_cells(GRANTS, {(GrantPhase.OPEN, GrantKind.ANNOUNCE): IGNORE}),
        "I5",
    ),
    Plant(
        "begun before it has",
        "prefill says so of every announced room",
        lambda: swapped(PrefillCore, "tell_begun", _tell_begun),
        "I4",
    ),
    Plant(
        "one rank has begun",
        "decode waits for no other rank",
        lambda: _begun_told(lambda record, _: not record.begun),
        "I4",
    ),
    Plant(
        "begun told twice",
        "decode tells of a repeated Begun",
        lambda: _begun_told(lambda record, begun: begun == _everyone(record)),
        "I4",
    ),
    Plant(
        "begun after the end",
        "decode tells of a room that drains that it has begun",
        lambda: _begun_told(lambda record, begun: begun == _everyone(record) != record.begun),
        "I4",
    ),
    Plant(
        "earlier loans not inherited",
        "the next decode over a pool takes over no loan of the one before it",
        lambda: swapped(EarlierLoans, "inherit", lambda *_: {}),
        "I2",
    ),
    Plant(
        "pages taken too soon",
        "decode takes pages before prefill has begun: rooms wait for each other",
        _taken_too_soon,
        "I5",
    ),
)
"""Bugs too rare for whole nodes, too large for a walk, or about rooms that begin, which only this
simulator has.
"""


def all_plants() -> tuple[Plant, ...]:
    """Return all plants; a plant of the walk gets a suffix if another has the same name."""
    found = {plant.name: plant for plant in of_nodes() if plant.name not in UNSEEN}
    for plant in OF_THE_WALK:
        name = f"{plant.name} (walk)" if plant.name in found or plant.name in UNSEEN else plant.name
        found[name] = Plant(name, plant.text, plant.install, plant.invariant)
    return (*found.values(), *OWN)


def planted(name: str) -> AbstractContextManager[object]:
    """Return a context that installs the named plant, if any. Raises: MisuseError."""
    if not name:
        return nullcontext()
    known = {plant.name: plant for plant in all_plants()}
    if name not in known:
        why = (
            f", where it cannot be seen: {UNSEEN[name]}"
            if name in UNSEEN
            else f"; there are: {', '.join(known)}"
        )
        raise MisuseError(f"no plant {name!r}{why}")
    return known[name].install()


def hunt(
    name: str, seeds: Sequence[int], say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Find the first seed that shows a plant, and what it broke; no seed if all pass."""
    with planted(name):
        return hunted(name, seeds, simulate, say)
