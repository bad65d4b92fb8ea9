"""The messages within one group of prefill ranks, between its leader (rank 0) and each member, the
leader's own rank included. One frame is one message: a msgpack array that begins with its tag.

Votes and decisions are numbered within a session, and are handled in that order, each once: what is
lost is sent again when a `Beat` tells of it. A session is one membership of one process in the log
of one leader's process; it ends with either, and when either has not heard the other for too long.
The next one begins with nothing of the one before.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, NewType

import msgspec
from msgspec import Meta

from kvflow.protocols.errors import Cause
from kvflow.protocols.ports import ProcessIdentity
from kvflow.protocols.wire.messages import MAX_RANKS, Incarnation, Life, RankNumber, Room, Text

GROUP_WIRE_VERSION = 1
MAX_REQUEST_BYTES = 4 << 20

Ticket = NewType("Ticket", int)
"""Counts up within one life of a leader: one request of the group, whatever room it is for."""

TicketNumber = Annotated[Ticket, Meta(ge=1, le=1 << 53)]
SessionNumber = Annotated[int, Meta(ge=1, le=1 << 53)]
Number = Annotated[int, Meta(ge=0, le=1 << 53)]


class Vote(IntEnum):
    """What one rank says of one request."""

    READY = 0  # both halves of its room are known
    DONE = 1  # every write of it has landed
    FAILED = 2


class Ruling(IntEnum):
    """What holds for every rank."""

    OPEN = 0
    START = 1  # every rank is ready
    SUCCEED = 2  # every rank is done
    FAIL = 3
    REFUSE = 4  # no request: the room is opened on no rank, and its decode is told why


class Join(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=1):
    """member -> leader, repeated until answered: this process wants to be that rank.

    It was in `last_session` of `last_leader` before, 0 for none: that one is over. `process` is
    this one, for a leader that can watch it."""

    member: Life
    rank: RankNumber
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    last_leader: Annotated[Incarnation, Meta(ge=0)]
    last_session: Number
    wire_version: int = GROUP_WIRE_VERSION
    process: ProcessIdentity | None = None


class Joined(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=2):
    """leader -> member: the number of its session.

    With a refusal: that session is over, or, without a number, why there is none; the member asks
    again."""

    leader: Life
    member: Life
    session: Number
    refusal: Text = ""
    process: ProcessIdentity | None = None


class RankVote(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=3):
    """member -> leader. The rank is that of the session: a member votes for no other."""

    leader: Life
    member: Life
    session: SessionNumber
    seq: Number
    ticket: TicketNumber
    vote: Vote
    cause: Cause | None = None


class Decision(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=4):
    """leader -> every member.

    `number` counts the decisions of this leader: the log that all members apply. `room` comes with
    OPEN and with REFUSE; `request`, which means something to the engine alone, with OPEN."""

    leader: Life
    member: Life
    session: SessionNumber
    seq: Number
    number: Number
    ticket: TicketNumber
    ruling: Ruling
    cause: Cause | None = None
    room: Room | None = None
    request: Annotated[bytes, Meta(max_length=MAX_REQUEST_BYTES)] = b""


class Beat(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=5):
    """Both ways: the sender has sent what is numbered below `sent_below`, and has everything below
    `received_below`. `gap`: it knows that more was sent, and asks for it."""

    leader: Life
    member: Life
    session: SessionNumber
    sent_below: Number
    received_below: Number
    gap: bool = False


ToLeader = Join | RankVote | Beat
ToMember = Joined | Decision | Beat
