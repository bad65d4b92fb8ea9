"""The machines of one request in a group of prefill ranks: a member's machine and the leader's.

The leader puts its decisions in one order, and every member applies them in that order. A request
starts when every rank is ready, and succeeds when every rank is done. It fails as soon as one rank
fails or is lost, or the leader's engine ends it. The first cause that reaches the leader counts. A
member whose own half fails drains at once, without waiting for the decision.
"""

from __future__ import annotations

from enum import IntEnum

from kvflow.protocols.machines.tables import ERROR, IGNORE, Move, Table, rest


class MemberPhase(IntEnum):
    OPEN = 0  # one half of the room arrived, from this rank's engine or from decode
    READY = 1  # both halves arrived, and this rank voted READY
    STARTED = 2
    DONE = 3  # every write of this rank landed
    FAILING = 4  # this rank's room failed and is draining; the decision is awaited
    DRAINED = 5  # this rank's room failed and is drained; the decision is awaited
    CLOSING = 6  # the decision is known, and this rank's room is still draining
    ENDED = 7


class MemberKind(IntEnum):
    MATCHED = 0
    LANDED = 1  # every write of the room landed
    FAILED = 2  # this rank's room ended without success; its writes may still run
    RELEASED = 3  # no write of a failed room runs any more
    # The decisions that the leader sends, and the loss of the leader.
    STARTED = 4
    SUCCEEDED = 5
    GROUP_FAILED = 6
    LEADER_LOST = 7


class MemberCommand(IntEnum):
    VOTE_READY = 0
    VOTE_DONE = 1
    VOTE_FAILED = 2
    START = 3
    CLOSE_ROOM = 4
    TELL_SUCCESS = 5
    TELL_FAILED = 6
    END = 7


M, MK, MC = MemberPhase, MemberKind, MemberCommand
_STOP = Move(M.CLOSING, (MC.CLOSE_ROOM, MC.TELL_FAILED))
_OVER = Move(M.ENDED, (MC.TELL_FAILED, MC.END))
_FAILED = Move(M.FAILING, (MC.VOTE_FAILED,))

MEMBER: Table[MemberPhase, MemberKind, MemberCommand] = Table(
    M,
    MK,
    {
        M.OPEN: rest(MK, ERROR)
        | {
            MK.MATCHED: Move(M.READY, (MC.VOTE_READY,)),
            MK.FAILED: _FAILED,
            MK.GROUP_FAILED: _STOP,
            MK.LEADER_LOST: _STOP,
        },
        M.READY: rest(MK, ERROR)
        | {
            MK.FAILED: _FAILED,
            MK.STARTED: Move(M.STARTED, (MC.START,)),
            MK.GROUP_FAILED: _STOP,
            MK.LEADER_LOST: _STOP,
        },
        M.STARTED: rest(MK, ERROR)
        | {
            MK.LANDED: Move(M.DONE, (MC.VOTE_DONE,)),
            MK.FAILED: _FAILED,
            MK.GROUP_FAILED: _STOP,
            MK.LEADER_LOST: _STOP,
        },
        M.DONE: rest(MK, ERROR)
        | {
            MK.SUCCEEDED: Move(M.ENDED, (MC.TELL_SUCCESS, MC.END)),
            MK.GROUP_FAILED: _OVER,
            MK.LEADER_LOST: _OVER,
        },
        M.FAILING: rest(MK, ERROR)
        | {
            MK.FAILED: IGNORE,
            MK.RELEASED: Move(M.DRAINED),
            MK.STARTED: IGNORE,  # the leader decided before our vote arrived
            MK.GROUP_FAILED: Move(M.CLOSING, (MC.TELL_FAILED,)),
            MK.LEADER_LOST: Move(M.CLOSING, (MC.TELL_FAILED,)),
        },
        M.DRAINED: rest(MK, ERROR)
        | {
            MK.FAILED: IGNORE,
            MK.STARTED: IGNORE,
            MK.GROUP_FAILED: _OVER,
            MK.LEADER_LOST: _OVER,
        },
        M.CLOSING: rest(MK, ERROR)
        | {
            MK.MATCHED: IGNORE,  # the halves met before the room was closed
            MK.LANDED: Move(M.ENDED, (MC.END,)),
            MK.FAILED: IGNORE,
            MK.RELEASED: Move(M.ENDED, (MC.END,)),
            # A request may still be closing here after its session ended. The same leader may
            # then decide about it in a new session.
            MK.STARTED: IGNORE,
            MK.SUCCEEDED: IGNORE,
            MK.GROUP_FAILED: IGNORE,
            MK.LEADER_LOST: IGNORE,
        },
        M.ENDED: rest(MK, ERROR),
    },
)


class LeaderPhase(IntEnum):
    GATHERING = 0  # some rank is not ready yet
    RUNNING = 1  # started, and some rank is not done yet
    SUCCEEDED = 2
    FAILED = 3


class LeaderKind(IntEnum):
    READY = 0  # a rank is ready, and some other rank is not ready yet
    ALL_READY = 1
    DONE = 2
    ALL_DONE = 3
    RANK_FAILED = 4
    RANK_LOST = 5
    CLOSED = 6  # the leader's engine ended the request, for example because the client left


class LeaderCommand(IntEnum):
    DECIDE_START = 0
    DECIDE_SUCCEED = 1
    DECIDE_FAIL = 2
    TELL_OUTCOME = 3  # report the group's outcome once: to the client, the log and the counters


L, LK, LC = LeaderPhase, LeaderKind, LeaderCommand
_FAIL = dict.fromkeys(
    (LK.RANK_FAILED, LK.RANK_LOST, LK.CLOSED), Move(L.FAILED, (LC.DECIDE_FAIL, LC.TELL_OUTCOME))
)

LEADER: Table[LeaderPhase, LeaderKind, LeaderCommand] = Table(
    L,
    LK,
    {
        L.GATHERING: rest(LK, ERROR)
        | _FAIL
        | {
            LK.READY: IGNORE,  # the leader counts the ready ranks outside the table
            LK.ALL_READY: Move(L.RUNNING, (LC.DECIDE_START,)),
        },
        L.RUNNING: rest(LK, ERROR)
        | _FAIL
        | {
            LK.DONE: IGNORE,
            LK.ALL_DONE: Move(L.SUCCEEDED, (LC.DECIDE_SUCCEED, LC.TELL_OUTCOME)),
        },
        # The leader drops a request when it decides the outcome, so no machine receives late votes.
        L.SUCCEEDED: rest(LK, ERROR),
        L.FAILED: rest(LK, ERROR),
    },
)

LEADER_TERMINAL = frozenset({L.SUCCEEDED, L.FAILED})
