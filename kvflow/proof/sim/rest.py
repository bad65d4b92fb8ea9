"""Report of what is not at rest (I1, I5): rooms, grants, loans, handles and pages that are left
over.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.proof.sim.cluster import Member
from kvflow.proof.sim.oracle import Key, Oracle
from kvflow.proof.sim.times import FENCE_SLACK_S
from kvflow.protocols.machines.loan import LoanPhase
from kvflow.protocols.ports import WriteOutcome
from kvflow.serve.cache.tiers import OWNER


def left(members: Iterable[Member], oracle: Oracle, *, doubts: bool) -> list[str]:
    """Return a line for everything that is not at rest.

    With `doubts`, loans may be out for which proof is really missing.
    """
    found: list[str] = []
    for member in members:
        if member.alive:
            if any(not task.done() for task in member.tasks):
                found.append(f"{member.name}: a request has not ended")
            if isinstance(member.node, PrefillNode):
                found += _left_at_prefill(member, oracle, doubts)
            else:
                found += _left_at_decode(member, oracle, doubts)
    return found


def _left_at_prefill(member: Member, oracle: Oracle, doubts: bool) -> list[str]:
    name, node = member.name, member.node
    assert isinstance(node, PrefillNode)
    lent, found = _lent_by_earlier(member, oracle, doubts)
    if node.quarantined_pages != lent:
        found.append(
            f"{name}: {node.quarantined_pages} pages in quarantine, earlier nodes have lent {lent}"
        )
    shell = node.shell
    core = shell.endpoint.core
    if core.rooms:
        found.append(f"{name}: rooms {node.rooms_by_phase()}")
    counts = {
        "handles": len(shell.rooms),
        "grants": sum(len(peer.grants.rooms) for peer in core.peers.values()),
        "ended halves": len(core.rendezvous),
        "announced rooms": len(core.rendezvous.announced),
        "writes": len(core.writes),
        "tasks": len(core.tasks),
    }
    found += [f"{name}: {count} {what}" for what, count in counts.items() if count]
    if any(peer.grants.remembered > core.bounds.closed_grants for peer in core.peers.values()):
        found.append(f"{name}: more closed grants than {core.bounds.closed_grants} are remembered")
    if member.engine is not None:
        found += member.engine.left(set())
    books = member.seen.books
    out = books.out - books.owners.count(OWNER)
    if out > lent or (not lent and not member.seen.pool.places.at_rest()):
        found.append(f"{name}: pages of {set(books.owners) - {None}}")
    return found


def _left_at_decode(member: Member, oracle: Oracle, doubts: bool) -> list[str]:
    name, node, books = member.name, member.node, member.seen.books
    assert isinstance(node, DecodeNode)
    core, found = node.shell.endpoint.core, []
    if core.rooms:
        found.append(f"{name}: rooms {node.rooms_by_phase()}")
    if core.tasks:
        found.append(f"{name}: {len(core.tasks)} tasks")
    assert member.snapshots is not None
    found += member.snapshots.left()
    lent, in_doubt, loans = 0, set(), 0
    for peer in core.links.peers.values():
        for grant in core.ledger.grants_of(peer):
            lease = core.ledger.find(peer, grant)
            assert lease is not None
            loans += 1
            phase, key = lease.loans[peer], Key(peer.key.incarnation, node.incarnation, grant)
            if doubts and phase is LoanPhase.DOUBTFUL and _doubtful(key, oracle):
                lent += lease.num_pages
                in_doubt.add(grant)
            else:
                found.append(f"{name}: a loan of grant {grant} is {phase.name} without reason")
    lent_before, without_reason = _lent_by_earlier(member, oracle, doubts)
    lent, found = lent + lent_before, found + without_reason
    loans += sum(len(pool.unproven) for pool in _pools_of(node))
    if len(core.ledger) != loans:
        found.append(f"{name}: {len(core.ledger)} loans, {loans} of writers that are known")
    if handles := node.shell.rooms.keys() - in_doubt:
        found.append(f"{name}: handles of grants {sorted(handles)}")
    if member.engine is not None:
        found += member.engine.left(in_doubt)
    # Cached pages are at rest, so they do not count.
    out = books.out - books.owners.count(OWNER)
    if member.seen.lent is not member.seen.books:
        if out > lent - lent_before:
            found.append(
                f"{name}: {out} pages out, {lent - lent_before} places of staging are lent for them"
            )
        books = member.seen.lent
        out = books.out
        if not lent and not node.staging_at_rest:
            found.append(f"{name}: its staging is not at rest")
    # Several ranks may have one grant, and `lent` counts its pages for each of them.
    if out > lent or node.quarantined_pages != out:
        found.append(
            f"{name}: {node.quarantined_pages} pages in quarantine, pages of "
            f"{set(books.owners) - {None}}"
        )
    return found


def _lent_by_earlier(member: Member, oracle: Oracle, doubts: bool) -> tuple[int, list[str]]:
    """Return the number of pages that earlier nodes over the pool lent and may still miss, and a
    line for every loan that should have ended.
    """
    lent, found = 0, []
    loans = (loan for pool in _pools_of(member.node) for loan in pool.unproven)
    # Several writers may have one lease, whose pages count once.
    for lease, loan in {loan.lease: loan for loan in loans}.items():
        source = oracle.by_incarnation[loan.incarnation]
        if doubts and (not source.ended or oracle.loop.time() < source.proven_at_s + FENCE_SLACK_S):
            lent += len(loan.pages)
        else:
            found.append(f"{member.name}: an earlier node's loan {lease} is there without reason")
    return lent, found


def _pools_of(node: PrefillNode | DecodeNode) -> tuple[PagedPool, ...]:
    return (node.pool,) if node.reached is node.pool else (node.pool, node.reached)


def _doubtful(key: Key, oracle: Oracle) -> bool:
    """Return True if proof is really missing: the writer cannot give it or cannot be reached, and
    is not known to be dead.
    """
    source = oracle.by_incarnation[key.source]
    if oracle.settled(key):
        return False
    if source.ended:
        return oracle.loop.time() < source.proven_at_s + FENCE_SLACK_S
    doubt = any(write.outcome is WriteOutcome.UNPROVEN for write in oracle.writes.get(key, ()))
    return doubt or source.displaced
