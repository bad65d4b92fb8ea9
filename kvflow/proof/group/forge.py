"""What a rank says in another's name: the leader must take it for nothing."""

from __future__ import annotations

import msgspec

from kvflow.protocols.group.member import GroupMember
from kvflow.protocols.wire.codec import encode, parse_at_leader
from kvflow.protocols.wire.group import RankVote, Vote


def forged(frame: bytes, other: GroupMember) -> bytes | None:
    """This rank's READY as if `other` had sent it, which it may not have; None where there is
    nothing to forge.
    """
    message, session = parse_at_leader(frame), other.session
    if not isinstance(message, RankVote) or message.vote is not Vote.READY:
        return None
    if session is None or session.leader != message.leader:
        return None
    seq = session.link.sent_below
    return encode(
        msgspec.structs.replace(message, member=other.incarnation, session=session.number, seq=seq)
    )
