"""Words that no honest node says, or that nobody waits for any more: they must harm only who says them."""

from __future__ import annotations

from kvflow.protocols.decode_links import PrefillPeer
from kvflow.protocols.prefill_peers import DecodePeer
from kvflow.protocols.wire.codec import encode
from kvflow.protocols.wire.messages import WIRE_VERSION, Heartbeat, Incarnation, Message, Rank, Registered


def all_settled(source: Incarnation, peer: DecodePeer) -> bytes:
    """A decode claims that it needs nothing of any grant it has used, though some are still in doubt."""
    return encode(Heartbeat(source=source, target=peer.incarnation, settled_below=peer.grants.seen_below))


def another_life(target: Incarnation, peer: PrefillPeer) -> list[bytes]:
    """The next life of a prefill answers, and right behind it comes what its last life has said."""
    own = peer.key.incarnation

    def answers(source: Incarnation, refusal: str) -> Message:
        rank = Rank(peer.info.rank)
        return Registered(
            source=source,
            target=target,
            wire_version=WIRE_VERSION,
            rank=rank,
            refusal=refusal,
            asked=own,
            fresh_from=peer.fresh_from,
        )

    next_life = Incarnation(own ^ 1)
    said = (answers(next_life, "another life"), answers(own, ""), answers(own, "busy"))
    return [encode(message) for message in (*said, Heartbeat(source=own, target=target))]
