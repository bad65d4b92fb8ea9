"""Report of what is not at rest (I1, I5)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvflow.proof.rules.book import Rules
from kvflow.proof.rules.judge import Promise, Side
from kvflow.proof.sim.times import FENCE_SLACK_S
from kvflow.protocols.decode.core import DecodeCore
from kvflow.protocols.machines.decode_room import DecodePhase
from kvflow.protocols.machines.loan import LoanPhase
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.pages.spaces import Counts, counts_sum
from kvflow.protocols.ports import LeaseId, UnprovenLoan, WriteOutcome
from kvflow.protocols.prefill.core import PrefillCore

Doubts = dict[LeaseId, Counts]
"""Number of places that are rightly on loan, by the lender's incarnation and grant."""
Earlier = Sequence[tuple[UnprovenLoan, Counts]]
"""Loans of earlier nodes over a pool, each with its number of places."""


class AtPrefill(NamedTuple):
    side: Side
    core: PrefillCore
    handles: int  # number of rooms that its engine holds
    out: Mapping[Hashable, Counts]  # number of places in use, by lease or other owner
    earlier: Earlier
    quarantined: Counts


class AtDecode(NamedTuple):
    side: Side
    core: DecodeCore
    handles: Collection[int]  # grants of rooms that its shell holds
    out: Mapping[Hashable, Counts]  # number of places in use that peers can write into, by owner
    earlier: Earlier
    quarantined: Counts


def left_at_prefill(node: AtPrefill, rules: Rules, *, doubts: bool) -> Iterator[str]:
    """Yield a line for each thing not at rest. With `doubts`, loans without proof may remain."""
    name, core = node.side.name, node.core
    lent: Doubts = {}
    yield from _earlier(name, node.earlier, rules, lent, doubts=doubts)
    if node.quarantined != (count := _total(lent.values(), node.quarantined)):
        yield f"{name}: {node.quarantined} places in quarantine, earlier nodes have lent {count}"
    # A frozen write never ends, so its draining room stays by design.
    own = node.side.incarnation
    frozen = {write.record for write in rules.transfers.frozen if write.key[0] == own}
    draining = {room for room in frozen if room.phase is PrefillPhase.DRAINING}
    if rooms := [room for room in core.rooms.values() if room not in draining]:
        yield f"{name}: rooms {[(room.room, room.phase.name) for room in rooms]}"
    counts = {
        "handles": node.handles - len(frozen),
        "grants": sum(len(peer.grants.rooms) for peer in core.peers.values()) - len(frozen),
        "ended halves": len(core.rendezvous),
        "announced rooms": len(core.rendezvous.announced),
        "writes": sum(record not in frozen for record, _ in core.writes.values()),
        "tasks": len(core.tasks),
    }
    if not core.rooms:
        counts["deadlines of nothing"] = sum(timer.kind != "silence" for timer in core.deadlines)
    yield from (f"{name}: {count} {what}" for what, count in counts.items() if count)
    if any(peer.grants.remembered > core.bounds.closed_grants for peer in core.peers.values()):
        yield f"{name}: more closed grants than {core.bounds.closed_grants} are remembered"
    yield from _out(name, node.out, lent, node.quarantined)


def left_at_decode(node: AtDecode, rules: Rules, lent: Doubts, *, doubts: bool) -> Iterator[str]:
    """Yield a line for each thing not at rest, and add the places rightly on loan to `lent`.

    See `left_at_prefill` for `doubts`.
    """
    name, core, own = node.side.name, node.core, node.side.incarnation
    loans = len(node.earlier)
    frozen: set[int] = set()
    for peer in core.links.peers.values():
        for grant in core.ledger.grants_of(peer):
            lease = core.ledger.find(peer, grant)
            assert lease is not None
            loans += 1
            phase, key = lease.loans[peer], (peer.key.incarnation, own, grant)
            stuck = any(write.key == key for write in rules.transfers.frozen)
            if stuck:
                frozen.add(grant)
            if doubts and (stuck or (phase is LoanPhase.DOUBTFUL and _doubtful(key, rules))):
                lent[own, grant] = lease.counts or _none(node.quarantined)
            else:
                yield f"{name}: a loan of grant {grant} is {phase.name} without reason"
    yield from _earlier(name, node.earlier, rules, lent, doubts=doubts)
    if len(core.ledger) != loans:
        yield f"{name}: {len(core.ledger)} loans, {loans} of writers that are known"
    for grant, record in core.rooms.items():
        if grant not in frozen or record.phase is not DecodePhase.DRAINING:
            yield f"{name}: room {record.room} is {record.phase.name}"
    if core.tasks:
        yield f"{name}: {len(core.tasks)} tasks"
    if handles := sorted(grant for grant in node.handles if (own, grant) not in lent):
        yield f"{name}: handles of grants {handles}"
    yield from _out(name, node.out, lent, node.quarantined)
    if core.rooms:
        return
    if node.quarantined != (out := _total(node.out.values(), node.quarantined)):
        yield f"{name}: {node.quarantined} places in quarantine of {out} that are out"
    if lasting := sum(timer.kind not in ("link", "repeat") for timer in core.deadlines):
        yield f"{name}: {lasting} deadlines of nothing"


def _out(
    name: str, out: Mapping[Hashable, Counts], lent: Doubts, quarantined: Counts
) -> Iterator[str]:
    for owner, count in out.items():
        if owner not in lent:
            yield f"{name}: {count} places of {owner!r}"
    for lease, count in lent.items():
        if (found := out.get(lease, _none(quarantined))) != count:
            yield f"{name}: {found} places of lease {lease}, which lent {count}"


def _none(like: Counts) -> Counts:
    return (0,) * len(like)


def _total(counts: Iterable[Counts], like: Counts) -> Counts:
    """Return the sum of `counts`, for as many spaces as `like` has."""
    total = (0,) * len(like)
    for one in counts:
        total = counts_sum(total, one)
    return total


def _earlier(
    name: str, loans: Earlier, rules: Rules, lent: Doubts, *, doubts: bool
) -> Iterator[str]:
    for loan, counts in loans:
        source = rules.sides[loan.incarnation]
        if doubts and (source.alive or rules.now_s() < source.proven_at_s + FENCE_SLACK_S):
            # Several writers may share one lease, whose pages count only once.
            lent[loan.lease] = counts
        else:
            yield f"{name}: an earlier node's loan {loan.lease} is there without reason"


def _doubtful(key: Promise, rules: Rules) -> bool:
    source = rules.sides[key[0]]
    if rules.transfers.settled(key):
        return False
    if not source.alive:
        return rules.now_s() < source.proven_at_s + FENCE_SLACK_S
    writes = rules.transfers.writes.get(key, ())
    return source.displaced or any(write.outcome is WriteOutcome.UNPROVEN for write in writes)
