"""A report of everything at bare endpoints that is not at rest (I1, I5)."""

from __future__ import annotations

from collections.abc import Iterator

from kvflow.proof.bare.decode import Decode
from kvflow.proof.bare.prefill import Prefill
from kvflow.proof.bare.world import World
from kvflow.proof.rules.book import Rules
from kvflow.proof.rules.rest import AtDecode, AtPrefill, left_at_decode, left_at_prefill


def left(world: World, *, doubts: bool) -> Iterator[str]:
    """Yield a line for everything not at rest. With `doubts`, unproven loans may remain."""
    for node in world.nodes.values():
        if node.alive:
            if isinstance(node, Prefill):
                yield from _left_at_prefill(node, world.rules, doubts)
            else:
                assert isinstance(node, Decode)
                yield from _left_at_decode(node, world.rules, doubts)


def _left_at_prefill(node: Prefill, rules: Rules, doubts: bool) -> Iterator[str]:
    core, out = node.endpoint.core, node.pages.owned()
    for write in node.writes.values():
        if write.fault == "frozen":
            out.pop(write.record, None)
    handles = len(node.legs)
    at = AtPrefill(node, core, handles, out, (), core.ledger.quarantined)
    yield from left_at_prefill(at, rules, doubts=doubts)


def _left_at_decode(node: Decode, rules: Rules, doubts: bool) -> Iterator[str]:
    core, handles, pages = node.endpoint.core, node.rooms.keys(), node.pages
    earlier = [(loan, pages.counted(loan.pages.tolist())) for loan in node.inherited_loans()]
    at = AtDecode(node, core, handles, pages.owned(), earlier, core.ledger.quarantined)
    yield from left_at_decode(at, rules, {}, doubts=doubts)
