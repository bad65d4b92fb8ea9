"""Prefill's memory of decodes that it forgot: grants that must not begin again, and grants in
doubt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvflow.protocols.prefill.peers import DecodePeer
from kvflow.protocols.wire.messages import GrantId, Incarnation


class FormerDecodes:
    """Records of forgotten decodes, each kind bounded by `most`.

    The oldest records are dropped first, except grants in doubt: while those fill their bound, no
    more decodes with grants in doubt are displaced.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # For each decode, the bound below which no grant begins again. A message that it sent
        # before it was forgotten may still arrive.
        self.displaced: OrderedDict[Incarnation, GrantId] = OrderedDict()
        # Grants in doubt of some of those decodes. If they were forgotten, a later acknowledgement
        # would call them drained and end loans without proof (I2).
        self.in_doubt: dict[Incarnation, tuple[GrantId, ...]] = {}
        # Decodes that parted. Any message of theirs that still arrives is late and has no effect.
        self.parted: OrderedDict[Incarnation, None] = OrderedDict()

    def remember_grants(self, peer: DecodePeer) -> None:
        """Remember which grants of a decode must not begin again, before it is forgotten (I6)."""
        # A silent decode may register again, and late messages of a dead one may arrive.
        self.displaced[peer.incarnation] = peer.grants.seen_below
        if len(self.displaced) > self._most:
            self.displaced.popitem(last=False)

    def remember_doubts(self, peer: DecodePeer) -> None:
        """Remember the grants of a decode under which bytes may still arrive."""
        if doubts := peer.grants.unproven():
            self.in_doubt[peer.incarnation] = doubts

    def remember_parted(self, incarnation: Incarnation) -> None:
        """Remember that a decode parted, so that late messages of it are dropped."""
        self.parted[incarnation] = None
        self.displaced.pop(incarnation, None)
        self.in_doubt.pop(incarnation, None)
        if len(self.parted) > self._most:
            self.parted.popitem(last=False)

    def displace(self, among: Iterable[DecodePeer]) -> DecodePeer | None:
        """Choose a silent decode without open grants, record its grants, and return it.

        Returns None if there is none, or if the grants in doubt would exceed the bound.
        """
        found = [(len(peer.grants.unproven()), peer) for peer in among if peer.displaceable]
        if not found:
            return None
        # Grants in doubt must be kept for good, so the decode with the fewest of them goes.
        doubts, peer = min(found, key=lambda one: one[0])
        if doubts and doubts + sum(map(len, self.in_doubt.values())) > self._most:
            return None
        self.remember_grants(peer)
        self.remember_doubts(peer)
        return peer
