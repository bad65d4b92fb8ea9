"""One request of a group of prefill ranks: what a member does about it, and what the leader
decides.

The leader puts its decisions in one order, and every member applies them in that order. A request
starts when every rank is ready, succeeds when every rank is done, and fails as soon as one rank
fails, with the first cause that reaches the leader. A member whose own half has failed drains at
once, and asks nobody.
"""

from __future__ import annotations

from enum import IntEnum

from kvflow.protocols.machines.tables import ERROR, IGNORE, Move, Table, rest


class MemberPhase(IntEnum):
    OPEN = 0  # this rank's half of the room is here, or decode's is; not both
    READY = 1  # both are, and the leader knows
    STARTED = 2
    DONE = 3  # every write of this rank has landed
    FAILING = 4  # failed here, and draining; the decision is awaited
    DRAINED = 5  # failed here, and nothing of it runs; the decision is awaited
    CLOSING = 6  # the decision is known, and something of it still runs here
    ENDED = 7


class MemberKind(IntEnum):
    MATCHED = 0
    LANDED = 1  # every write of the room has, and nothing of it runs
    FAILED = 2  # the room has ended here, not in success; something of it may still run
    RELEASED = 3  # nothing of a failed room runs any more
    STARTED = 4  # decisions
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
            MK.STARTED: IGNORE,  # decided before the vote came
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
            MK.MATCHED: IGNORE,  # what had happened before the room was closed
            MK.LANDED: Move(M.ENDED, (MC.END,)),
            MK.FAILED: IGNORE,
            MK.RELEASED: Move(M.ENDED, (MC.END,)),
            # Of a session that is over, by the same leader in the next one.
            MK.STARTED: IGNORE,
            MK.SUCCEEDED: IGNORE,
            MK.GROUP_FAILED: IGNORE,
            MK.LEADER_LOST: IGNORE,
        },
        M.ENDED: rest(MK, ERROR),
    },
)


class LeaderPhase(IntEnum):
    GATHERING = 0  # some rank is not ready
    RUNNING = 1  # started; some rank is not done
    SUCCEEDED = 2
    FAILED = 3


class LeaderKind(IntEnum):
    READY = 0  # one rank is, and others are not
    ALL_READY = 1
    DONE = 2
    ALL_DONE = 3
    RANK_FAILED = 4
    RANK_LOST = 5
    CLOSED = 6  # by the leader's own engine: its client is gone, say


class LeaderCommand(IntEnum):
    DECIDE_START = 0
    DECIDE_SUCCEED = 1
    DECIDE_FAIL = 2
    TELL_OUTCOME = 3  # once for the group: to the client, the log, the counters


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
            LK.READY: IGNORE,  # but for the count of those that are missing
            LK.ALL_READY: Move(L.RUNNING, (LC.DECIDE_START,)),
        },
        L.RUNNING: rest(LK, ERROR)
        | _FAIL
        | {
            LK.DONE: IGNORE,
            LK.ALL_DONE: Move(L.SUCCEEDED, (LC.DECIDE_SUCCEED, LC.TELL_OUTCOME)),
        },
        # What has been decided is in no table: late votes find nothing.
        L.SUCCEEDED: rest(LK, ERROR),
        L.FAILED: rest(LK, ERROR),
    },
)

LEADER_TERMINAL = frozenset({L.SUCCEEDED, L.FAILED})
