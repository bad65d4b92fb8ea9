"""Messages that no honest node sends, or that come far too late. They harm only their sender."""

from __future__ import annotations

from kvflow.protocols.decode.links import PrefillPeer
from kvflow.protocols.prefill.peers import DecodePeer
from kvflow.protocols.wire.codec import encode
from kvflow.protocols.wire.messages import (
    WIRE_VERSION,
    Announce,
    Goodbye,
    GrantId,
    Heartbeat,
    Incarnation,
    Message,
    Rank,
    Registered,
    RoomId,
)

_NOBODYS = RoomId(1 << 40)


def from_long_ago(source: Incarnation, peer: DecodePeer) -> list[bytes]:
    """Return the frames of a decode that lies about the past.

    It announces again every grant that prefill forgot, and claims that all used grants are settled,
    although some may still be in doubt.
    """
    own, grants = peer.incarnation, peer.grants
    said: list[Message] = [
        Announce(room=_NOBODYS, grant=GrantId(grant), source=source, target=own)
        for grant in range(1, grants.low_water)
    ]
    said.append(Heartbeat(source=source, target=own, settled_below=grants.seen_below))
    return [encode(message) for message in said]


def another_life(target: Incarnation, peer: PrefillPeer) -> list[bytes]:
    """Return frames from two incarnations of a prefill, in the wrong order.

    The next incarnation sends a goodbye and an answer, directly followed by messages from the
    current one.
    """
    own = peer.key.incarnation

    def answers(source: Incarnation, refusal: str) -> Message:
        return Registered(
            source=source,
            target=target,
            wire_version=WIRE_VERSION,
            rank=Rank(peer.info.rank),
            refusal=refusal,
            asked=own,
            fresh_from=peer.fresh_from,
        )

    next_life = Incarnation(own ^ 1)
    goodbye = Goodbye(source=next_life, target=target)
    said = (goodbye, answers(next_life, "another life"), answers(own, ""), answers(own, "busy"))
    return [encode(message) for message in (*said, Heartbeat(source=own, target=target))]
