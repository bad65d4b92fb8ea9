"""What is not at rest, in words (I1, I5): rooms, grants, loans and pages that are still somewhere."""

from __future__ import annotations

from collections.abc import Iterable

from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.machines.loan import LoanPhase
from kvflow.protocols.ports import Landing
from kvflow.testing.sim.cluster import Member
from kvflow.testing.sim.truth import Key, Truth


def left(members: Iterable[Member], truth: Truth, *, doubts: bool) -> list[str]:
    """What is not at rest, in words. With `doubts`, loans may be out whose proof is truly missing."""
    found: list[str] = []
    for member in members:
        if member.alive:
            if any(not task.done() for task in member.tasks):
                found.append(f"{member.name}: a request has not ended")
            if isinstance(member.node, PrefillNode):
                found += _left_at_prefill(member.name, member.node)
            else:
                found += _left_at_decode(member.name, member.node, truth, doubts)
    return found


def _left_at_prefill(name: str, node: PrefillNode) -> list[str]:
    handlers, found = node.handlers, []
    if handlers.rooms:
        found.append(f"{name}: rooms {node.rooms_by_phase()}")
    if grants := sum(len(target.grants) for target in handlers.targets.values()):
        found.append(f"{name}: {grants} grants")
    if any(len(target.closed) > handlers.bounds.closed_grants for target in handlers.targets.values()):
        found.append(f"{name}: more closed grants than {handlers.bounds.closed_grants} are remembered")
    if len(handlers.ended_halves):
        found.append(f"{name}: {len(handlers.ended_halves)} ended halves")
    if not node.pages.at_rest():
        found.append(f"{name}: pages of {node.pages.owned()}")
    return found


def _left_at_decode(name: str, node: DecodeNode, truth: Truth, doubts: bool) -> list[str]:
    handlers, found = node.handlers, []
    if handlers.rooms:
        found.append(f"{name}: rooms {node.rooms_by_phase()}")
    lent = 0
    for key, loan in handlers.ledger._loans.items():
        if (
            doubts
            and loan.phase is LoanPhase.DOUBTFUL
            and _doubtful(Key(key.source, node.incarnation, key.grant), truth)
        ):
            lent += len(loan.grant.pages)
        else:
            found.append(f"{name}: a loan of grant {key.grant} is {loan.phase.name} without reason")
    out = node.pages.capacity - node.pages.free_pages
    if out > lent or node.quarantined_pages != out:
        found.append(f"{name}: {node.quarantined_pages} pages in quarantine, pages of {node.pages.owned()}")
    return found


def _doubtful(key: Key, truth: Truth) -> bool:
    """Proof is truly missing: the writer cannot say, or cannot be asked, and it lives."""
    source = truth.by_incarnation[key.source]
    doubt = any(write.landing is Landing.UNPROVEN for write in truth.writes.get(key, ()))
    return not source.process.dead and (doubt or source.outcast)
