"""Every act that can happen at decode or at a prefill rank, and the state after it.

The expiry of a timer is an act too: the walk makes this one timer due, even if others would expire
first, and then ticks the endpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvflow.proof.walk.decode_side import DEAD, EARLIER, Decode, DecodeSide, Grant
from kvflow.proof.walk.neighbours import Neighbour, Target
from kvflow.proof.walk.prefill_side import Other, Prefill, PrefillSide
from kvflow.proof.walk.world import (
    DECODE,
    LIVES,
    OTHER,
    OTHER_SUM,
    SUM,
    Act,
    Price,
    ViolationError,
    Word,
    World,
    described,
)
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.machinery import Timer
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.machines.ownership import PageKind, PagePhase
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.machines.tables import TransitionError
from kvflow.protocols.ports import WriteOutcome
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.messages import GrantId, Incarnation

# A time so far in the past that every wait which began then is over.
AGED = -1e9
_CLOSABLE = (PagePhase.LANDED, PagePhase.KEPT)
_SENT_AGAIN = {LinkPhase.UP: "sends a heartbeat", LinkPhase.PARTING: "says goodbye again"}


class Acts:
    """The acts of one world, each computed once."""

    def __init__(self, world: World) -> None:
        self.world = world
        # Very many states of the world share the state of one machine, so the walk keeps its acts.
        self._done: dict[Any, Any] = {}

    # --- decode

    def _decode(
        self,
        value: Decode,
        text: str,
        do: Callable[[DecodeSide], None],
        price: Price,
        fair: bool,
        timer: bool = False,
    ) -> Act[Decode]:
        side, broken, after = DecodeSide(value, self.world), "", value
        try:
            after = side.run(do)
        except Exception as error:  # noqa: BLE001
            # An endpoint must not raise here, so every exception is a violation.
            broken = _broken(error)
        words = tuple(map(tuple, side.words))
        return Act(f"decode {text}", price, fair, after, words, timer, broken, side.succeeded)

    def decode_hears(self, value: Decode, rank: int, word: Word) -> Act[Decode]:
        act = self._decode(
            value,
            f"hears {described(word)}{self._of(rank)}",
            lambda s: s.hear(rank, word),
            Price.NOTHING,
            fair=True,
        )
        return act._replace(hears=True)

    def _of(self, rank: int) -> str:
        """Return the words that name `rank` in a text, or "" in a world of one rank."""
        return f" of rank {rank}" if self.world.bounds.ranks > 1 else ""

    def of_decode(self, value: Decode, rank: int, seen: Neighbour) -> list[Act[Decode]]:
        """Return decode's acts towards `rank`; for rank 0 also those that concern no rank."""
        if not value.alive:
            return []
        key = "decode", value, rank
        if key not in self._done:
            general = self._decode_alone(value) if rank == 0 else []
            self._done[key] = general, self._decode_timers(value, rank)
        general, timers = self._done[key]
        found = [*general]
        if rank == 0 and value.opened < len(self.world.bounds.rooms):
            found += self._decode_opens(value, seen)
        for kind, life, act in timers:
            dead = seen.life != life or not seen.alive
            if kind == "long":
                # No heartbeat can arrive in these cases, so the wait ends without a fault.
                fair = dead or not seen.answers or value.ranks[rank].dialled != life
                price = Price.NOTHING if fair else Price.SILENCE
                if self.world.allows(price):
                    found.append(act._replace(price=price, fair=fair))
            # Heartbeats that would change nothing at a living prefill are left out.
            elif (
                kind == "repeat"
                or dead
                or seen.silent
                or 0 < seen.oldest < value.ranks[rank].settled
            ):
                found.append(act)
        found += self._decode_proof(value, rank, seen)
        if seen.alive and value.ranks[rank].dialled == seen.life:
            # Queues leave out prefill's heartbeats (see `tables`), so one may arrive at any time.
            beat = wire.Heartbeat(source=LIVES[0][seen.life - 1], target=DECODE)
            key = "beat", value, rank
            if key not in self._done:
                self._done[key] = self.decode_hears(value, rank, beat)._replace(
                    hears=False, fair=False
                )
            found.append(self._done[key])
        return found

    def _decode_opens(self, value: Decode, seen: Neighbour) -> list[Act[Decode]]:
        key = "opens", value, seen.life
        if key not in self._done:
            others = (1,) * (self.world.bounds.ranks - 1)
            found = []
            # The registry may lag behind, and still list the first life.
            for life in range(1, seen.life + 1):
                text = f"opens a room{_whose(life)}"
                open_room = partial(DecodeSide.open_room, lives=(life, *others))
                found.append(self._decode(value, text, open_room, Price.NOTHING, fair=True))
            if self.world.allows(Price.DECODE_ABORT):
                refuse_room = partial(DecodeSide.refuse_room, lives=(seen.life, *others))
                found.append(
                    self._decode(
                        value,
                        f"refuses a room{_whose(seen.life)}",
                        refuse_room,
                        Price.DECODE_ABORT,
                        fair=False,
                    )
                )
            self._done[key] = found
        return self._done[key]  # type: ignore[no-any-return]

    def _decode_alone(self, value: Decode) -> list[Act[Decode]]:
        world, found = self.world, []

        def may(
            text: str,
            do: Callable[[DecodeSide], None],
            price: Price = Price.NOTHING,
            *,
            fair: bool = False,
        ) -> None:
            if world.allows(price):
                found.append(self._decode(value, text, do, price, fair))

        if world.allows(Price.CRASH):
            found.append(
                Act("decode crashes", Price.CRASH, False, DEAD, ((),) * world.bounds.ranks)
            )
        endpoint = world.decodes.take(value.endpoint)
        self._decode_rooms(value, endpoint, may)
        if endpoint.core.work_left:
            may("works off one task", lambda s: s.endpoint.tick(0.0), fair=True)
        if not value.left:
            may("begins to leave", DecodeSide.leave, Price.LEAVE)
        elif not value.closed:
            if any(link.phase is not LinkPhase.PARTING for link in endpoint.peers):
                may("says goodbye", DecodeSide.part)
            may("closes", DecodeSide.close, fair=True)
        return found

    def _decode_rooms(self, value: Decode, endpoint: DecodeEndpoint, may: Any) -> None:
        for number, grant in enumerate(value.grants, 1):
            if grant.linked:
                may(
                    f"lends the pages of grant {number}",
                    partial(DecodeSide.lend, grant=number),
                    fair=True,
                )
                may(
                    f"has no pages for grant {number}",
                    partial(DecodeSide.has_no_pages, grant=number),
                    Price.DECODE_ABORT,
                )
            self._decode_pages(number, grant, endpoint, may)
        for number, record in endpoint.rooms.items():
            text = f"loses the client of grant {number}"
            may(text, partial(DecodeSide.close_room, grant=number), Price.DECODE_ABORT)
            for check in record.checks:
                if check.found is None:
                    where = number, check.rank, check.message.seq
                    summed = partial(
                        DecodeSide.summed, grant=number, rank=check.rank, seq=check.message.seq
                    )
                    may(
                        f"finds the checksum of {where} good",
                        partial(summed, checksum=SUM),
                        fair=True,
                    )
                    if self.world.bounds.verify:
                        may(
                            f"finds another checksum {where}",
                            partial(summed, checksum=OTHER_SUM),
                            Price.CHECKSUM,
                        )
                    may(
                        f"cannot compute the checksum {where}",
                        partial(summed, checksum=b""),
                        Price.CHECKSUM,
                    )
                    may(
                        f"gives up the checksum {where}, whose thread runs on",
                        partial(summed, checksum=b"", lingers=True),
                        Price.CHECKSUM,
                    )

    def _decode_pages(self, number: int, grant: Grant, endpoint: DecodeEndpoint, may: Any) -> None:
        """Add the acts of threads and of the room's user on the pages of a grant."""
        record = endpoint.rooms.get(GrantId(number))
        awaited = sum(check.found is None for check in record.checks) if record else 0
        if grant.threads > awaited:
            text = f"sees a thread let the pages of grant {number} go"
            may(text, partial(DecodeSide.thread_ends, grant=number), fair=True)
        if not self.world.bounds.user:
            return
        if grant.pages.target is PagePhase.LANDED:
            keep = partial(DecodeSide.feed, grant=number, kind=PageKind.KEEP)
            may(f"has the pages of grant {number} kept", keep, fair=True)
        if grant.pages.target in _CLOSABLE:
            close = partial(DecodeSide.feed, grant=number, kind=PageKind.CLOSE)
            may(f"has landed grant {number} closed", close, fair=True)

    def _decode_timers(self, value: Decode, rank: int) -> list[tuple[str, int, Act[Decode]]]:
        """Return (kind, life of the link, act) for every timer that concerns `rank`.

        The kind is "repeat" (sends a message again), "beat" (a heartbeat) or "long" (ends a wait).
        """
        found: list[tuple[str, int, Act[Decode]]] = []
        endpoint, who = self.world.decodes.take(value.endpoint), self._of(rank)

        def every(kind: str, life: int, text: str, do: Callable[[DecodeSide], None]) -> None:
            found.append(
                (
                    kind,
                    life,
                    self._decode(
                        value,
                        text + who + _whose(life),
                        do,
                        Price.NOTHING,
                        fair=True,
                        timer=kind != "long",
                    ),
                )
            )

        for timer in sorted(endpoint.core.deadlines, key=repr):
            if timer.kind in ("stalled", "deadline"):
                if rank == 0 and timer.kind == "stalled":
                    every(
                        "repeat", 0, f"asks about grant {timer.key}", partial(_stalled, timer=timer)
                    )
                continue
            # A prefill's incarnation encodes its life and its rank: see `world.LIVES`.
            place = timer.key.incarnation % 100 - 1
            life = timer.key.incarnation // 100
            if place != rank:
                continue
            if timer.kind == "repeat":
                every("repeat", life, "repeats its Aborts", partial(DecodeSide.due, timer=timer))
                continue
            phase = endpoint.core.links.peers[timer.key].phase
            if phase is LinkPhase.GONE:
                continue
            kind = "beat" if phase is LinkPhase.UP else "repeat"
            every(
                kind, life, _SENT_AGAIN.get(phase, "registers again"), partial(_repeat, timer=timer)
            )
            if phase is LinkPhase.PARTING:
                continue
            kind = "repeat" if phase is LinkPhase.SILENT else "long"
            text = (
                "redials"
                if phase is LinkPhase.SILENT
                else "has heard nothing of prefill for too long"
            )
            every(kind, life, text, partial(_long, timer=timer))
        return found

    def _decode_proof(self, value: Decode, rank: int, seen: Neighbour) -> list[Act[Decode]]:
        proven = self.world.bounds.fences and seen.fenced
        fenced, earlier = (
            proven and (rank, 1) in value.watched,
            proven and rank == 0 and EARLIER in value.watched,
        )
        declares = self.world.allows(Price.DECLARE)
        if not fenced and not earlier and not declares:
            return []
        key = "proof", value, rank, fenced, earlier
        if key not in self._done:
            found = []
            if earlier:
                text = "has proof that an earlier decode's prefill is dead"
                found.append(
                    self._decode(
                        value, text, DecodeSide.earlier_writer_died, Price.NOTHING, fair=True
                    )
                )
            if fenced:
                text = f"has proof of prefill's death{self._of(rank)}"
                found.append(
                    self._decode(
                        value, text, lambda s: s.writer_died(rank, 1), Price.NOTHING, fair=True
                    )
                )
            if declares and (rank, 1) not in value.declared:
                text = f"is told by its operator that prefill is dead{self._of(rank)}"
                found.append(
                    self._decode(
                        value, text, lambda s: s.declare_dead(rank, 1), Price.DECLARE, fair=False
                    )
                )
            self._done[key] = found
        return self._done[key]  # type: ignore[no-any-return]

    # --- prefill

    def _prefill(
        self, value: Prefill, text: str, do: Callable[[PrefillSide], None], price: Price, fair: bool
    ) -> Act[Prefill]:
        side, broken, after = PrefillSide(value, self.world), "", value
        try:
            after = side.run(do)
        except Exception as error:  # noqa: BLE001
            # An endpoint must not raise here, so every exception is a violation.
            broken = _broken(error)
        words = () if after.target_gone else tuple(side.words)
        return Act(f"prefill {text}", price, fair, after, (words,), False, broken)

    def prefill_hears(self, value: Prefill, word: Word) -> Act[Prefill]:
        act = self._prefill(
            value, f"hears {described(word)}", lambda s: s.hear(word), Price.NOTHING, fair=True
        )
        return act._replace(hears=True)

    def of_prefill(self, value: Prefill, seen: Target) -> list[Act[Prefill]]:
        beats = seen.beats[value.life - 1]
        key = "prefill", value, seen.over, beats
        if key not in self._done:
            found = (
                self._prefill_dead(value)
                if not value.alive
                else self._prefill_alive(value, seen.over, beats)
            )
            self._done[key] = found
        return self._done[key]  # type: ignore[no-any-return]

    def _prefill_dead(self, value: Prefill) -> list[Act[Prefill]]:
        found = []
        if value.late:
            text = "prefill is dead, and its last writes land"
            found.append(Act(text, Price.NOTHING, True, value._replace(late=0), ((),)))
        if self.world.bounds.restarts and value.life == 1:
            fresh = self.world.prefills.put(self.world.new_prefill(2))
            after = value._replace(endpoint=fresh, life=2, idle=True)
            found.append(Act("prefill restarts at its address", Price.NOTHING, False, after, ((),)))
        return found

    def _prefill_alive(self, value: Prefill, over: bool, beats: bool) -> list[Act[Prefill]]:
        world, found = self.world, []

        def may(
            text: str,
            do: Callable[[PrefillSide], None],
            price: Price = Price.NOTHING,
            *,
            fair: bool = False,
        ) -> None:
            if world.allows(price):
                found.append(self._prefill(value, text, do, price, fair))

        if value.life == 1 and world.allows(Price.CRASH):
            late = value.writing
            dead = Prefill(
                -1, 1, (), late, value.landed, (), value.asked, target_gone=value.target_gone
            )
            found.append(Act("prefill crashes", Price.CRASH, False, dead, ((),)))
        if value.late:
            found.append(
                Act(
                    "doubtful writes land",
                    Price.NOTHING,
                    value.life > 1,
                    value._replace(late=0),
                    ((),),
                )
            )
        found += self._prefill_asked(value, may)
        self._prefill_writes(value, may)
        endpoint = world.prefills.take(value.endpoint)
        self._prefill_rooms(value, endpoint, may)
        self._prefill_peers(value, may)
        if value.other is Other.ABSENT:
            may("is registered with by another decode", PrefillSide.other_registers, Price.OTHER)
        elif value.other is Other.HERE:
            gone = value._replace(other=Other.DEAD)
            found.append(Act("the other decode dies", Price.NOTHING, False, gone, ((),)))
        if value.stalled:
            may("has its data plane move again", lambda s: s.stall(0.0), fair=True)
        else:
            may("has its data plane stop", lambda s: s.stall(float("inf")), Price.REFUSAL)
        if endpoint.core.tasks:
            may("works off one task", lambda s: s.endpoint.tick(0.0), fair=True)
        if not value.left:
            may("begins to leave", PrefillSide.leave, Price.LEAVE)
        elif not value.parted:
            # Prefill waits for its writes to end. A write outlasts that wait only if the data plane
            # is in doubt about it, so leaving earlier costs a doubt.
            price = Price.DOUBT if value.writes else Price.NOTHING
            may("says goodbye", PrefillSide.part, price, fair=not value.writes)
        self._prefill_timers(value, endpoint, over, beats, may)
        return found

    def _prefill_asked(self, value: Prefill, may: Any) -> list[Act[Prefill]]:
        """Add the engine's acts for its next room; return the act that skips this room."""
        if value.asked == len(self.world.bounds.rooms):
            return []
        may("is asked by its engine", PrefillSide.open_room, fair=True)
        may(
            "is asked with another prompt",
            lambda s: s.open_room(other_prompt=True),
            Price.PREFILL_ABORT,
        )
        may("has its engine refuse", PrefillSide.refuse_room, Price.PREFILL_ABORT)
        if not self.world.allows(Price.PREFILL_ABORT):
            return []
        after = value._replace(asked=value.asked + 1)
        return [Act("prefill is never asked", Price.PREFILL_ABORT, False, after, ((),))]

    def _prefill_writes(self, value: Prefill, may: Any) -> None:
        for number, write in enumerate(value.writes, 1):
            if number > 1 and not self.world.bounds.out_of_order:
                break
            may(
                f"has write {number} land",
                partial(PrefillSide.write_ended, number=number, outcome=WriteOutcome.LANDED),
                fair=True,
            )
            # A chunk without pages never reaches the data plane, so it cannot fail or stop there.
            if not write.pages:
                continue
            may(
                f"has write {number} end in doubt",
                partial(PrefillSide.write_ended, number=number, outcome=WriteOutcome.UNPROVEN),
                Price.DOUBT,
            )
            drained = partial(
                PrefillSide.write_ended, number=number, outcome=WriteOutcome.CANCELLED
            )
            if not write.cancelled:
                may(f"has write {number} stopped by its data plane", drained, Price.DOUBT)
            if write.cancelled:
                may(
                    f"has write {number} cancelled",
                    partial(PrefillSide.write_ended, number=number, outcome=WriteOutcome.CANCELLED),
                    fair=True,
                )

    def _prefill_rooms(self, value: Prefill, endpoint: PrefillEndpoint, may: Any) -> None:
        for room in value.rooms:
            record = endpoint.core.rooms[room.room]  # type: ignore[index]
            if room.matched and not room.told and not record.ended and not record.state.last_queued:
                may(
                    f"sends a chunk of room {room.room}",
                    partial(PrefillSide.send, room=room.room),
                    fair=True,
                )
            may(
                f"has room {room.room} ended by its engine",
                partial(PrefillSide.close_room, room=room.room),
                Price.PREFILL_ABORT,
            )

    def _prefill_peers(self, value: Prefill, may: Any) -> None:
        for peer, opened in value.routes:
            if not opened:
                may(
                    f"has its route to {peer} opened",
                    partial(PrefillSide.route, peer=peer, opened=True),
                    fair=True,
                )
                may(
                    f"cannot open a route to {peer}",
                    partial(PrefillSide.route, peer=peer, opened=False),
                    Price.REFUSAL,
                )
        for peer in sorted(value.watched):
            if (peer == DECODE and value.target_gone) or (
                peer == OTHER and value.other is Other.DEAD
            ):
                may(
                    f"sees the death of {peer}",
                    partial(PrefillSide.peer_died, peer=peer),
                    fair=True,
                )

    def _prefill_timers(
        self, value: Prefill, endpoint: Any, over: bool, beats: bool, may: Any
    ) -> None:
        core, never = endpoint.core, value.asked >= len(self.world.bounds.rooms)
        for timer in sorted(core.deadlines, key=repr):
            if timer.kind == "silence":
                lost = value.target_gone or not beats if timer.key == DECODE else True
                price = Price.NOTHING if lost else Price.SILENCE
                text = f"has heard nothing of decode {timer.key} for too long"
                may(text, partial(_silent, timer=timer), price, fair=lost)
            elif timer.kind == "goodbye":
                may("says goodbye again", partial(PrefillSide.due, timer=timer), fair=True)
            elif timer.kind == "announced":
                # An announcement may last 30 days, longer than any walk.
                continue
            elif timer.kind == "room":
                record = core.rooms[timer.key]
                waits_for_decode = record.phase is PrefillPhase.EXPECTED
                if not waits_for_decode and record.phase is not PrefillPhase.BOOTSTRAPPED:
                    # The timer is left from an earlier wait; the endpoint would only reset it.
                    continue
                alone = (over or value.target_gone) if waits_for_decode else never
                price = Price.NOTHING if alone else Price.PREFILL_ABORT
                may(
                    f"has waited for the other half of room {timer.key}",
                    partial(PrefillSide.due, timer=timer),
                    price,
                    fair=alone,
                )
            else:
                alone = (over or value.target_gone) and never
                price = Price.NOTHING if alone else Price.PREFILL_ABORT
                may(
                    "forgets a half that has ended",
                    partial(_outcome, timer=timer),
                    price,
                    fair=alone,
                )


def _whose(life: int) -> str:
    return "" if life < 2 else " of prefill's second life"


def _broken(error: Exception) -> str:
    if isinstance(error, TransitionError):
        return f"table: {error}"
    return (
        str(error) if isinstance(error, ViolationError) else f"I7: {type(error).__name__}: {error}"
    )


def _stalled(side: DecodeSide, timer: Timer) -> None:
    side.core.rooms[timer.key].progress_at_s = AGED
    side.due(timer)


def _repeat(side: DecodeSide, timer: Timer) -> None:
    side.core.links.peers[timer.key].sent_at_s = AGED
    side.due(timer)


def _long(side: DecodeSide, timer: Timer) -> None:
    peer = side.core.links.peers[timer.key]
    peer.received_at_s = peer.tried_at_s = AGED
    side.due(timer)


def _silent(side: PrefillSide, timer: Timer) -> None:
    side.core.peers[Incarnation(timer.key)].received_at_s = AGED
    side.due(timer)


def _outcome(side: PrefillSide, timer: Timer) -> None:
    # Outcomes expire in the order in which they were added, so only the oldest one may age.
    outcomes = side.core.rendezvous._outcomes
    for oldest in list(outcomes)[:1]:
        outcomes[oldest] = outcomes[oldest]._replace(forget_at_s=AGED)
    side.due(timer)
