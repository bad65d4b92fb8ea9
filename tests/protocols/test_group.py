"""A group of ranks over lossy links, and what each end says to bad and stale frames."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from contextlib import suppress
from typing import Any

import pytest

from kvflow.protocols.errors import (
    CapacityError,
    Cause,
    Code,
    KvflowError,
    LostError,
    MisuseError,
    RoomInUseError,
)
from kvflow.protocols.group.leader import (
    GroupLeader,
    RequestDecided,
    SendToMember,
    UnwatchMember,
    WatchMember,
)
from kvflow.protocols.group.member import (
    CloseRoom,
    GroupMember,
    OpenRoom,
    RefuseRoom,
    RequestSettled,
    SendToLeader,
    StartRoom,
    TicketEnded,
    TicketKey,
    UnwatchLeader,
    WatchLeader,
)
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machines.ordered import Ordered
from kvflow.protocols.ports import ProcessIdentity
from kvflow.protocols.wire import group as wire
from kvflow.protocols.wire.codec import encode, parse_at_leader, parse_at_member, routing_id
from kvflow.protocols.wire.group import Ruling, Ticket, Vote
from kvflow.protocols.wire.messages import Incarnation, Rank, RoomId

GONE = Cause(Code.CLIENT_GONE, "the client has gone")
TIMING = Timing(heartbeat_s=1.0, lost_after_s=5.0, repeat_after_s=0.4)


class Group:
    """One leader and its ranks. `trouble`: the share of frames that are lost, repeated or late."""

    def __init__(self, seed: int, ranks: int, trouble: float = 0.0) -> None:
        self.rng, self.ranks, self.trouble, self.now = random.Random(seed), ranks, trouble, 0.0
        self.lives = itertools.count(1)
        self.queue: list[tuple[float, int, Any]] = []
        self.numbers = itertools.count()
        self.leader: GroupLeader | None = None
        self.members: dict[int, GroupMember] = {}
        self.rooms: dict[tuple[int, TicketKey], str] = {}
        self.matched: set[tuple[Rank, TicketKey]] = set()
        self.landed: set[tuple[Rank, TicketKey]] = set()
        self.refused: dict[int, list[tuple[int, Cause]]] = defaultdict(list)  # rank -> rooms
        self.decided: dict[TicketKey, Cause | None] = {}
        self.settled: dict[tuple[Incarnation, TicketKey], Cause | None] = {}
        # Member, leader, session -> decisions.
        self.applied: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        self.log: dict[tuple[Incarnation, int], tuple[Any, ...]] = {}  # leader, number -> decision
        self.start_leader()
        for rank in range(1, ranks):
            self.start_member(rank)

    @property
    def lead(self) -> GroupLeader:
        assert self.leader is not None
        return self.leader

    # --- processes

    def life(self) -> Incarnation:
        return Incarnation(next(self.lives))

    def start_leader(self) -> None:
        self.leader = GroupLeader(self.life(), self.ranks, now=self.now, timing=TIMING)
        self.start_member(0)

    def start_member(self, rank: int) -> None:
        self.members[rank] = GroupMember(self.life(), rank, self.ranks, now=self.now, timing=TIMING)

    def crash(self, rank: int) -> None:
        """The leader dies with rank 0. Its connections break, or silence shows it."""
        gone = self.members.pop(rank)
        self.rooms = {key: state for key, state in self.rooms.items() if key[0] != rank}
        seen = self.rng.random() < 0.5
        if rank == 0:
            self.leader = None
            for other in list(self.members.values()):
                if seen:
                    other.leader_gone(self.now)
                    self.run_member(other)
        elif self.leader is not None and seen:
            self.leader.member_died(gone.incarnation)
            self.run_leader()

    # --- frames

    def carry(self, frame: Any) -> None:
        at_s = self.now + self.rng.uniform(0.0005, 0.002)
        dice = self.rng.random()
        if dice < self.trouble / 3:
            return
        copies = 1 + (dice < 2 * self.trouble / 3)
        for _ in range(copies):
            late_s = self.rng.uniform(0, 0.3) if self.rng.random() < self.trouble else 0.0
            heapq.heappush(self.queue, (at_s + late_s, next(self.numbers), frame))

    def run_leader(self) -> None:
        assert self.leader is not None
        for command in self.leader.commands():
            if isinstance(command, SendToMember):
                self.note(parse_at_member(command.frame))
                self.carry(command)
            elif isinstance(command, RefuseRoom):
                assert Rank(0) not in self.leader.members
                self.refused[0].append((command.room, command.cause))
            else:
                assert isinstance(command, RequestDecided)
                self.check_decided(command)

    def note(self, sent: Any) -> None:
        if isinstance(sent, wire.Decision):
            entry = (sent.ticket, sent.ruling, sent.cause)
            # One log for every member.
            assert self.log.setdefault((sent.leader, sent.number), entry) == entry

    def run_member(self, member: GroupMember) -> None:
        rank = member.rank
        for command in member.commands():
            if isinstance(command, SendToLeader):
                self.carry((member.incarnation, command.frame))
                continue
            if isinstance(command, RefuseRoom):
                self.refused[rank].append((command.room, command.cause))
                continue
            assert not isinstance(command, WatchLeader | UnwatchLeader)
            at = (rank, command.key)
            if isinstance(command, OpenRoom):
                assert at not in self.rooms
                self.rooms[at] = "waits"
            elif isinstance(command, StartRoom):
                assert self.rooms[at] == "matched"
                # No rank starts before all are ready.
                assert {(other, command.key) for other in range(self.ranks)} <= self.matched
                self.rooms[at] = "started"
            elif isinstance(command, CloseRoom):
                self.rooms[at] = "drains"
            elif isinstance(command, RequestSettled):
                who = (member.incarnation, command.key)
                assert who not in self.settled, "told twice"
                self.settled[who] = command.cause
                if command.cause is None:
                    assert self.decided[command.key] is None
            elif isinstance(command, TicketEnded):
                assert self.rooms.pop(at, "gone") in ("gone",)

    def check_decided(self, command: RequestDecided) -> None:
        assert self.leader is not None
        key = TicketKey(self.leader.incarnation, command.ticket)
        assert key not in self.decided, "decided twice"
        self.decided[key] = command.cause
        if command.cause is None:
            # A success needs every rank.
            assert {(rank, key) for rank in range(self.ranks)} <= self.landed

    def arrive(self, frame: Any) -> None:
        if isinstance(frame, SendToMember):
            found = [
                m for m in self.members.values() if routing_id(m.incarnation) == frame.routing_id
            ]
            for member in found:
                self.read(member, frame.frame)
        elif self.leader is not None:
            life, data = frame
            self.leader.receive(routing_id(life), data, self.now)
            self.run_leader()

    def read(self, member: GroupMember, frame: bytes) -> None:
        session = member.session
        before = -1 if session is None else session.link.received_below
        member.receive(frame, self.now)
        message = parse_at_member(frame)
        if (
            session is not None
            and session is member.session
            and session.link.received_below > before
        ):
            assert isinstance(message, wire.Decision)
            self.applied[member.incarnation, session.leader, session.number].append(message.number)
        self.run_member(member)

    # --- time

    def step(self, until_s: float) -> None:
        while True:
            ends: list[Any] = [
                *([self.leader] if self.leader is not None else []),
                *self.members.values(),
            ]
            due_s = min((max(end.next_tick(), self.now) for end in ends), default=float("inf"))
            next_s = min(due_s, self.queue[0][0] if self.queue else float("inf"))
            if next_s > until_s:
                break
            self.now = max(self.now, next_s)
            if self.queue and self.queue[0][0] <= self.now:
                self.arrive(heapq.heappop(self.queue)[2])
                continue
            for end in ends:
                if end.next_tick() <= self.now:
                    end.tick(self.now)
                    if isinstance(end, GroupLeader):
                        self.run_leader()
                    else:
                        self.run_member(end)
        self.now = until_s

    def happen(self, failing: float) -> None:
        at = self.rng.choice(sorted(self.rooms))
        rank, key = at
        member, state = self.members[rank], self.rooms[at]
        if state == "drains":
            del self.rooms[at]
            member.released(key)
        elif self.rng.random() < failing:
            self.rooms[at] = "drains"
            member.failed(key, Cause(Code.ENGINE_ERROR, f"rank {rank}"))
        elif state == "waits":
            self.rooms[at] = "matched"
            self.matched.add((member.rank, key))
            member.matched(key)
        elif state == "started":
            del self.rooms[at]
            self.landed.add((member.rank, key))
            member.landed(key)
        self.run_member(member)

    def settle(self) -> None:
        """No more trouble: what is open goes on by itself."""
        self.trouble = 0.0
        for _ in range(200):
            self.step(self.now + 0.5)
            for _ in range(len(self.rooms)):
                if self.rooms:
                    self.happen(0.0)
        self.step(self.now + 10.0)

    def check_rest(self) -> None:
        assert self.leader is not None
        assert not self.leader.unavailable_reason
        assert not self.leader.requests
        for member in self.members.values():
            assert member.session is not None
            assert not member.tickets
            assert not member.session.link.unconfirmed
        assert not self.rooms
        for numbers in self.applied.values():
            # Decisions in one order, none left out.
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        for held in self.leader.members.values():
            assert not held.link.unconfirmed


@pytest.mark.parametrize(
    "block", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in range(4, 8))]
)
def test_a_storm_over_lossy_links(block: int, request: pytest.FixtureRequest) -> None:
    base = request.config.getoption("--seed", default=0) or 0
    for number in range(40):
        seed = base + 1_000 * block + number
        print("seed", seed)
        rng = random.Random(seed)
        group = Group(seed, rng.choice((1, 2, 3, 4)), trouble=rng.choice((0.0, 0.1, 0.3)))
        group.step(3.0)
        crashes = rng.random() < 0.5
        down: list[int] = []
        for _ in range(150):
            group.step(group.now + rng.expovariate(20))
            dice = rng.random()
            if dice < 0.3 and group.leader is not None and not group.leader.unavailable_reason:
                group.leader.open(rng.getrandbits(63), b"prompt")
                group.run_leader()
            elif dice < 0.31 and group.leader is not None:
                with suppress(KvflowError):  # a rank is missing, or the room is in use
                    group.leader.open(
                        rng.choice([7, *(one.room for one in group.leader.requests.values())]),
                        b"prompt",
                    )
                group.run_leader()
            elif dice < 0.35 and group.leader is not None and group.leader.requests:
                group.leader.close(rng.choice(sorted(group.leader.requests)), GONE)
                group.run_leader()
            elif dice < 0.37 and crashes:
                rank = rng.randrange(group.ranks)
                if rank in group.members:
                    group.crash(rank)
                    down.append(rank)
            elif dice < 0.42 and down:
                rank = down.pop()
                group.start_member(rank) if rank else group.start_leader()
            elif group.rooms:
                group.happen(0.15)
        for rank in down:
            group.start_member(rank) if rank else group.start_leader()
        group.settle()
        group.check_rest()


def joined(ranks: int = 2) -> Group:
    group = Group(1, ranks)
    group.step(3.0)
    assert not group.lead.unavailable_reason
    return group


def opened(group: Group, room: int = 7) -> TicketKey:
    ticket = group.lead.open(room, b"prompt")
    group.run_leader()
    group.step(group.now + 0.1)
    return TicketKey(group.lead.incarnation, ticket)


def drained(group: Group) -> bool:
    """Let rooms come to their ends. True if nothing of a request is left then."""
    while group.rooms:
        group.happen(0.0)
    return not any(member.tickets for member in group.members.values())


JOIN = {
    "member": Incarnation(50),
    "rank": Rank(1),
    "world_size": 2,
    "last_leader": Incarnation(0),
    "last_session": 0,
}


def join(leader: GroupLeader, life: int = 50, now: float = 0.0, **changes: Any) -> None:
    """A process asks to be a rank: the last one of two, unless it says otherwise."""
    asked = wire.Join(**JOIN | {"member": Incarnation(life)} | changes)
    leader.receive(routing_id(Incarnation(life)), encode(asked), now)


def heading(member: GroupMember) -> dict[str, Any]:
    session = member.session
    assert session is not None
    return {"leader": session.leader, "member": member.incarnation, "session": session.number}


def heading_of(leader: GroupLeader, held: Any) -> dict[str, Any]:
    return {"leader": leader.incarnation, "member": held.incarnation, "session": held.session}


def vote(
    leader: GroupLeader,
    sent: dict[str, Any],
    ticket: int,
    each: Vote,
    seq: int = 0,
    now: float = 0.0,
) -> None:
    frame = encode(wire.RankVote(**sent, seq=seq, ticket=Ticket(ticket), vote=each))
    leader.receive(routing_id(sent["member"]), frame, now)


def words(leader: GroupLeader) -> list[Any]:
    sent = [command for command in leader.commands() if isinstance(command, SendToMember)]
    return [parse_at_member(command.frame) for command in sent]


def test_a_failure_reaches_every_rank_at_once_with_its_cause() -> None:
    group = joined(4)
    key = opened(group)
    cause = Cause(Code.CLIENT_GONE, "decode has aborted")
    first, third = group.members[0], group.members[2]
    first.failed(key, cause)
    del group.rooms[0, key]
    first.released(key)  # it has drained, and has asked nobody
    group.run_member(first)
    group.step(group.now + 0.002)  # the leader has heard of it, and the others may have
    third.failed(key, Cause(Code.ENGINE_ERROR, "later"))
    group.rooms[2, key] = "drains"
    group.run_member(third)
    before = group.now
    group.step(group.now + 0.2)
    assert group.decided[key] == cause
    assert {group.settled[member.incarnation, key] for member in group.members.values()} == {cause}
    assert drained(group)
    assert group.now - before < 1.0


def test_no_request_while_a_rank_is_missing() -> None:
    group = joined(3)
    group.lead.member_died(group.members[2].incarnation)
    with pytest.raises(LostError, match="rank 2 of the group's 3 is missing"):
        group.lead.open(7, b"")


def test_what_is_too_much_is_refused() -> None:
    leader = GroupLeader(Incarnation(1), 1, now=0.0, bounds=Bounds(rooms=1))
    member = GroupMember(Incarnation(2), 0, 1, now=0.0)
    member.tick(0.0)
    for command in member.commands():
        assert isinstance(command, SendToLeader)
        leader.receive(routing_id(Incarnation(2)), command.frame, 0.0)
    with pytest.raises(
        CapacityError, match="bytes of a request to a group: asked for 4194305, limit 4194304"
    ):
        leader.open(7, bytes(wire.MAX_REQUEST_BYTES + 1))
    with pytest.raises(MisuseError, match="room id -1"):
        leader.open(-1, b"")
    leader.open(7, b"")
    with pytest.raises(CapacityError, match="requests of a group: asked for 2, limit 1"):
        leader.open(8, b"")
    with pytest.raises(MisuseError, match=r"world_size 0 is outside 1\.\."):
        GroupLeader(Incarnation(1), 0, now=0.0)


def test_a_request_that_is_refused_is_refused_at_every_rank() -> None:
    group = joined(3)
    leader = group.lead
    with pytest.raises(MisuseError, match="room id -1"):
        leader.open(-1, b"")
    with pytest.raises(CapacityError) as too_large:
        leader.open(8, bytes(wire.MAX_REQUEST_BYTES + 1))
    leader.refuse(9, GONE)
    with pytest.raises(MisuseError, match="room id -1"):
        leader.refuse(-1, GONE)
    group.run_leader()
    group.step(group.now + 0.1)
    expected = [(8, too_large.value.cause()), (9, GONE)]
    assert group.refused == {0: expected, 1: expected, 2: expected}
    assert not leader.requests
    assert not any(member.tickets for member in group.members.values())


def test_a_request_that_comes_while_a_rank_is_missing_is_refused_at_the_others() -> None:
    group = joined(3)
    leader = group.lead
    for rank, told in ((2, {0, 1}), (0, {0, 1, 2})):  # rank 0 is in this process, and is told here
        group.refused.clear()
        group.step(group.now + 1.0)
        assert not leader.unavailable_reason
        leader.member_died(group.members[rank].incarnation)
        with pytest.raises(LostError) as missing:
            leader.open(7, b"")
        group.run_leader()
        group.step(group.now + 0.003)
        assert group.refused == {rank: [(7, missing.value.cause())] for rank in told}


def test_a_room_is_in_use_until_its_request_is_decided() -> None:
    group = joined(2)
    leader = group.lead
    key = opened(group)
    with pytest.raises(RoomInUseError, match="room 7 is in use") as error:
        leader.open(7, b"")
    leader.close(key.ticket, GONE)
    again = leader.open(7, b"")
    group.run_leader()
    group.step(group.now + 0.1)
    assert group.refused == {rank: [(7, error.value.cause())] for rank in (0, 1)}
    assert set(leader.requests) == {again}
    assert group.decided == {key: GONE}


def test_what_a_decision_must_have_and_has_not() -> None:
    group = joined(1)
    member = group.members[0]
    assert member.session is not None
    sent = heading(member)
    for seq, ruling in enumerate((Ruling.OPEN, Ruling.REFUSE)):  # no room
        member.receive(
            encode(wire.Decision(**sent, seq=seq, number=seq, ticket=Ticket(5), ruling=ruling)),
            group.now,
        )
    assert member.dropped == 2
    nameless = wire.Decision(
        **sent, seq=2, number=2, ticket=Ticket(5), ruling=Ruling.REFUSE, room=RoomId(7)
    )
    member.receive(encode(nameless), group.now)
    assert member.commands() == [
        RefuseRoom(RoomId(7), Cause(Code.REFUSED, "the group does not open this room"))
    ]


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"wire_version": 9}, "group wire version 9, this leader speaks 1"),
        ({"world_size": 3}, "rank 1 is of a group of 3, this one has 2"),
        ({"rank": 2, "world_size": 2}, "rank 2 is outside 0..1"),
        ({}, "rank 1 is taken by another process, until that has been silent for 5 s"),
    ],
)
def test_a_rank_that_does_not_belong_here_is_told_why(change: dict[str, Any], refusal: str) -> None:
    leader = joined(2).lead
    join(leader, **change)
    (answer,) = words(leader)
    assert answer.refusal == refusal


def test_a_process_is_one_rank() -> None:
    leader = GroupLeader(Incarnation(1), 2, now=0.0)
    for rank in (1, 0):
        join(leader, rank=Rank(rank))
    refusals = [answer.refusal for answer in words(leader)]
    assert refusals == ["", "this process is rank 1 already, and cannot be rank 0 too"]
    assert set(leader.members) == {Rank(1)}


def test_a_rank_that_has_left_asks_at_once_and_watches_nobody_any_more() -> None:
    process = ProcessIdentity("machine", "namespace", 7, 1)
    for watched in (None, process):
        member = GroupMember(Incarnation(50), 0, 1, now=0.0, timing=TIMING)
        answer = wire.Joined(
            leader=Incarnation(1), member=Incarnation(50), session=1, process=watched
        )
        member.receive(encode(answer), 3.0)
        assert member.next_tick() == 3.0 + TIMING.heartbeat_s
        member.commands()
        member.leader_gone(3.001)
        assert member.next_tick() == 3.001
        assert member.commands() == ([UnwatchLeader()] if watched else [])


def test_bad_foreign_and_stale_frames_change_nothing() -> None:
    group = joined(2)
    leader, member = group.lead, group.members[1]
    key = opened(group)
    sent = heading(member)
    good = encode(wire.RankVote(**sent, seq=0, ticket=key.ticket, vote=Vote.READY))
    before = repr(leader), leader.requests[key.ticket].missing
    leader.receive(b"somebody", good, 0.0)
    leader.receive(routing_id(member.incarnation), b"\x93\x01", 0.0)
    leader.receive(routing_id(member.incarnation), good[:-1], 0.0)
    assert leader.dropped == 3
    assert (repr(leader), leader.requests[key.ticket].missing) == before
    member.receive(b"\xc1", 0.0)
    fail = {"seq": 1, "number": 1, "ticket": key.ticket, "ruling": Ruling.FAIL}
    for wrong in ({"member": Incarnation(99)}, {"session": 77}):
        member.receive(encode(wire.Decision(**sent | fail | wrong)), 0.0)
    assert member.dropped == 3
    assert key in member.tickets


@pytest.mark.parametrize("voted", [Vote.DONE, Vote.READY])
def test_a_rank_that_votes_out_of_turn_is_out_of_the_group(voted: Vote) -> None:
    group = joined(2)
    leader, member = group.lead, group.members[1]
    key = opened(group)
    votes = [voted] if voted is Vote.DONE else [voted, voted]
    for seq, each in enumerate(votes):
        vote(leader, heading(member), key.ticket, each, seq)
    assert leader.unavailable_reason
    group.run_leader()
    group.step(group.now + 0.2)
    assert group.decided[key] == Cause(
        Code.PEER_LOST, f"rank 1 voted {voted.name} for request 1 out of turn"
    )
    group.settle()
    group.check_rest()  # it has joined again


@pytest.mark.parametrize("ticket", [1, 5])  # the next one, and one far from it
def test_a_vote_for_a_request_there_is_not(ticket: int) -> None:
    group = joined(2)
    leader, member = group.lead, group.members[1]
    vote(leader, heading(member), ticket, Vote.READY)
    assert leader.unavailable_reason == "rank 1 of the group's 2 is missing"


def test_a_stale_session_is_told_at_once() -> None:
    """A leader that has started again: nobody waits for its silence."""
    group = joined(2)
    key = opened(group)
    group.leader = GroupLeader(group.life(), 2, now=group.now, timing=TIMING)
    at_s = group.now
    group.step(at_s + 2 * TIMING.heartbeat_s)  # the next heartbeat of each member is answered
    assert group.leader is not None
    assert not group.leader.unavailable_reason
    causes = {group.settled[member.incarnation, key] for member in group.members.values()}
    assert {cause.text for cause in causes if cause} == {
        f"rank {rank} left the group: this session of the group is over" for rank in (0, 1)
    }
    assert drained(group)


def test_a_member_that_confirms_nothing_is_lost() -> None:
    leader = GroupLeader(Incarnation(1), 1, now=0.0, bounds=Bounds(rooms=2))
    join(leader, rank=Rank(0), world_size=1)
    for _ in range(5):
        leader.close(leader.open(7, b""), GONE)
    leader.tick(1.0)
    assert leader.unavailable_reason


def test_a_loss_is_dealt_with_in_bounded_ticks() -> None:
    group = joined(2)
    leader = group.lead
    for room in range(100):
        leader.open(room, b"")
    group.run_leader()
    group.step(group.now + 0.1)
    member = group.members[1]
    leader.member_died(member.incarnation)
    assert len(leader.requests) == 100
    leader.tick(group.now)
    assert len(leader.requests) == 100 - 32
    assert leader.next_tick() == float("-inf")
    member.leader_gone(group.now)
    member.tick(group.now)
    closed = [command for command in member.commands() if isinstance(command, CloseRoom)]
    assert len(closed) == 32
    assert member.next_tick() == float("-inf")


def test_a_stall_of_our_own_is_no_silence() -> None:
    group = joined(2)
    leader, member = group.lead, group.members[1]
    late = group.now + 20.0
    leader.credit_stall(20.0, late)
    member.credit_stall(20.0, late)
    leader.tick(late)
    member.tick(late)
    assert not leader.unavailable_reason
    assert member.session is not None


def test_numbered_messages() -> None:
    link: Ordered[str] = Ordered()
    for text in "abc":
        link.add(text)
    assert not link.confirm(4)
    assert link.confirm(2)
    assert list(link.unconfirmed) == ["c"]
    assert link.confirm(1)
    assert list(link.unconfirmed) == ["c"]
    assert not link.take(1)
    assert link.misses(2)
    assert not link.misses(2)  # asked for already
    assert (link.asks, link.take(0), link.asks) == (True, True, False)
    assert not link.take(0)


def test_what_is_missing_is_asked_for_once_each_time() -> None:
    for received in range(3):
        link: Ordered[str] = Ordered()
        for number in range(received):
            assert link.take(number)
        assert not link.asks
        assert not link.misses(received)
        assert link.misses(received + 1)
        assert link.asks


def test_words_of_the_group_are_read_by_their_side_alone() -> None:
    beat = wire.Beat(
        leader=Incarnation(1), member=Incarnation(2), session=1, sent_below=0, received_below=0
    )
    assert parse_at_leader(encode(beat)) == parse_at_member(encode(beat)) == beat


def test_an_idle_group_stays_together() -> None:
    group = joined(3)
    sessions = [member.session for member in group.members.values()]
    group.step(group.now + 20 * TIMING.lost_after_s)
    assert [member.session for member in group.members.values()] == sessions


def test_a_join_that_is_repeated_begins_one_session() -> None:
    """Also where the last session, of another leader, has a higher number."""
    leader = GroupLeader(Incarnation(1), 2, now=0.0)
    for _ in range(2):
        join(leader, last_leader=Incarnation(9), last_session=30)
    assert [answer.session for answer in words(leader)] == [1, 1]
    join(leader, last_leader=Incarnation(1), last_session=1)
    assert leader.members[Rank(1)].session == 2


def test_rank_0_is_the_member_beside_the_leader() -> None:
    """An earlier process of that rank, which has lost its address, may ask first, and for ever."""
    mine, earlier = Incarnation(50), Incarnation(40)
    leader = GroupLeader(Incarnation(1), 2, now=0.0, first=mine)
    for member in (earlier, mine):
        join(leader, member, rank=Rank(0))
    told, taken = words(leader)
    assert told.refusal == "rank 0 is in the leader's own process"
    assert not taken.refusal
    assert leader.members[Rank(0)].incarnation == mine


def test_a_refusal_of_an_earlier_question_ends_no_session() -> None:
    group = joined(2)
    leader, member = group.lead, group.members[1]
    session = member.session
    late = wire.Joined(
        leader=leader.incarnation, member=member.incarnation, session=0, refusal="rank 1 is taken"
    )
    member.receive(encode(late), group.now)
    assert member.session is session and not member.refusal


def test_a_rank_knows_why_it_is_not_taken_until_it_is() -> None:
    group = joined(1)
    member, leader = group.members[0], group.lead
    session = member.session
    assert session is not None

    def answer(number: int, refusal: str = "") -> None:
        said = wire.Joined(
            leader=leader.incarnation, member=member.incarnation, session=number, refusal=refusal
        )
        member.receive(encode(said), group.now)

    answer(session.number, "this session is over")
    assert (member.session, member.refusal) == (None, "this session is over")
    answer(0, "rank 0 is taken")
    assert member.refusal == "rank 0 is taken"
    answer(1)  # of the session that is over
    assert (member.session, member.refusal) == (None, "rank 0 is taken")
    answer(2)
    assert member.session is not None and not member.refusal


def test_a_rank_votes_for_nothing_of_another_leader() -> None:
    """Tickets count anew under a new leader: the vote would be taken for one on another request."""
    group = joined(1)
    key = opened(group)
    member = group.members[0]
    group.leader = GroupLeader(group.life(), 1, now=group.now, timing=TIMING)
    member.leader_gone(group.now)
    group.run_member(member)
    assert member.session is None
    answer = wire.Joined(leader=group.leader.incarnation, member=member.incarnation, session=1)
    member.receive(encode(answer), group.now)
    member.failed(key, GONE)
    assert not any(isinstance(command, SendToLeader) for command in member.commands())


def test_votes_from_before_a_loss_start_nothing() -> None:
    """The rank is back before the requests that were lost with it have failed."""
    group = joined(2)
    leader = group.lead
    keys = [opened(group, room) for room in range(40)]
    lost = group.members[1]
    leader.member_died(lost.incarnation)
    join(leader, now=group.now)
    assert not leader.unavailable_reason
    assert len(leader.requests) == 40
    leader.commands()
    for held in leader.members.values():
        vote(leader, heading_of(leader, held), keys[-1].ticket, Vote.READY, now=group.now)
    assert not leader.commands()
    while leader.next_tick() < 0:
        leader.tick(group.now)
    assert not leader.requests


def test_votes_from_before_a_second_loss_start_nothing() -> None:
    group = joined(1)
    leader, member = group.lead, group.members[0]

    def lose_and_join(life: int) -> None:
        leader.member_died(leader.members[Rank(0)].incarnation)
        join(leader, life, group.now, rank=Rank(0), world_size=1)

    lose_and_join(60)
    ticket = leader.open(7, b"")
    lose_and_join(70)
    assert member.rank == 0
    leader.commands()
    vote(leader, heading_of(leader, leader.members[Rank(0)]), ticket, Vote.READY, now=group.now)
    assert not leader.commands()


def test_a_rank_that_is_lost_is_told_so_and_watched_no_more() -> None:
    leader = GroupLeader(Incarnation(1), 2, now=0.0)
    process = ProcessIdentity("boot", "pid", 7, 8)
    for rank, watched in ((0, None), (1, process)):
        life = Incarnation(50 + rank)
        join(leader, life, rank=Rank(rank), process=watched)
        found = leader.commands()
        assert (WatchMember(life, process) in found) is (rank == 1)
    late: list[wire.Beat] = []
    for rank in (0, 1):
        life = Incarnation(50 + rank)
        session = leader.members[Rank(rank)].session
        leader.member_died(life)
        told, *unwatch = leader.commands()
        assert isinstance(told, SendToMember)
        assert told.routing_id == routing_id(life)
        answer: Any = parse_at_member(told.frame)
        assert (answer.session, answer.refusal) == (session, f"rank {rank} of the group has died")
        assert unwatch == ([UnwatchMember(life)] if rank else [])
        late.append(
            wire.Beat(
                leader=leader.incarnation,
                member=life,
                session=session,
                sent_below=0,
                received_below=0,
            )
        )
    for beat in late:
        leader.receive(routing_id(beat.member), encode(beat), 0.0)
    assert leader.dropped == 2


def test_heartbeats_come_when_they_are_due() -> None:
    group = joined(1)
    leader = group.lead
    due_at_s = leader.next_tick()
    leader.tick(due_at_s - 0.01)
    assert not leader.commands()
    leader.tick(due_at_s)
    assert len(leader.commands()) == 1
    assert leader.next_tick() == due_at_s + TIMING.heartbeat_s


def test_the_longest_request_is_opened() -> None:
    leader = joined(1).lead
    assert [leader.open(room, bytes(wire.MAX_REQUEST_BYTES * (room == 8))) for room in (7, 8)] == [
        1,
        2,
    ]


def test_a_vote_that_is_missed_is_asked_for_at_once() -> None:
    group = joined(2)
    leader, member = group.lead, group.members[1]
    key = opened(group)
    for _ in range(3):  # once, however many come after it
        vote(leader, heading(member), key.ticket, Vote.DONE, seq=1, now=group.now)
    (asked,) = words(leader)
    assert isinstance(asked, wire.Beat)
    assert asked.gap
    assert asked.received_below == 0
