"""What a prefill remembers of decodes that it has forgotten: what must not begin again, and what
may still land.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvflow.protocols.prefill.peers import DecodePeer
from kvflow.protocols.wire.messages import GrantId, Incarnation


class FormerDecodes:
    """Every kind is bounded by `most`; what was remembered first is forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        # Of each: no grant below begins again, should what it once sent still arrive.
        self.displaced: OrderedDict[Incarnation, GrantId] = OrderedDict()
        # Of some of those, grants whose writes may still land: to say otherwise would end loans
        # without proof (I2).
        self.in_doubt: dict[Incarnation, tuple[GrantId, ...]] = {}
        # Decodes that have parted: they ask for nothing any more, so what they once sent begins
        # nothing again.
        self.parted: OrderedDict[Incarnation, None] = OrderedDict()

    def remember_grants(self, peer: DecodePeer) -> None:
        """It is about to be forgotten and may come again, or what it sent before it died may: what
        has ended for it must not begin again (I6)."""
        self.displaced[peer.incarnation] = peer.grants.seen_below
        if len(self.displaced) > self._most:
            self.displaced.popitem(last=False)

    def remember_doubts(self, peer: DecodePeer) -> None:
        if doubts := peer.grants.unproven():
            self.in_doubt[peer.incarnation] = doubts

    def remember_parted(self, incarnation: Incarnation) -> None:
        """This decode asks for nothing any more: whatever it still sends is late."""
        self.parted[incarnation] = None
        self.displaced.pop(incarnation, None)
        self.in_doubt.pop(incarnation, None)
        if len(self.parted) > self._most:
            self.parted.popitem(last=False)

    def displace(self, among: Iterable[DecodePeer]) -> DecodePeer | None:
        """Choose a decode that is lost and of which nothing is open, and remember it.

        None when there is none, or when too much that may still land would have to be
        remembered."""
        found = [(len(peer.grants.unproven()), peer) for peer in among if peer.displaceable]
        if not found:
            return None
        doubts, peer = min(found, key=lambda one: one[0])
        if doubts and doubts + sum(map(len, self.in_doubt.values())) > self._most:
            return None
        self.remember_grants(peer)
        self.remember_doubts(peer)
        return peer
