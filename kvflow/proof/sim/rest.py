"""Report of what is not at rest in whole nodes (I1, I5)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from kvflow.node import DecodeNode, PrefillNode
from kvflow.proof.rules.rest import (
    AtDecode,
    AtPrefill,
    Doubts,
    Earlier,
    left_at_decode,
    left_at_prefill,
)
from kvflow.proof.sim.cluster import Member
from kvflow.proof.sim.oracle import Oracle
from kvflow.proof.sim.pages import Books, grant_of
from kvflow.protocols.pages.layout import Counts
from kvflow.protocols.wire.messages import GrantId
from kvflow.serve.cache.tiers import OWNER


def left(members: Iterable[Member], oracle: Oracle, *, doubts: bool) -> list[str]:
    """Return a line for each thing not at rest. With `doubts`, loans without proof may remain."""
    found: list[str] = []
    for member in members:
        if member.alive:
            if any(not task.done() for task in member.tasks):
                found.append(f"{member.name}: a request has not ended")
            if isinstance(member.node, PrefillNode):
                found += _left_at_prefill(member, member.node, oracle, doubts)
            else:
                found += _left_at_decode(member, member.node, oracle, doubts)
    return found


def _left_at_prefill(
    member: Member, node: PrefillNode, oracle: Oracle, doubts: bool
) -> Iterator[str]:
    shell, earlier = node.shell, _earlier(node)
    core, out = shell.endpoint.core, _out(member, member.seen.books, earlier)
    at = AtPrefill(member.seen, core, len(shell.rooms), out, earlier, core.ledger.quarantined)
    yield from left_at_prefill(at, oracle, doubts=doubts)
    if member.engine is not None:
        yield from member.engine.left(set())
    if not earlier and not member.seen.pool.places.at_rest():
        yield f"{member.name}: its places are not at rest"


def _left_at_decode(
    member: Member, node: DecodeNode, oracle: Oracle, doubts: bool
) -> Iterator[str]:
    seen, shell, earlier = member.seen, node.shell, _earlier(node)
    lent: Doubts = {}
    core, out = shell.endpoint.core, _out(member, seen.lent, earlier)
    at = AtDecode(seen, core, shell.rooms.keys(), out, earlier, core.ledger.quarantined)
    yield from left_at_decode(at, oracle, lent, doubts=doubts)
    assert member.snapshots is not None
    yield from member.snapshots.left()
    if member.engine is not None:
        in_doubt = {GrantId(grant) for by, grant in lent if by == seen.incarnation}
        yield from member.engine.left(in_doubt)
    if seen.lent is not seen.books:
        # A room keeps its own pages for as long as its staging places are on loan.
        places = sum(sum(counts) for (by, _), counts in lent.items() if by == seen.incarnation)
        if (count := sum(map(sum, _out(member, seen.books, earlier).values()))) > places:
            yield f"{member.name}: {count} pages out, {places} places of staging are lent for them"
        if not lent and not node.staging_at_rest:
            yield f"{member.name}: its staging is not at rest"


def _earlier(node: PrefillNode | DecodeNode) -> Earlier:
    pools = (node.pool,) if node.reached is node.pool else (node.pool, node.reached)
    return [(loan, pool.layout.counted(loan.pages)) for pool in pools for loan in pool.unproven]


def _out(member: Member, books: Books, earlier: Earlier) -> dict[Hashable, Counts]:
    """Count the places in use, by lease or other owner, except those that a cache owns."""
    found: dict[Hashable, list[int]] = {}
    leases = {place: loan.lease for loan, _ in earlier for place in loan.pages.tolist()}
    for place, owner in enumerate(books.owners):
        if owner is None or owner == OWNER:
            continue
        key: Hashable = owner
        if place in leases:
            key = leases[place]
        elif (grant := grant_of(owner)) is not None:
            key = (member.seen.incarnation, grant)
        found.setdefault(key, [0] * len(books.layout.spaces))[books.spaces[place]] += 1
    return {owner: tuple(counts) for owner, counts in found.items()}
