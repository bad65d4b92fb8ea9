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
    prefills = [node.shell.endpoint.core for node in nodes.prefills]
    decodes = [node.shell.endpoint.core for node in nodes.decodes]
    grants = [peer.grants for core in prefills for peer in core.peers.values()]
    both: list[PrefillNode | DecodeNode] = [*nodes.prefills, *nodes.decodes]
    stores = [node.pool.pages for node in both]
    counts = [node.counts for node in both]
    return {
        "prefill rooms": sum(len(core.rooms) for core in prefills),
        "targets": len(grants),
        "open grants": sum(len(table.rooms) for table in grants),
        "closed grants": sum(table.remembered for table in grants),
        "unsettled grants": sum(len(table._unsettled) for table in grants),
        "announced rooms": sum(len(core.rendezvous.announced) for core in prefills),
        "outcomes": sum(len(core.rendezvous) for core in prefills),
        "writes": sum(len(core.writes) for core in prefills),
        "decode rooms": sum(len(core.rooms) for core in decodes),
        "loans": sum(len(core.ledger) for core in decodes),
        "links": sum(len(core.links.peers) for core in decodes),
        "quarantined pages": sum(core.ledger.quarantined_pages for core in decodes),
        "handles": sum(len(node.shell.rooms) for node in both),
        "pages away": sum(store.num_pages - store.free_pages for store in stores),
        "handler errors": sum(count.handler_errors for count in counts),
    }
