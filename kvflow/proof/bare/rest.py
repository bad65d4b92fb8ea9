"""Report of what is not at rest (I1, I5): rooms, grants, loans, writes and pages that are left
over.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvflow.proof.bare.decode import Decode, owner_of
from kvflow.proof.bare.prefill import Prefill
from kvflow.proof.bare.world import World
from kvflow.proof.sim.both_sides import Promise
from kvflow.proof.sim.times import FENCE_SLACK_S
from kvflow.protocols.machines.decode_room import DecodePhase
from kvflow.protocols.machines.loan import LoanPhase
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.ports import WriteOutcome
from kvflow.protocols.prefill.core import PrefillCore
from kvflow.protocols.prefill.records import PrefillRoomRecord


def left(world: World, *, doubts: bool) -> Iterator[str]:
    """Yield a line for everything that is not at rest.

    With `doubts`, loans may be out for which proof is really missing.
    """
    for node in world.nodes.values():
        if node.alive:
            if isinstance(node, Prefill):
                yield from _left_at_prefill(node)
            else:
                assert isinstance(node, Decode)
                yield from _left_at_decode(node, world, doubts)


def _left_at_prefill(node: Prefill) -> Iterator[str]:
    core = node.endpoint.core
    # A frozen write never ends, so its draining room stays by design.
    frozen = {write.leg.record for write in node.writes.values() if write.fault == "frozen"}
    open_ = [
        room
        for room in core.rooms.values()
        if room not in frozen or room.phase is not PrefillPhase.DRAINING
    ]
    if open_:
        yield f"{node.name}: rooms {[(room.room, room.phase.name) for room in open_]}"
    yield from _counted_at_prefill(node, core, frozen)
    if not core.rooms and (lasting := sum(timer.kind != "silence" for timer in core.deadlines)):
        yield f"{node.name}: {lasting} deadlines of nothing"


def _counted_at_prefill(
    node: Prefill, core: PrefillCore, frozen: set[PrefillRoomRecord]
) -> Iterator[str]:
    """Yield a line for every table that is not empty, apart from rooms of frozen writes."""
    counts = {
        "legs": len(node.legs) - len(frozen),
        "grants": sum(len(peer.grants.rooms) for peer in core.peers.values()) - len(frozen),
        "ended halves": len(core.rendezvous),
        "announced rooms": len(core.rendezvous.announced),
        "writes": len(core.writes)
        - sum(write.leg.record in frozen for write in node.writes.values()),
        "tasks": len(core.tasks),
        "pages": core.identity.layout.num_places
        - len(node.free)
        - sum(len(leg.pages) for leg in node.legs.values()),
    }
    for what, count in counts.items():
        if count:
            yield f"{node.name}: {count} {what}"
    for peer in core.peers.values():
        if peer.grants.remembered > core.bounds.closed_grants:
            yield f"{node.name}: more closed grants than {core.bounds.closed_grants} are remembered"


def _left_at_decode(node: Decode, world: World, doubts: bool) -> Iterator[str]:
    core = node.endpoint.core
    in_doubt: set[int] = set()
    loans = 0
    for peer in core.links.peers.values():
        for grant in core.ledger.grants_of(peer):
            lease = core.ledger.find(peer, grant)
            assert lease is not None
            loans += 1
            phase, key = lease.loans[peer], (peer.key.incarnation, node.incarnation, grant)
            if doubts and (
                frozen(key, world) or (phase is LoanPhase.DOUBTFUL and _doubtful(key, world))
            ):
                in_doubt.add(grant)
            else:
                yield f"{node.name}: a loan of grant {grant} is {phase.name} without reason"
    for loan in node.inherited_loans():
        loans, source = loans + 1, world.nodes[loan.incarnation]
        if doubts and (source.alive or world.clock.now < source.proven_at_s + FENCE_SLACK_S):
            in_doubt.add(owner_of(loan))
        else:
            yield f"{node.name}: an earlier decode's loan {loan.lease} is there without reason"
    if len(core.ledger) != loans:
        yield f"{node.name}: {len(core.ledger)} loans, {loans} of links that are known"
    for grant, record in core.rooms.items():
        if grant not in in_doubt or record.phase is not DecodePhase.DRAINING:
            yield f"{node.name}: room {record.room} is {record.phase.name}"
    if core.tasks:
        yield f"{node.name}: {len(core.tasks)} tasks"
    if handles := node.rooms.keys() - in_doubt:
        yield f"{node.name}: handles of grants {sorted(handles)}"
    if owned := node.pages.owned() - in_doubt:
        yield f"{node.name}: pages of {sorted(owned)}"
    lent = sum(owner is not None for owner in node.pages.owners)
    if not core.rooms and core.ledger.quarantined_pages != lent:
        yield (
            f"{node.name}: {core.ledger.quarantined_pages} pages in quarantine of {lent} that are "
            "out"
        )
    if not core.rooms and (
        lasting := sum(timer.kind not in ("link", "repeat") for timer in core.deadlines)
    ):
        yield f"{node.name}: {lasting} deadlines of nothing"


def frozen(key: Promise, world: World) -> bool:
    """Return True if a write of the promise never ends, and its writer lives."""
    node = world.nodes[key[0]]
    assert isinstance(node, Prefill)
    return node.alive and any(
        write.fault == "frozen" and write.key == key for write in node.writes.values()
    )


def _doubtful(key: Promise, world: World) -> bool:
    """Return True if proof is really missing: the writer cannot give it or cannot be reached, and
    is not known to be dead.
    """
    source = world.nodes[key[0]]
    if world.oracle.settled(key):
        return False
    if not source.alive:
        return world.clock.now < source.proven_at_s + FENCE_SLACK_S
    doubt = any(
        write.outcome is WriteOutcome.UNPROVEN for write in world.oracle.writes.get(key, ())
    )
    return doubt or source.displaced
