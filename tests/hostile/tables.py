"""Every table of a prefill and its decodes, by name: what must be empty, or bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvflow.node import DecodeNode, PrefillNode


class Both(Protocol):
    @property
    def prefills(self) -> Sequence[PrefillNode]: ...
    @property
    def decodes(self) -> Sequence[DecodeNode]: ...


def tables(nodes: Both) -> dict[str, int]:
    """Sizes, both roles together."""
    prefills = [node.handlers for node in nodes.prefills]
    decodes = [node.handlers for node in nodes.decodes]
    targets = [target for p in prefills for target in p.targets.values()]
    stores = [*(node.pages for node in nodes.prefills), *(node.pages for node in nodes.decodes)]
    counts = [*(p.counts for p in prefills), *(d.counts for d in decodes)]
    return {
        "prefill rooms": sum(len(p.rooms) for p in prefills),
        "targets": len(targets),
        "open grants": sum(len(t.grants) for t in targets),
        "closed grants": sum(len(t.closed) for t in targets),
        "doubtful grants": sum(len(t.doubtful) for t in targets),
        "ended halves": sum(len(p.ended_halves) for p in prefills),
        "decode rooms": sum(len(d.rooms) for d in decodes),
        "loans": sum(len(d.ledger) for d in decodes),
        "links": sum(len(d.links) for d in decodes),
        "quarantined pages": sum(d.ledger.quarantined_pages for d in decodes),
        "pages away": sum(store.num_pages - store.free_pages for store in stores),
        "handler errors": sum(c.handler_errors for c in counts),
    }
