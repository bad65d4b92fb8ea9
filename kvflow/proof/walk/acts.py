"""Every act that can happen at decode or at a prefill rank, and the state after it.

The expiry of a timer is an act too: the walk makes this one timer due, even if others would expire
first, and then ticks the endpoint.
"""

from __future__ import annotations

from collections.abc import Callable
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
May = Callable[..., None]
"""`may(text, do, *arguments, price=..., fair=...)` adds the act `do(side, *arguments)`."""

_CLOSABLE = (PagePhase.LANDED, PagePhase.KEPT)
_SENT_AGAIN = {LinkPhase.UP: "sends a heartbeat", LinkPhase.PARTING: "says goodbye again"}


class Acts:
    """The acts of one world, each computed once."""

    def __init__(self, world: World) -> None:
        self.world = world
        # Many states of the world contain the same state of one machine, so its acts are kept.
        self._done: dict[Any, Any] = {}

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._done:
            self._done[key] = make()
        return self._done[key]

    def _adding(self, make: Callable[..., Act[Any]], value: Any) -> tuple[list[Act[Any]], May]:
        """Return an empty list, and a function that adds acts to it if the world allows them."""
        found: list[Act[Any]] = []

        def may(
            text: str,
            do: Callable[..., None],
            *arguments: Any,
            price: Price = Price.NOTHING,
            fair: bool = False,
            **named: Any,
        ) -> None:
            if self.world.allows(price):
                act = make(value, text, lambda side: do(side, *arguments, **named), price, fair)
                found.append(act)

        return found, may

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
            # A side handles its endpoint's expected errors. Any other exception is a violation.
            broken = _broken(error)
        words = tuple(map(tuple, side.words))
        return Act(f"decode {text}", price, fair, after, words, timer, broken, side.succeeded)

    def decode_hears(self, value: Decode, rank: int, word: Word) -> Act[Decode]:
        text = f"hears {described(word)}{self._of(rank)}"
        act = self._decode(value, text, lambda s: s.hear(rank, word), Price.NOTHING, fair=True)
        return act._replace(hears=True)

    def _of(self, rank: int) -> str:
        """Return the words that name `rank` in a text, or "" in a world of one rank."""
        return f" of rank {rank}" if self.world.bounds.ranks > 1 else ""

    def of_decode(self, value: Decode, rank: int, seen: Neighbour) -> list[Act[Decode]]:
        """Return decode's acts that concern `rank`. Rank 0 also gets those that concern no rank."""
        if not value.alive:
            return []
        general, timers = self._once(
            ("decode", value, rank),
            lambda: (
                self._decode_alone(value) if rank == 0 else [],
                self._decode_timers(value, rank),
            ),
        )
        found: list[Act[Decode]] = [*general]
        if rank == 0 and value.opened < len(self.world.bounds.rooms):
            opens = ("opens", value, seen.life)
            found += self._once(opens, lambda: self._decode_opens(value, seen.life))
        for kind, life, act in timers:
            dead = seen.life != life or not seen.alive
            if kind == "long":
                # If prefill cannot answer on this link, the wait ends without a fault.
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
            heard = self._once(("beat", value, rank), lambda: self.decode_hears(value, rank, beat))
            found.append(heard._replace(hears=False, fair=False))
        return found

    def _decode_opens(self, value: Decode, current: int) -> list[Act[Decode]]:
        found, may = self._adding(self._decode, value)
        others = (1,) * (self.world.bounds.ranks - 1)
        # The registry may lag behind, and still list the first life.
        for life in range(1, current + 1):
            text = f"opens a room{_whose(life)}"
            may(text, DecodeSide.open_room, (life, *others), fair=True)
        text = f"refuses a room{_whose(current)}"
        may(text, DecodeSide.refuse_room, (current, *others), price=Price.DECODE_ABORT)
        return found

    def _decode_alone(self, value: Decode) -> list[Act[Decode]]:
        found, may = self._adding(self._decode, value)
        if self.world.allows(Price.CRASH):
            words = ((),) * self.world.bounds.ranks
            found.append(Act("decode crashes", Price.CRASH, False, DEAD, words))
        endpoint = self.world.decodes.take(value.endpoint)
        self._decode_rooms(value, endpoint, may)
        if endpoint.core.work_left:
            may("works off one task", lambda s: s.endpoint.tick(0.0), fair=True)
        if not value.left:
            may("begins to leave", DecodeSide.leave, price=Price.LEAVE)
        elif not value.closed:
            if any(link.phase is not LinkPhase.PARTING for link in endpoint.peers):
                may("says goodbye", DecodeSide.part)
            may("closes", DecodeSide.close, fair=True)
        return found

    def _decode_rooms(self, value: Decode, endpoint: DecodeEndpoint, may: May) -> None:
        for number, grant in enumerate(value.grants, 1):
            if grant.linked:
                may(f"lends the pages of grant {number}", DecodeSide.lend, number, fair=True)
                text = f"has no pages for grant {number}"
                may(text, DecodeSide.has_no_pages, number, price=Price.DECODE_ABORT)
            self._decode_pages(number, grant, endpoint, may)
        for number, record in endpoint.rooms.items():
            text = f"loses the client of grant {number}"
            may(text, DecodeSide.close_room, number, price=Price.DECODE_ABORT)
            for check in record.checks:
                if check.found is None:
                    self._decode_sums((number, check.rank, check.message.seq), may)

    def _decode_sums(self, where: tuple[GrantId, int, int], may: May) -> None:
        summed = DecodeSide.summed
        may(f"finds the checksum of {where} good", summed, *where, SUM, fair=True)
        if self.world.bounds.verify:
            text = f"finds another checksum {where}"
            may(text, summed, *where, OTHER_SUM, price=Price.CHECKSUM)
        may(f"cannot compute the checksum {where}", summed, *where, b"", price=Price.CHECKSUM)
        text = f"gives up the checksum {where}, whose thread runs on"
        may(text, summed, *where, b"", lingers=True, price=Price.CHECKSUM)

    def _decode_pages(self, number: int, grant: Grant, endpoint: DecodeEndpoint, may: May) -> None:
        """Add what threads and the room's user can do with the pages of a grant."""
        record = endpoint.rooms.get(GrantId(number))
        awaited = sum(check.found is None for check in record.checks) if record else 0
        if grant.threads > awaited:
            text = f"sees a thread let the pages of grant {number} go"
            may(text, DecodeSide.thread_ends, number, fair=True)
        if not self.world.bounds.user:
            return
        if grant.pages.target is PagePhase.LANDED:
            text = f"has the pages of grant {number} kept"
            may(text, DecodeSide.feed, number, PageKind.KEEP, fair=True)
        if grant.pages.target in _CLOSABLE:
            text = f"has landed grant {number} closed"
            may(text, DecodeSide.feed, number, PageKind.CLOSE, fair=True)

    def _decode_timers(self, value: Decode, rank: int) -> list[tuple[str, int, Act[Decode]]]:
        """Return (kind, life of the rank, act) for each timer that matters to `rank`.

        The kind is "repeat" (asks or dials again), "beat" (sends a heartbeat) or "long" (ends a
        wait). The life is 0 for the timer of a grant.
        """
        found: list[tuple[str, int, Act[Decode]]] = []
        endpoint, who = self.world.decodes.take(value.endpoint), self._of(rank)

        def every(
            kind: str, life: int, text: str, do: Callable[[DecodeSide, Timer], None], timer: Timer
        ) -> None:
            text += who + _whose(life)
            repeats = kind != "long"
            act = self._decode(value, text, lambda s: do(s, timer), Price.NOTHING, True, repeats)
            found.append((kind, life, act))

        for timer in sorted(endpoint.core.deadlines, key=repr):
            if timer.kind in ("stalled", "deadline"):
                if rank == 0 and timer.kind == "stalled":
                    every("repeat", 0, f"asks about grant {timer.key}", _stalled, timer)
                continue
            # A prefill's incarnation encodes its life and its rank: see `world.LIVES`.
            place = timer.key.incarnation % 100 - 1
            life = timer.key.incarnation // 100
            if place != rank:
                continue
            if timer.kind == "repeat":
                every("repeat", life, "repeats its Aborts", DecodeSide.due, timer)
                continue
            phase = endpoint.core.links.peers[timer.key].phase
            if phase is LinkPhase.GONE:
                continue
            kind = "beat" if phase is LinkPhase.UP else "repeat"
            every(kind, life, _SENT_AGAIN.get(phase, "registers again"), _repeat, timer)
            if phase is LinkPhase.SILENT:
                every("repeat", life, "redials", _long, timer)
            elif phase is not LinkPhase.PARTING:
                every("long", life, "has heard nothing of prefill for too long", _long, timer)
        return found

    def _decode_proof(self, value: Decode, rank: int, seen: Neighbour) -> list[Act[Decode]]:
        proven = self.world.bounds.fences and seen.fenced
        fenced = proven and (rank, 1) in value.watched
        earlier = proven and rank == 0 and EARLIER in value.watched
        if not fenced and not earlier and not self.world.allows(Price.DECLARE):
            return []

        def acts() -> list[Act[Decode]]:
            found, may = self._adding(self._decode, value)
            if earlier:
                text = "has proof that an earlier decode's prefill is dead"
                may(text, DecodeSide.earlier_writer_died, fair=True)
            if fenced:
                text = f"has proof of prefill's death{self._of(rank)}"
                may(text, DecodeSide.writer_died, rank, 1, fair=True)
            if (rank, 1) not in value.declared:
                text = f"is told by its operator that prefill is dead{self._of(rank)}"
                may(text, DecodeSide.declare_dead, rank, 1, price=Price.DECLARE)
            return found

        key = "proof", value, rank, fenced, earlier
        return self._once(key, acts)  # type: ignore[no-any-return]

    # --- prefill

    def _prefill(
        self, value: Prefill, text: str, do: Callable[[PrefillSide], None], price: Price, fair: bool
    ) -> Act[Prefill]:
        side, broken, after = PrefillSide(value, self.world), "", value
        try:
            after = side.run(do)
        except Exception as error:  # noqa: BLE001
            # A side handles its endpoint's expected errors. Any other exception is a violation.
            broken = _broken(error)
        words = () if after.target_gone else tuple(side.words)
        return Act(f"prefill {text}", price, fair, after, (words,), False, broken)

    def prefill_hears(self, value: Prefill, word: Word) -> Act[Prefill]:
        text = f"hears {described(word)}"
        act = self._prefill(value, text, lambda s: s.hear(word), Price.NOTHING, fair=True)
        return act._replace(hears=True)

    def of_prefill(self, value: Prefill, seen: Target) -> list[Act[Prefill]]:
        beats = seen.beats[value.life - 1]
        return self._once(  # type: ignore[no-any-return]
            ("prefill", value, seen.over, beats),
            lambda: (
                self._prefill_alive(value, seen.over, beats)
                if value.alive
                else self._prefill_dead(value)
            ),
        )

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
        world = self.world
        found, may = self._adding(self._prefill, value)
        if value.life == 1 and world.allows(Price.CRASH):
            late = value.writing
            dead = Prefill(
                -1, 1, (), late, value.landed, (), value.asked, target_gone=value.target_gone
            )
            found.append(Act("prefill crashes", Price.CRASH, False, dead, ((),)))
        if value.late:
            after = value._replace(late=0)
            fair = value.life > 1
            found.append(Act("doubtful writes land", Price.NOTHING, fair, after, ((),)))
        found += self._prefill_asked(value, may)
        self._prefill_writes(value, may)
        endpoint = world.prefills.take(value.endpoint)
        self._prefill_rooms(value, endpoint, may)
        self._prefill_peers(value, may)
        if value.other is Other.ABSENT:
            text = "is registered with by another decode"
            may(text, PrefillSide.other_registers, price=Price.OTHER)
        elif value.other is Other.HERE:
            gone = value._replace(other=Other.DEAD)
            found.append(Act("the other decode dies", Price.NOTHING, False, gone, ((),)))
        if value.stalled:
            may("has its data plane move again", PrefillSide.stall, 0.0, fair=True)
        else:
            text = "has its data plane stop"
            may(text, PrefillSide.stall, float("inf"), price=Price.REFUSAL)
        if endpoint.core.tasks:
            may("works off one task", lambda s: s.endpoint.tick(0.0), fair=True)
        if not value.left:
            may("begins to leave", PrefillSide.leave, price=Price.LEAVE)
        elif not value.parted:
            # Prefill leaves before its writes end only if its data plane is in doubt about them.
            price = Price.DOUBT if value.writes else Price.NOTHING
            may("says goodbye", PrefillSide.part, price=price, fair=not value.writes)
        self._prefill_timers(value, endpoint, over, beats, may)
        return found

    def _prefill_asked(self, value: Prefill, may: May) -> list[Act[Prefill]]:
        """Add the engine's acts for its next room. Return the act that skips it, if allowed."""
        if value.asked == len(self.world.bounds.rooms):
            return []
        abort = Price.PREFILL_ABORT
        may("is asked by its engine", PrefillSide.open_room, fair=True)
        text = "is asked with another prompt"
        may(text, PrefillSide.open_room, other_prompt=True, price=abort)
        may("has its engine refuse", PrefillSide.refuse_room, price=abort)
        if not self.world.allows(abort):
            return []
        after = value._replace(asked=value.asked + 1)
        return [Act("prefill is never asked", abort, False, after, ((),))]

    def _prefill_writes(self, value: Prefill, may: May) -> None:
        ended, cancelled = PrefillSide.write_ended, WriteOutcome.CANCELLED
        for number, write in enumerate(value.writes, 1):
            if number > 1 and not self.world.bounds.out_of_order:
                break
            may(f"has write {number} land", ended, number, WriteOutcome.LANDED, fair=True)
            # A chunk without pages never reaches the data plane, so it cannot fail or stop there.
            if not write.pages:
                continue
            text = f"has write {number} end in doubt"
            may(text, ended, number, WriteOutcome.UNPROVEN, price=Price.DOUBT)
            if write.cancelled:
                may(f"has write {number} cancelled", ended, number, cancelled, fair=True)
            else:
                text = f"has write {number} stopped by its data plane"
                may(text, ended, number, cancelled, price=Price.DOUBT)

    def _prefill_rooms(self, value: Prefill, endpoint: PrefillEndpoint, may: May) -> None:
        for room in value.rooms:
            record = endpoint.core.rooms[room.room]  # type: ignore[index]
            if room.matched and not room.told and not record.ended and not record.state.last_queued:
                may(f"sends a chunk of room {room.room}", PrefillSide.send, room.room, fair=True)
            text = f"has room {room.room} ended by its engine"
            may(text, PrefillSide.close_room, room.room, price=Price.PREFILL_ABORT)

    def _prefill_peers(self, value: Prefill, may: May) -> None:
        for peer, opened in value.routes:
            if not opened:
                text = f"has its route to {peer} opened"
                may(text, PrefillSide.route, peer, opened=True, fair=True)
                text = f"cannot open a route to {peer}"
                may(text, PrefillSide.route, peer, opened=False, price=Price.REFUSAL)
        for peer in sorted(value.watched):
            if (peer == DECODE and value.target_gone) or (
                peer == OTHER and value.other is Other.DEAD
            ):
                may(f"sees the death of {peer}", PrefillSide.peer_died, peer, fair=True)

    def _prefill_timers(
        self, value: Prefill, endpoint: PrefillEndpoint, over: bool, beats: bool, may: May
    ) -> None:
        core, never = endpoint.core, value.asked >= len(self.world.bounds.rooms)
        for timer in sorted(core.deadlines, key=repr):
            if timer.kind == "silence":
                lost = value.target_gone or not beats if timer.key == DECODE else True
                price = Price.NOTHING if lost else Price.SILENCE
                text = f"has heard nothing of decode {timer.key} for too long"
                may(text, _silent, timer, price=price, fair=lost)
            elif timer.kind == "goodbye":
                may("says goodbye again", PrefillSide.due, timer, fair=True)
            elif timer.kind == "announced":
                # An announcement may last 30 days, longer than any walk.
                continue
            elif timer.kind == "room":
                record = core.rooms[timer.key]
                waits_for_decode = record.phase is PrefillPhase.EXPECTED
                if not waits_for_decode and record.phase is not PrefillPhase.BOOTSTRAPPED:
                    # The timer is left over from an earlier wait. The endpoint would only reset it.
                    continue
                alone = (over or value.target_gone) if waits_for_decode else never
                price = Price.NOTHING if alone else Price.PREFILL_ABORT
                text = f"has waited for the other half of room {timer.key}"
                may(text, PrefillSide.due, timer, price=price, fair=alone)
            else:
                alone = (over or value.target_gone) and never
                price = Price.NOTHING if alone else Price.PREFILL_ABORT
                may("forgets a half that has ended", _outcome, timer, price=price, fair=alone)


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
