"""Plausible bugs, planted in the shipped code from outside. The exhaustive walk must find each."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

from kvflow.proof.sim.plants_goodbye import goodbye_proves_what_it_names
from kvflow.proof.sim.swap import swapped_item
from kvflow.proof.walk.plants_pages import PAGES
from kvflow.proof.walk.plants_spaces import SPACES
from kvflow.proof.walk.plants_tables import LOSSY, TABLES, TINY, Plant, _attribute, _cells
from kvflow.protocols.decode import core as decode_core
from kvflow.protocols.decode.core import DecodeCore
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.decode.links import DecodeLinks
from kvflow.protocols.decode.records import ChunkCheck
from kvflow.protocols.earlier import EarlierLoans
from kvflow.protocols.errors import Cause
from kvflow.protocols.machines import grants, link
from kvflow.protocols.machines.grants import GrantCommand, GrantKind, GrantPhase, GrantTable
from kvflow.protocols.machines.ledger import Ledger
from kvflow.protocols.machines.link import LinkCommand, LinkKind, LinkPhase
from kvflow.protocols.machines.tables import Move
from kvflow.protocols.ports import WriteOutcome
from kvflow.protocols.prefill import core as prefill_core
from kvflow.protocols.prefill import endpoint as prefill_endpoint
from kvflow.protocols.prefill.core import PrefillCore
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.wire import messages as wire


def _any_life(
    links: DecodeLinks, peer: Any, message: wire.Registered
) -> tuple[LinkKind, Cause | None]:
    return LinkKind.ACCEPTED, None


def _refusal_accepted() -> AbstractContextManager[object]:
    stack = ExitStack()
    move = Move(LinkPhase.UP, (LinkCommand.START_ROOMS,))
    stack.enter_context(_cells(link, {(LinkPhase.REGISTERING, LinkKind.REFUSED): move})())
    stack.enter_context(_attribute(DecodeLinks, "check_coverage", lambda *_: "")())
    return stack


def _abort_forgotten() -> AbstractContextManager[object]:
    stack = ExitStack()
    cell = Move(GrantPhase.UNKNOWN, (GrantCommand.END_OTHER_HALF, GrantCommand.ACKNOWLEDGE))
    stack.enter_context(_cells(grants, {(GrantPhase.UNKNOWN, GrantKind.ABORT): cell})())

    def end_other_half(core: Any, peer: Any, message: Any, now: float) -> None:
        if peer.grants.phase(message.grant) is not GrantPhase.UNKNOWN:
            prefill_core._end_other_half(core, peer, message, now)
        else:
            core.end_engine_half(message.room, message.cause, now)

    stack.enter_context(
        swapped_item(prefill_core.GRANT_RUN, GrantCommand.END_OTHER_HALF, end_other_half)
    )
    return stack


_grants_end = GrantTable.end


def _low_water_kept(table: Any, grant: Any, sent: Any) -> None:
    before = table.low_water
    _grants_end(table, grant, sent)
    table.low_water = before


def _settles_all(ledger: Any, source: Any) -> Any:
    """Return a bound above every grant of `source`, even those whose loans are open."""
    grants_of = ledger.grants_of(source)
    return max([*grants_of, ledger._acknowledged.get(source, 0)]) + 1


def _any_grant_asked(core: Any, peer: Any, message: Any, now: float) -> None:
    """Answer a Resync for a grant whose Bootstrap was lost as if the Bootstrap had arrived."""
    for belief in message.rooms:
        for command in peer.grants.feed(belief.grant, GrantKind.ASK):
            if command is GrantCommand.RESEND:
                core.resend(peer, belief.grant, belief.next_seq)
            else:
                core.send(peer, wire.Resync(rooms=(belief,), **core.lives(peer.incarnation)))


_lend = DecodeEndpoint.lend


def _lends_ended(endpoint: DecodeEndpoint, grant: Any, pages: Any, now: float) -> bool:
    _lend(endpoint, grant, pages, now)
    return True


_leave = DecodeEndpoint.leave


def _leaves_ajar(endpoint: DecodeEndpoint, now: float) -> None:
    _leave(endpoint, now)
    endpoint._leaving = None


_queue_chunk = PrefillEndpoint.queue_chunk


def lands_at_once(endpoint: PrefillEndpoint, record: Any, source_pages: Any, **how: Any) -> None:
    """End the write of a chunk without pages inside `queue_chunk`. This may end the room too."""
    _queue_chunk(endpoint, record, source_pages, **how)
    if not len(source_pages):
        write = endpoint.outbox.pop().write  # type: ignore[union-attr]  # it is the StartWrite
        endpoint.write_ended(write, WriteOutcome.LANDED, how["now"])


_drop_if_idle = DecodeCore.drop_if_idle


def _drops_earlier(core: DecodeCore, peer: Any, now: float) -> None:
    if peer.phase is LinkPhase.GONE:
        core.earlier.declare_dead(peer.key.incarnation)
    _drop_if_idle(core, peer, now)


def _not_again(*_: object) -> None:
    return None


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
        "a refusal is taken for an acceptance, by a rank that sends all",
        _refusal_accepted,
        "rest",
        TINY._replace(targets=0, registered=False),
    ),
    Plant(
        "a displaced peer's doubts forgotten",
        "a decode some of whose writes may still land makes place, and none of that is remembered",
        _attribute(GrantTable, "remember_doubts", lambda *_: None),
        "I2",
        TINY._replace(doubts=1, silences=2, others=1, targets=1),
    ),
    Plant(
        "displaced with open grants",
        "a silent decode loses its place while a room of it is written",
        _attribute(GrantTable, "all_ended", True),
        "I2",
        TINY._replace(silences=1, others=1, targets=1),
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
        "source back not fed",
        "loans in doubt are not asked for again when prefill comes back",
        lambda: swapped_item(decode_core._TASKS, "ask", _not_again),
        "rest",
        TINY._replace(silences=1),
    ),
    Plant(
        "lost bootstrap not reported",
        "prefill takes a grant that was only announced for one it has told everything",
        lambda: swapped_item(prefill_endpoint.HANDLERS, wire.Resync, _any_grant_asked),
        "rest",
        LOSSY._replace(announce=True),
    ),
    Plant(
        "nothing sent again",
        "what decode missed is not sent again",
        _attribute(PrefillCore, "resend", _not_again),
        "rest",
        LOSSY,
    ),
    Plant(
        "settled past open loans",
        "decode says of loans in doubt that it needs nothing of them",
        _attribute(Ledger, "settled_below", _settles_all),
        "I2",
        TINY._replace(doubts=1, silences=1),
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
        "table",
        TINY._replace(leaves=1),
    ),
    Plant(
        "goodbye names nothing",
        "prefill says goodbye and vouches for writes that may still land",
        _attribute(GrantTable, "unproven", lambda self: ()),
        "I2",
        TINY._replace(leaves=1, doubts=1),
    ),
    Plant(
        "goodbye ends every loan",
        "decode ends the loans that prefill cannot vouch for",
        goodbye_proves_what_it_names,
        "I2",
        TINY._replace(leaves=1, doubts=1),
    ),
    Plant(
        "goodbye without its loans",
        "decode hangs up at a goodbye, and leaves the loans as they are",
        lambda: swapped_item(decode_core._TASKS, "part", _not_again),
        "rest",
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
        "earlier writer's death unseen",
        "loans of an earlier decode over the pool never end",
        _attribute(EarlierLoans, "writer_died", _not_again),
        "rest",
        TINY._replace(crashes=1, earlier=True),
    ),
    Plant(
        "earlier loans end with a link",
        "the end of a link to the same prefill ends what an earlier decode lent to it",
        _attribute(DecodeCore, "drop_if_idle", _drops_earlier),
        "I2",
        TINY._replace(leaves=1, earlier=True),
    ),
    Plant(
        "chunk without pages lands at once",
        "the room of a prompt that decode has whole ends inside of its engine's send",
        _attribute(PrefillEndpoint, "queue_chunk", lands_at_once),
        "I4",
        TINY._replace(chunks=0),
    ),
)
"""Bugs in endpoints, links, peers and grants."""

PLANTS = (*TABLES, *ENDPOINTS, *PAGES, *SPACES)
