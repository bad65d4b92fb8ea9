"""Forged votes: a rank votes in the name of another, and the leader must ignore the vote."""

from __future__ import annotations

import msgspec

from kvflow.protocols.group.member import GroupMember
from kvflow.protocols.wire.codec import encode, parse_at_leader
from kvflow.protocols.wire.group import RankVote, Vote


def forged(frame: bytes, other: GroupMember) -> bytes | None:
    """Return `frame`, a READY vote of this rank, with `other` as its sender.

    Returns None if the frame is not a READY vote, or if `other` has no session with that leader.
    """
    message, session = parse_at_leader(frame), other.session
    if not isinstance(message, RankVote) or message.vote is not Vote.READY:
        return None
    if session is None or session.leader != message.leader:
        return None
    # The forged vote has the number that the leader expects next, so only its sender is wrong.
    seq = session.link.sent_below
    return encode(
        msgspec.structs.replace(message, member=other.incarnation, session=session.number, seq=seq)
    )
