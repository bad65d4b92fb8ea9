"""Bugs that somebody has had, or might have, put into what ships from outside: the exhaustive walk must find each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec

from kvflow.protocols import decode_core, decode_inbox, prefill_inbox
from kvflow.protocols.decode import DecodeEndpoint
from kvflow.protocols.decode_links import DecodeLinks
from kvflow.protocols.decode_rooms import ChunkCheck
from kvflow.protocols.errors import Cause
from kvflow.protocols.machines import decode_room, grants, link, peer, prefill_room
from kvflow.protocols.machines import loan as loans
from kvflow.protocols.machines.decode_room import DecodeCommand, DecodeEvent, DecodeKind, DecodePhase, DecodeRoomState
from kvflow.protocols.machines.grants import GrantCommand, GrantKind, GrantPhase, GrantTable
from kvflow.protocols.machines.ledger import Ledger
from kvflow.protocols.machines.link import LinkCommand, LinkKind, LinkPhase
from kvflow.protocols.machines.loan import LoanCommand, LoanKind, LoanPhase
from kvflow.protocols.machines.peer import PeerCommand, PeerKind, PeerPhase
from kvflow.protocols.machines.prefill_room import PrefillCommand, PrefillKind, PrefillPhase
from kvflow.protocols.machines.tables import IGNORE, Move
from kvflow.protocols.ports import Landing
from kvflow.protocols.wire import messages as wire
from kvflow.testing.walk.world import Bounds

Install = Callable[[], AbstractContextManager[object]]

ONE = Bounds(chunks=2, in_flight=2, drops=1, duplicates=1, doubts=1, silences=0, restarts=False)
CALM = ONE._replace(drops=0, duplicates=0, crashes=0, aborts=0, doubts=0)
TINY = CALM._replace(chunks=1)
LOSSY = TINY._replace(drops=1)


class Plant(NamedTuple):
    """`install` puts the bug in for a while; `invariant` is what it breaks in the world `bounds`."""

    name: str
    text: str
    install: Install
    invariant: str
    bounds: Bounds = ONE


def _cells(module: Any, changes: dict[tuple[Any, Any], Any]) -> Install:
    """Other cells in a module's table."""

    def install() -> AbstractContextManager[object]:
        stack = ExitStack()
        cells = module.TABLE._cells
        for (phase, kind), cell in changes.items():
            row = [cell if other == kind else old for other, old in enumerate(cells[phase])]
            stack.enter_context(_item(cells, phase, row))
        return stack

    return install


@contextmanager
def _item(table: Any, key: Any, value: Any) -> Iterator[None]:
    before = table[key]
    table[key] = value
    try:
        yield
    finally:
        table[key] = before


def _attribute(owner: Any, name: str, value: Any) -> Install:
    return lambda: patch.object(owner, name, value)


_count_chunk, _step, _end_of_write = decode_room._count_chunk, decode_room.step, prefill_room._end_of_write
_RETURN = Move(LoanPhase.RETURNED, (LoanCommand.RETURN,))


def _all_said(room: DecodeRoomState, event: DecodeEvent) -> tuple[DecodeRoomState, DecodeKind, DecodeEvent]:
    """The last chunk of one rank counted for all."""
    counted, kind, event = _count_chunk(room, event)
    return counted, DecodeKind.ALL_LANDED if event.last and kind is DecodeKind.CHUNK_LANDED else kind, event


def _gap_ignored() -> AbstractContextManager[object]:
    """Whatever chunk comes is the next one."""
    on_chunk_done = decode_inbox.HANDLERS[wire.ChunkDone]

    def any_order(core: Any, peer: Any, message: Any, now: float) -> None:
        record = core.rooms.get(message.grant)
        if record is not None:
            message = msgspec.structs.replace(message, seq=record.next_seq(record.peers.index(peer)))
        on_chunk_done(core, peer, message, now)

    return _item(decode_inbox.HANDLERS, wire.ChunkDone, any_order)


def _taken_for_landed(phase: PrefillPhase, landing: Landing | None, **rest: Any) -> PrefillKind:
    return _end_of_write(phase, Landing.LANDED, **rest | {"doubt": False})


def _no_doubt(phase: PrefillPhase, landing: Landing | None, **rest: Any) -> PrefillKind:
    return _end_of_write(phase, landing, **rest | {"doubt": False})


def _forgets_cause(room: DecodeRoomState, event: DecodeEvent) -> tuple[DecodeRoomState, tuple[DecodeCommand, ...]]:
    step = _step(room, event)
    if event.cause is None or step[0].phase is room.phase:
        return step
    return _step(msgspec.structs.replace(room, cause=None), event)


_HURRY = Move(
    PrefillPhase.ABORTED,
    (PrefillCommand.CANCEL_WRITES, PrefillCommand.SEND_DRAINED, PrefillCommand.TELL_ENDED, PrefillCommand.END),
)

# --- in the endpoints, the links and the grants


def _room_kept(core: Any, record: Any, now: float) -> None:
    """The room stays in its table."""
    decode_core._end(core, record, now)
    core.rooms[record.grant] = record


def _any_life(links: DecodeLinks, peer: Any, message: wire.Registered) -> tuple[LinkKind, Cause | None]:
    return LinkKind.ACCEPTED, None


def _abort_forgotten() -> AbstractContextManager[object]:
    """An Abort that overtakes its Bootstrap leaves no trace."""
    stack = ExitStack()
    cell = Move(GrantPhase.UNKNOWN, (GrantCommand.END_OTHER_HALF, GrantCommand.ACKNOWLEDGE))
    stack.enter_context(_cells(grants, {(GrantPhase.UNKNOWN, GrantKind.ABORT): cell})())

    def end_other_half(core: Any, peer: Any, message: Any, now: float) -> None:
        if peer.grants.phase(message.grant) is not GrantPhase.UNKNOWN:
            return prefill_inbox._end_other_half(core, peer, message, now)
        return prefill_inbox._end_engine_half(core, message.room, message.cause, now)

    stack.enter_context(_item(prefill_inbox._RUN, GrantCommand.END_OTHER_HALF, end_other_half))
    return stack


_grants_end = GrantTable.end


def _low_water_kept(table: Any, grant: Any, sent: Any) -> None:
    before = table.low_water
    _grants_end(table, grant, sent)
    table.low_water = before


def _settles_all(ledger: Any, source: Any) -> Any:
    """Everything up to the newest grant, its loans ended or not."""
    grants_of = ledger.grants_of(source)
    return max([*grants_of, ledger._acknowledged.get(source, 0)]) + 1


def _resends_nothing(core: Any, peer: Any, grant: Any, next_seq: int) -> None:
    return None


def _any_grant_asked(core: Any, peer: Any, message: Any, now: float) -> None:
    """A grant whose Bootstrap was lost is taken for one that was told everything."""
    for belief in message.rooms:
        for command in peer.grants.feed(belief.grant, GrantKind.ASK):
            if command is GrantCommand.RESEND:
                prefill_inbox.resend(core, peer, belief.grant, belief.next_seq)
            else:
                core.send(peer, wire.Resync(rooms=(belief,), **core.between(peer)))


_lend = DecodeEndpoint.lend


def _lends_ended(endpoint: DecodeEndpoint, grant: Any, pages: Any, now: float) -> bool:
    _lend(endpoint, grant, pages, now)
    return True


_leave = DecodeEndpoint.leave


def _leaves_ajar(endpoint: DecodeEndpoint, now: float) -> None:
    _leave(endpoint, now)
    endpoint._leaving = None


def _not_again(*_: object) -> None:
    return None


TABLES: tuple[Plant, ...] = (
    Plant(
        "free on timer",
        "a loan that was not answered in time is over",
        _cells(loans, {(LoanPhase.RECALLED, LoanKind.REPEAT_DUE): _RETURN}),
        "I2",
    ),
    Plant(
        "ack before drain",
        "Abort is answered while writes still run",
        _cells(
            prefill_room,
            {(PrefillPhase.TRANSFERRING, PrefillKind.ABORT_RECEIVED): _HURRY}
            | {(PrefillPhase.ABORTED, kind): IGNORE for kind in PrefillKind},
        ),
        "I2",
    ),
    Plant(
        "abort never retried",
        "Abort is said once",
        _cells(loans, {(LoanPhase.RECALLED, LoanKind.REPEAT_DUE): IGNORE}),
        "rest",
    ),
    Plant(
        "restart taken for death",
        "a lost source is a dead one: its loans are over",
        _cells(
            loans,
            {
                (phase, LoanKind.SOURCE_LOST): _RETURN
                for phase in (LoanPhase.LENT, LoanPhase.RECALLED, LoanPhase.DOUBTFUL)
            },
        ),
        "I2",
    ),
    Plant(
        "failed handle taken for landed",
        "a write that ended in error counts like one that landed",
        _attribute(prefill_room, "_end_of_write", _taken_for_landed),
        "I3",
    ),
    Plant(
        "doubt forgotten",
        "a drain that ends well forgets the write before it that did not",
        _attribute(prefill_room, "_end_of_write", _no_doubt),
        "I2",
    ),
    Plant(
        "unproven taken for drained",
        "any answer to Abort ends the loan",
        _cells(
            loans,
            {(phase, LoanKind.UNPROVEN): _RETURN for phase in (LoanPhase.LENT, LoanPhase.RECALLED, LoanPhase.DOUBTFUL)},
        ),
        "I2",
    ),
    Plant(
        "room failed ends the loan",
        "a room that failed is taken for one that has drained: its loans are over, not recalled",
        _cells(loans, {(LoanPhase.LENT, LoanKind.RECALL): _RETURN}),
        "I2",
    ),
    Plant(
        "success before all ranks",
        "the last chunk of one rank is success",
        _attribute(decode_room, "_count_chunk", _all_said),
        "I8",
        TINY._replace(ranks=2),
    ),
    Plant("chunk gap ignored", "a chunk out of order is counted as the next", _gap_ignored, "I8"),
    Plant(
        "resurrect after terminal",
        "a room that has ended stays where words find it",
        lambda: _item(decode_core._RUN, DecodeCommand.END, _room_kept),
        "I5",
    ),
    Plant(
        "double ending",
        "an Abort that comes while prefill drains tells the engine again",
        _cells(
            prefill_room,
            {
                (PrefillPhase.DRAINING, PrefillKind.ABORT_RECEIVED): Move(
                    PrefillPhase.DRAINING, (PrefillCommand.TELL_ENDED,)
                )
            },
        ),
        "I4",
    ),
    Plant(
        "last cause kept",
        "a later cause replaces the first",
        _attribute(decode_core, "step", _forgets_cause),
        "I4",
    ),
    Plant(
        "success without the last word",
        "a room that lost its source is told to its client as a success",
        _cells(
            decode_room,
            {
                (DecodePhase.TRANSFERRING, DecodeKind.SOURCE_LOST): Move(
                    DecodePhase.SUCCESS,
                    (DecodeCommand.TELL_LANDED, DecodeCommand.RECALL_LOANS, DecodeCommand.END),
                )
            },
        ),
        "I8",
    ),
)
"""In rooms and loans; the seeds find most of them too."""

ENDPOINTS: tuple[Plant, ...] = (
    Plant(
        "another life accepted",
        "Registered is taken for an acceptance, whoever sent it and whatever it says",
        _attribute(DecodeLinks, "registered", _any_life),
        "I6",
        TINY._replace(crashes=1, restarts=True, registered=False),
    ),
    Plant(
        "refused link stays usable",
        "a refusal is taken for an acceptance",
        _cells(
            link,
            {(LinkPhase.REGISTERING, LinkKind.REFUSED): Move(LinkPhase.UP, (LinkCommand.START_ROOMS,))},
        ),
        "rest",
        TINY._replace(targets=0, registered=False),
    ),
    Plant(
        "displaced though in doubt",
        "a decode some of whose writes may still land is forgotten",
        _attribute(grants, "_UNSETTLED", (GrantPhase.ANNOUNCED, GrantPhase.OPEN)),
        "I2",
        TINY._replace(doubts=1, silences=2, others=1, targets=1),
    ),
    Plant(
        "displaced with open grants",
        "a silent decode loses its place while a room of it is written",
        _attribute(GrantTable, "all_settled", True),
        "I2",
        TINY._replace(silences=1, others=1, targets=1),
    ),
    Plant(
        "route closed early",
        "a dead decode's route is closed while writes run on it",
        _cells(
            peer,
            {
                (PeerPhase.UP, PeerKind.DIED): Move(PeerPhase.DEAD, (PeerCommand.LOSE_ROOMS, PeerCommand.CLOSE_ROUTE)),
                (PeerPhase.DEAD, PeerKind.IDLE): Move(PeerPhase.FORGOTTEN, (PeerCommand.FORGET,)),
            },
        ),
        "I2",
        TINY._replace(crashes=1),
    ),
    Plant(
        "abort of an unknown grant not remembered",
        "a Bootstrap that comes after its Abort opens a room",
        _abort_forgotten,
        "I2",
        TINY._replace(drops=1, duplicates=1, aborts=1, in_flight=3),
    ),
    Plant(
        "low water not raised",
        "an evicted grant may begin again",
        _attribute(GrantTable, "end", _low_water_kept),
        "I2",
        TINY._replace(duplicates=1, closed_grants=0, aborts=1),
    ),
    Plant(
        "evicted doubt forgotten",
        "a grant in doubt that is evicted counts as drained",
        _cells(grants, {(GrantPhase.DOUBTFUL, GrantKind.EVICT): Move(GrantPhase.BELOW)}),
        "I2",
        LOSSY._replace(doubts=1, closed_grants=0),
    ),
    Plant(
        "source back not fed",
        "loans in doubt are not asked for again when prefill comes back",
        lambda: _item(decode_core._TASKS, "ask", _not_again),
        "rest",
        TINY._replace(silences=1),
    ),
    Plant(
        "lost bootstrap not reported",
        "prefill takes a grant that was only announced for one it has told everything",
        lambda: _item(prefill_inbox.HANDLERS, wire.Resync, _any_grant_asked),
        "rest",
        LOSSY._replace(announce=True),
    ),
    Plant(
        "nothing sent again",
        "what decode missed is not sent again",
        _attribute(prefill_inbox, "resend", _resends_nothing),
        "rest",
        LOSSY,
    ),
    Plant(
        "unknown grant not reported",
        "a grant that prefill does not know is not named",
        _cells(grants, {(GrantPhase.UNKNOWN, GrantKind.ASK): IGNORE}),
        "rest",
        LOSSY,
    ),
    Plant(
        "fenced without death",
        "another life at the address ends the loans of the one before",
        _cells(
            link,
            {
                (phase, LinkKind.REPLACED): Move(
                    LinkPhase.GONE, (LinkCommand.HANG_UP, LinkCommand.LOSE_ROOMS, LinkCommand.END_LOANS)
                )
                for phase in (LinkPhase.UP, LinkPhase.SILENT)
            },
        ),
        "I2",
        TINY._replace(crashes=1, restarts=True),
    ),
    Plant(
        "silence ends the loans",
        "a source that is silent is taken for a dead one",
        _cells(
            link,
            {
                (LinkPhase.UP, LinkKind.SILENCE_DUE): Move(
                    LinkPhase.SILENT, (LinkCommand.LOSE_ROOMS, LinkCommand.END_LOANS, LinkCommand.SEND_REGISTER)
                )
            },
        ),
        "I2",
        TINY._replace(silences=1),
    ),
    Plant(
        "settled past open loans",
        "decode says of loans in doubt that it needs nothing of them",
        _attribute(Ledger, "settled_below", _settles_all),
        "I2",
        TINY._replace(doubts=1, silences=1),
    ),
    Plant(
        "announcement not withdrawn",
        "a room that ends before its pages are offered is not aborted",
        _cells(loans, {(LoanPhase.ANNOUNCED, LoanKind.RECALL): _RETURN}),
        "rest",
        TINY._replace(announce=True, aborts=1),
    ),
    Plant(
        "checksum ignored",
        "a chunk lands whatever its checksum says",
        _attribute(ChunkCheck, "difference", lambda self: None),
        "I8",
        TINY._replace(verify=True, checksums=1),
    ),
    Plant(
        "lent after the end",
        "pages are taken for a room that has ended",
        _attribute(DecodeEndpoint, "lend", _lends_ended),
        "I1",
        TINY._replace(leaves=1),
    ),
    Plant(
        "leaving still opens",
        "decode opens rooms while it shuts down",
        _attribute(DecodeEndpoint, "leave", _leaves_ajar),
        "I4",
        TINY._replace(leaves=1),
    ),
    Plant(
        "decode's death unseen",
        "rooms of a decode that died go on",
        _cells(peer, {(PeerPhase.UP, PeerKind.DIED): Move(PeerPhase.DEAD)}),
        "rest",
        TINY._replace(crashes=1),
    ),
    Plant(
        "loss without its rooms",
        "the rooms of a silent prefill are not ended",
        _cells(link, {(LinkPhase.UP, LinkKind.SILENCE_DUE): Move(LinkPhase.SILENT, (LinkCommand.SEND_REGISTER,))}),
        "rest",
        TINY._replace(crashes=1, fences=False),
    ),
)
"""In endpoints, links, peers and grants."""

PLANTS = (*TABLES, *ENDPOINTS)
