"""A report of everything at bare endpoints that is not at rest (I1, I5)."""

from __future__ import annotations

from collections import Counter
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
    core, out = node.endpoint.core, Counter(node.pages.owners)
    for write in node.writes.values():
        if write.fault == "frozen":
            del out[write.record]
    del out[None]
    handles = len(node.legs)
    at = AtPrefill(node, core, handles, out, (), core.ledger.quarantined_pages)
    yield from left_at_prefill(at, rules, doubts=doubts)


def _left_at_decode(node: Decode, rules: Rules, doubts: bool) -> Iterator[str]:
    core, out = node.endpoint.core, Counter(node.pages.owners)
    del out[None]
    handles, earlier = node.rooms.keys(), node.inherited_loans()
    at = AtDecode(node, core, handles, out, earlier, core.ledger.quarantined_pages)
    yield from left_at_decode(at, rules, {}, doubts=doubts)
