"""The walk over a small group of ranks: the shipped leader and members, in every order of events.

A state consists of the pickled endpoints, the frames between them, the state of each rank's rooms,
and the faults that are left. One step feeds one endpoint. Links deliver frames in order, and lose
them only when either end dies. The tests in tests/protocols cover other losses and repeated frames.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

from kvflow.proof.walk.group_rules import (
    LANDED,
    MATCHED,
    check_decided,
    check_settled,
    check_started,
)
from kvflow.proof.walk.group_worlds import GroupBounds
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.group.leader import GroupLeader, RequestDecided, SendToMember
from kvflow.protocols.group.member import (
    CloseRoom,
    GroupMember,
    OpenRoom,
    RefuseRoom,
    RequestSettled,
    SendToLeader,
    StartRoom,
    TicketKey,
)
from kvflow.protocols.limits import Timing
from kvflow.protocols.wire.codec import parse_at_member, routing_id
from kvflow.protocols.wire.group import Decision, Ruling, Ticket
from kvflow.protocols.wire.messages import Incarnation

LEADER_LIFE, SECOND_LEADER_LIFE = Incarnation(1_000), Incarnation(2_000)
GONE_CLIENT = Cause(Code.CLIENT_GONE, "the client has gone")
IN_USE = Cause(Code.ROOM_IN_USE, "the last room of that id drains at this rank")
Frames = tuple[bytes, ...]
# All endpoints share one Timing, which no step changes.
_TIMING = Timing()


WAITS, STARTED, DRAINS = "waits", "started", "drains"


class Room(NamedTuple):
    rank: int
    key: TicketKey
    state: str


class State(NamedTuple):
    """A state of the walk. None stands for a dead process."""

    leader: bytes | None
    members: tuple[bytes | None, ...]
    to_leader: tuple[Frames, ...]
    to_member: tuple[Frames, ...]
    mourned: tuple[bool, ...]  # for each rank, True once the leader notices its death
    rooms: tuple[Room, ...]
    facts: frozenset[tuple[Any, ...]]  # events so far, for the rules
    left: GroupBounds


def _timing() -> Timing:
    return _TIMING


class _Pickler(pickle.Pickler):
    """A pickler that leaves out the shared Timing, whose constructor validates every field."""

    def reducer_override(self, thing: Any) -> Any:
        return (_timing, ()) if type(thing) is Timing else NotImplemented


@lru_cache(maxsize=1 << 12)
def _seen(data: bytes) -> Any:
    """Unpickle an endpoint, which callers must not change. The cache halves a walk's time."""
    return pickle.loads(data)


class GroupWorld:
    def __init__(self, bounds: GroupBounds) -> None:
        self.bounds = bounds
        # Many states contain equal endpoints, so equal ones share one bytes object.
        self._pieces: dict[bytes, bytes] = {}

    def start(self) -> State:
        ranks = range(self.bounds.ranks)
        leader = GroupLeader(LEADER_LIFE, self.bounds.ranks, now=0.0)
        members = [
            GroupMember(Incarnation(rank + 1), rank, self.bounds.ranks, now=0.0) for rank in ranks
        ]
        empty: tuple[Frames, ...] = ((),) * self.bounds.ranks
        pickled = tuple(self._kept(member) for member in members)
        mourned = (False,) * len(members)
        state = State(
            self._kept(leader), pickled, empty, empty, mourned, (), frozenset(), self.bounds
        )
        for rank in ranks:
            state = self._member(state, rank, lambda member: member.tick(0.0))
            state = self._leader(state, rank)
            state = self._deliver_to_member(state, rank)
        return state

    def acts(self, state: State) -> Iterator[tuple[str, bool, Callable[[], State]]]:
        left = state.left
        if state.leader is not None:
            leader: GroupLeader = _seen(state.leader)
            obstacle = leader.unavailable_reason or (self.bounds.same_room and leader.requests)
            if left.requests and not obstacle:
                yield "a request comes", False, lambda: self._open(state)
            if left.refusals and obstacle:
                yield "a request comes that cannot be opened", False, lambda: self._refuse(state)
            if leader.next_tick() < 0:
                ticked = partial(self._lead, state, lambda lead: lead.tick(-1.0))
                yield "the leader deals with a loss", True, ticked
            if left.aborts:
                for ticket in leader.requests:
                    yield f"the client of {ticket} goes", False, partial(self._go, state, ticket)
        for rank in range(self.bounds.ranks):
            yield from self._acts_of(state, rank)
        for room in state.rooms:
            if state.members[room.rank] is not None:
                yield from self._acts_of_room(state, room)

    def _acts_of(self, state: State, rank: int) -> Iterator[tuple[str, bool, Callable[[], State]]]:
        left, life = state.left, state.members[rank]
        if state.to_leader[rank] and state.leader is not None:
            yield f"the leader reads rank {rank}", True, lambda: self._leader(state, rank)
        if life is None:
            if state.leader is not None and not state.mourned[rank] and not state.to_leader[rank]:
                yield f"the leader misses rank {rank}", True, lambda: self._mourn(state, rank)
            if state.leader is not None and state.mourned[rank] and self.bounds.restarts:
                yield f"rank {rank} starts again", True, lambda: self._restart(state, rank)
            if state.leader is None and self.bounds.leader_restarts and not rank:
                yield "the leader starts again", True, lambda: self._restart_leader(state)
            return
        member: GroupMember = _seen(life)
        does = partial(self._member, state, rank)
        if state.to_member[rank]:
            reads = partial(self._deliver_to_member, state, rank)
            yield f"rank {rank} reads the leader", True, reads
        if member.next_tick() < 0:
            yield f"rank {rank} deals with the loss", True, partial(does, lambda m: m.tick(-1.0))
        if member.session is not None and member.session.leader != self._leader_life(state):
            if not state.to_member[rank]:
                yield f"rank {rank} misses the leader", True, partial(does, _misses)
        elif (
            state.leader is not None
            and member.session is None
            and not state.to_leader[rank]
            and not state.to_member[rank]
        ):
            asks = partial(does, lambda m: m.tick(m.next_tick()))
            yield f"rank {rank} asks to join", True, asks
        if left.crashes:
            yield f"rank {rank} dies", False, lambda: self._crash(state, rank)
        if left.silences and state.leader is not None and member.session is not None:
            paid = self._bad(state)._replace(left=left._replace(silences=left.silences - 1))
            yield f"the leader takes rank {rank} for lost", False, lambda: self._silence(paid, rank)
            misses = partial(self._member, paid, rank, _misses)
            yield f"rank {rank} takes the leader for lost", False, misses

    def _acts_of_room(
        self, state: State, room: Room
    ) -> Iterator[tuple[str, bool, Callable[[], State]]]:
        rank, key, left = room.rank, room.key, state.left
        name = f"request {key.ticket} at rank {rank}"
        # After a failure decode's half may never arrive, so a match is no longer certain.
        fair = ("bad", key) not in state.facts
        happens = partial(self._happens, state, room)
        if room.state == WAITS:
            yield f"{name} is matched", fair, partial(happens, MATCHED, lambda m: m.matched(key))
        if room.state == STARTED:
            yield f"{name} lands", fair, partial(happens, LANDED, lambda m: m.landed(key))
        if room.state in (WAITS, MATCHED, STARTED) and left.failures:
            cause = Cause(Code.ENGINE_ERROR, f"rank {rank}")
            paid = state._replace(
                left=left._replace(failures=left.failures - 1), facts=state.facts | {("bad", key)}
            )
            fails = partial(self._happens, paid, room, DRAINS, lambda m: m.failed(key, cause))
            yield f"{name} fails", False, fails
        if room.state == DRAINS:
            yield f"{name} is drained", True, partial(happens, None, lambda m: m.released(key))

    # --- what the steps do

    def _open(self, state: State) -> State:
        left = state.left._replace(requests=state.left.requests - 1)
        room = 7 if self.bounds.same_room else 7 + left.requests
        found: list[Ticket] = []
        after = self._lead(
            state._replace(left=left), lambda leader: found.append(leader.open(room, b"prompt"))
        )
        if len(self._reached(after)) < self.bounds.ranks:
            key = TicketKey(self._leader_life(after), found[0])
            # A rank is lost, but the leader has not noticed, so the request may have to fail.
            after = after._replace(facts=after.facts | {("risky", key)})
        return after

    def _refuse(self, state: State) -> State:
        left = state.left._replace(refusals=state.left.refusals - 1)
        facts = state.facts | {("owed", rank) for rank in self._reached(state)}

        def refuse(leader: GroupLeader) -> None:
            try:
                leader.open(7, b"prompt")
            except KvflowError:
                return
            raise AssertionError("a request was opened all the same")

        return self._lead(state._replace(left=left, facts=facts), refuse)

    def _reached(self, state: State) -> list[int]:
        """Return the ranks that will receive the leader's next decision."""
        assert state.leader is not None
        leader: GroupLeader = _seen(state.leader)
        found = []
        for rank, life in enumerate(state.members):
            session = None if life is None else _seen(life).session
            for held in _of(leader, rank):
                here = leader.incarnation, held.session
                if session is not None and (session.leader, session.number) == here:
                    found.append(rank)
        return found

    def _crash(self, state: State, rank: int) -> State:
        """Kill the process of `rank`. Frames on their way to it are lost.

        The process of rank 0 contains the leader.
        """
        state = self._bad(state)._replace(left=state.left._replace(crashes=state.left.crashes - 1))
        state = state._replace(
            members=_with(state.members, rank, None),
            to_member=_with(state.to_member, rank, ()),
            rooms=tuple(room for room in state.rooms if room.rank != rank),
            facts=state.facts - {("owed", rank)},
        )
        if rank == 0:
            state = state._replace(leader=None, to_leader=((),) * self.bounds.ranks)
        return state

    def _bad(self, state: State) -> State:
        keys = {room.key for room in state.rooms}
        if state.leader is not None:
            leader: GroupLeader = _seen(state.leader)
            keys |= {TicketKey(leader.incarnation, ticket) for ticket in leader.requests}
        return state._replace(facts=state.facts | {("bad", key) for key in keys})

    def _go(self, state: State, ticket: Ticket) -> State:
        left = state.left._replace(aborts=state.left.aborts - 1)
        facts = state.facts | {("bad", TicketKey(self._leader_life(state), ticket))}
        state = state._replace(left=left, facts=facts)
        return self._lead(state, lambda leader: leader.close(ticket, GONE_CLIENT))

    def _mourn(self, state: State, rank: int) -> State:
        state = state._replace(mourned=_with(state.mourned, rank, True))

        def miss(leader: GroupLeader) -> None:
            for member in _of(leader, rank):
                leader.member_died(member.incarnation)

        return self._lead(state, miss)

    def _silence(self, state: State, rank: int) -> State:
        def silent(leader: GroupLeader) -> None:
            for member in _of(leader, rank):
                member.heard_at_s = float("-inf")
            leader.tick(leader.timing.heartbeat_s)
            leader._due_at_s = leader.timing.heartbeat_s

        return self._lead(state, silent)

    def _restart(self, state: State, rank: int) -> State:
        lives = sum(fact[0] == "restarted" for fact in state.facts) + 1
        member = GroupMember(Incarnation(10 * lives + rank + 1), rank, self.bounds.ranks, now=0.0)
        return state._replace(
            members=_with(state.members, rank, self._kept(member)),
            mourned=_with(state.mourned, rank, False),
            to_leader=_with(state.to_leader, rank, ()),
            facts=state.facts | {("restarted", lives)},
        )

    def _restart_leader(self, state: State) -> State:
        leader = GroupLeader(SECOND_LEADER_LIFE, self.bounds.ranks, now=0.0)
        after = self._restart(state._replace(leader=self._kept(leader)), 0)
        return after._replace(mourned=(False,) * self.bounds.ranks)

    def _leader_life(self, state: State) -> Incarnation:
        if state.leader is None:
            return Incarnation(0)
        leader: GroupLeader = _seen(state.leader)
        return leader.incarnation

    def _happens(
        self, state: State, room: Room, after: str | None, do: Callable[[GroupMember], Any]
    ) -> State:
        rooms = tuple(found for found in state.rooms if found != room)
        if after is not None and after != LANDED:
            rooms = _sorted((*rooms, room._replace(state=after)))
        facts = state.facts
        if after in (MATCHED, LANDED):
            facts |= {(after, room.key, room.rank)}
        return self._member(state._replace(rooms=rooms, facts=facts), room.rank, do)

    def _leader(self, state: State, rank: int) -> State:
        frame, *rest = state.to_leader[rank]
        life, data = frame[:9], frame[9:]
        state = state._replace(to_leader=_with(state.to_leader, rank, tuple(rest)))
        return self._lead(state, lambda leader: leader.receive(life, data, 0.0))

    def _lead(self, state: State, do: Callable[[GroupLeader], Any]) -> State:
        assert state.leader is not None
        leader: GroupLeader = pickle.loads(state.leader)
        do(leader)
        to_member, facts = list(state.to_member), set(state.facts)
        for command in leader.commands():
            if isinstance(command, SendToMember):
                sent = parse_at_member(command.frame)
                if isinstance(sent, Decision) and sent.ruling is Ruling.START:
                    facts.add(("start", TicketKey(sent.leader, sent.ticket), sent.number))
                for rank, life in enumerate(state.members):
                    if life and routing_id(_seen(life).incarnation) == command.routing_id:
                        to_member[rank] = (*to_member[rank], command.frame)
            elif isinstance(command, RefuseRoom):
                if _of(leader, 0):
                    raise AssertionError("rank 0 is told twice that a room is refused")
            elif isinstance(command, RequestDecided):
                key = TicketKey(leader.incarnation, command.ticket)
                check_decided(key, command, facts, self.bounds.ranks)
        return state._replace(
            leader=self._kept(leader), to_member=tuple(to_member), facts=frozenset(facts)
        )

    def _deliver_to_member(self, state: State, rank: int) -> State:
        frame, *rest = state.to_member[rank]
        state = state._replace(to_member=_with(state.to_member, rank, tuple(rest)))
        return self._member(state, rank, lambda member: member.receive(frame, 0.0))

    def _member(self, state: State, rank: int, do: Callable[[GroupMember], Any]) -> State:
        life = state.members[rank]
        assert life is not None
        member: GroupMember = pickle.loads(life)
        do(member)
        rooms, facts, frames = list(state.rooms), set(state.facts), list(state.to_leader[rank])
        commands = deque(member.commands())
        if member.session is None:
            facts.discard(("owed", rank))
        while commands:
            command = commands.popleft()
            if isinstance(command, SendToLeader):
                frames.append(routing_id(member.incarnation) + command.frame)
            elif isinstance(command, OpenRoom):
                if self.bounds.same_room and any(room.rank == rank for room in rooms):
                    facts.add(("bad", command.key))
                    member.failed(command.key, IN_USE)
                    member.released(command.key)
                    commands.extend(member.commands())
                else:
                    rooms.append(Room(rank, command.key, WAITS))
            elif isinstance(command, RefuseRoom):
                if ("refused", rank) in facts:
                    raise AssertionError(f"rank {rank} refuses a room twice")
                facts.discard(("owed", rank))
                facts.add(("refused", rank))
            elif isinstance(command, StartRoom):
                check_started(command.key, rank, facts, self.bounds.ranks)
                rooms = _entered(rooms, rank, command.key, STARTED)
            elif isinstance(command, CloseRoom):
                rooms = _entered(rooms, rank, command.key, DRAINS)
            elif isinstance(command, RequestSettled):
                check_settled(command, rank, facts)
        queued = () if state.leader is None else tuple(frames)
        return state._replace(
            members=_with(state.members, rank, self._kept(member)),
            rooms=_sorted(rooms),
            to_leader=_with(state.to_leader, rank, queued),
            facts=frozenset(facts),
        )

    def _kept(self, end: GroupLeader | GroupMember) -> bytes:
        """Pickle an endpoint so that equal endpoints have equal bytes."""
        # These links lose no message, so all can be confirmed. Unconfirmed messages would make
        # equivalent states differ.
        links = [end.session] if isinstance(end, GroupMember) else end.members.values()
        for one in links:
            if one is not None:
                one.link.confirm(one.link.sent_below)
        stream = io.BytesIO()
        pickler = _Pickler(stream, protocol=5)
        # Fast mode does not record which equal values are one object. No step depends on that.
        pickler.fast = True
        pickler.dump(end)
        data = stream.getvalue()
        return self._pieces.setdefault(data, data)

    # --- rest

    def rests(self, state: State) -> bool:
        members = [_seen(life) for life in state.members if life is not None]
        owed = any(fact[0] == "owed" for fact in state.facts)
        if state.rooms or owed or any(member.tickets for member in members):
            return False
        leader: GroupLeader | None = _seen(state.leader) if state.leader is not None else None
        return leader is None or not leader.requests


def _misses(member: GroupMember) -> None:
    member.leader_gone(0.0)


def _of(leader: GroupLeader, rank: int) -> list[Any]:
    return [member for member in leader.members.values() if member.rank == rank]


def _with(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _entered(rooms: list[Room], rank: int, key: TicketKey, state: str) -> list[Room]:
    return [r._replace(state=state) if (r.rank, r.key) == (rank, key) else r for r in rooms]


def _sorted(rooms: Any) -> tuple[Room, ...]:
    return tuple(sorted(rooms))
