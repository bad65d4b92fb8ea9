"""Prefill's view of one decode incarnation that has registered: the way into its pool, and its
grants.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvflow.protocols.errors import KvflowError, LayoutError
from kvflow.protocols.machines.grants import GrantTable, KeptBytes
from kvflow.protocols.machines.peer import PeerPhase
from kvflow.protocols.pages.differences import differences
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.ports import PlaneAddress
from kvflow.protocols.wire.codec import routing_id
from kvflow.protocols.wire.messages import GrantId, Incarnation, Rank, Register


class PrefillIdentity(msgspec.Struct, frozen=True):
    """What a prefill rank says of itself: its life, its rank, what of its pool it sends, and where
    its plane is.
    """

    incarnation: Incarnation
    rank: Rank
    layout: PoolLayout
    address: PlaneAddress


class DecodePeer:
    """One decode incarnation.

    Kept through silence, forgotten when its process is dead or its place is needed.

    `R` of its grants is the room that answers for one.
    """

    __slots__ = (
        *(
            "address",
            "fresh_from",
            "grants",
            "incarnation",
            "layout",
            "phase",
            "received_at_s",
            "routing_id",
        ),
        *("sender_address", "unknown_below"),
    )

    def __init__(
        self,
        message: Register,
        closed_grants: int,
        kept: KeptBytes,
        now: float,
        sender_address: str = "",
        seen_below: GrantId | None = None,
    ) -> None:
        """`sender_address`: where its first Register came from; empty where that is not known.

        `seen_below`: what was remembered of a decode that has been here before; None for a
        stranger."""
        self.incarnation = message.target
        self.routing_id = routing_id(message.target)
        self.layout = message.layout
        self.address = msgspec.structs.replace(message.address, owner=message.target)
        self.sender_address = sender_address
        self.phase = PeerPhase.OPENING
        self.received_at_s = now
        self.fresh_from = message.fresh_from  # of its newest Register
        self.grants: GrantTable[Any] = GrantTable(closed_grants, message.fresh_from, kept)
        if seen_below is not None:
            self.grants.begin_from(seen_below)
        # Only a stranger can have had no grant here before the first that it asks for.
        self.unknown_below = message.fresh_from if seen_below is None else GrantId(0)

    def __repr__(self) -> str:
        return f"<DecodePeer {self.incarnation:016x}: {self.phase.name.lower()}>"

    @property
    def is_up(self) -> bool:
        return self.phase is PeerPhase.UP

    @property
    def has_had_grants(self) -> bool:
        """A grant of it has been seen here, in this life or in one that was remembered."""
        return self.grants.seen_below > self.unknown_below

    @property
    def displaceable(self) -> bool:
        """It may be forgotten, because it is lost and nothing of it is open.

        What may still land is remembered (I2).
        """
        return self.phase is PeerPhase.SILENT and self.grants.all_ended

    def mismatch(self, identity: PrefillIdentity) -> str:
        """Why pages cannot move from our pool into this peer's; empty when they can."""
        if self.address.backend != identity.address.backend:
            return (
                f"data planes differ: prefill {identity.address.backend}, decode "
                f"{self.address.backend}"
            )
        try:
            self.layout.check()
            # In part: decode knows whether other ranks have the rest.
            if found := differences(identity.layout, self.layout, partly=True):
                raise LayoutError("; ".join(found))
        except KvflowError as error:
            return str(error)
        return ""
