"""Prefill's view of a registered decode incarnation: the route into its pool, and its grants."""

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
    """The description of a prefill rank: its incarnation, its rank, the layout of its pool, and the
    address of its data plane.
    """

    incarnation: Incarnation
    rank: Rank
    layout: PoolLayout
    address: PlaneAddress


class DecodePeer:
    """One registered decode incarnation.

    It is kept through silence, and forgotten when it dies, parts, or its place is needed.
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
        """Create a peer from its first Register.

        `sender_address` is the network address that it came from; empty if not known. `seen_below`
        is the bound that was remembered of a decode that was here before; None for a stranger.
        """
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
        # A stranger had no grant here below the bound in its first Register. A decode that was here
        # before did have grants, so it counts as known from the beginning.
        self.unknown_below = message.fresh_from if seen_below is None else GrantId(0)

    def __repr__(self) -> str:
        return f"<DecodePeer {self.incarnation:016x}: {self.phase.name.lower()}>"

    @property
    def is_up(self) -> bool:
        """True while the route is open and the decode is not silent."""
        return self.phase is PeerPhase.UP

    @property
    def has_had_grants(self) -> bool:
        """True if prefill received a grant of this decode, now or before it was last forgotten."""
        return self.grants.seen_below > self.unknown_below

    @property
    def displaceable(self) -> bool:
        """True while this decode may be forgotten: it is silent and has no open grant.

        Its grants in doubt must be remembered even then (I2).
        """
        return self.phase is PeerPhase.SILENT and self.grants.all_ended

    def mismatch(self, identity: PrefillIdentity) -> str:
        """Return why pages cannot move from our pool into this peer's; empty if they can."""
        if self.address.backend != identity.address.backend:
            return (
                f"data planes differ: prefill {identity.address.backend}, decode "
                f"{self.address.backend}"
            )
        try:
            self.layout.check()
            # This rank may serve a part of decode's pool only. Decode checks that all ranks
            # together cover it.
            if found := differences(identity.layout, self.layout, partly=True):
                raise LayoutError("; ".join(found))
        except KvflowError as error:
            return str(error)
        return ""
