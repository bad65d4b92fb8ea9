"""The messages between the leader of a group of prefill ranks (rank 0) and each member. Rank 0 is a
member too. One frame is one message: a msgpack array that begins with its tag.

Votes and decisions are numbered within a session. The receiver handles each once, in that order. A
`Beat` reveals a lost message, and the sender then repeats it. A session joins one member process to
one leader process. It ends when either process ends, or receives no message from the other for too
long. A session takes over no state from an earlier one.
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
"""The number of a request of the group, independent of its room. It counts up within one life of a
leader.
"""

TicketNumber = Annotated[Ticket, Meta(ge=1, le=1 << 53)]
SessionNumber = Annotated[int, Meta(ge=1, le=1 << 53)]
Number = Annotated[int, Meta(ge=0, le=1 << 53)]


class Vote(IntEnum):
    """The state of one request at one rank."""

    READY = 0  # both halves of its room arrived
    DONE = 1  # every write of its room landed
    FAILED = 2


class Ruling(IntEnum):
    """A decision that the leader makes for every rank."""

    OPEN = 0
    START = 1  # every rank is ready
    SUCCEED = 2  # every rank is done
    FAIL = 3
    REFUSE = 4  # no rank opens the room, and its decode receives the cause


class Join(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=1):
    """member -> leader, repeated until answered: this process requests to be `rank`.

    Its earlier session, `last_session` of `last_leader` (0 for none), is over. `process` identifies
    the member, for a leader that can watch it.
    """

    member: Life
    rank: RankNumber
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    last_leader: Annotated[Incarnation, Meta(ge=0)]
    last_session: Number
    wire_version: int = GROUP_WIRE_VERSION
    process: ProcessIdentity | None = None


class Joined(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=2):
    """leader -> member: the number of the member's session.

    With a refusal, that session is over. With a refusal and session 0, the leader begins no
    session. In both cases the member sends Join again.
    """

    leader: Life
    member: Life
    session: Number
    refusal: Text = ""
    process: ProcessIdentity | None = None


class RankVote(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=3):
    """member -> leader: one rank's vote. The session implies the rank."""

    leader: Life
    member: Life
    session: SessionNumber
    seq: Number
    ticket: TicketNumber
    vote: Vote
    cause: Cause | None = None


class Decision(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True, tag=4):
    """leader -> every member: one entry of the leader's log, which all members apply in order.

    `number` is the position of the decision in that log, and `seq` its number within the session.
    OPEN and REFUSE carry `room`; OPEN also carries `request`, which only the engine can read.
    """

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
    """Both ways: the sender has sent every message numbered below `sent_below`, and has received
    all below `received_below`. `gap` is True while the sender lacks messages below the other end's
    `sent_below`, and requests them.
    """

    leader: Life
    member: Life
    session: SessionNumber
    sent_below: Number
    received_below: Number
    gap: bool = False


ToLeader = Join | RankVote | Beat
ToMember = Joined | Decision | Beat
