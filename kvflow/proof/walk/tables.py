"""The joined machines as tables of numbers, which compute the steps of a million states at once.

A state is one 64-bit number. It combines a number for decode with one for each rank's lane: prefill
and the two queues between it and decode. The acts of one side depend on its own state, on a part of
the other side's (`neighbours.Neighbour`, `neighbours.Target`) and on the first word of a queue. The
shipped endpoints compute them once, when the walk reaches a state that needs them.

The walk leaves out what cannot change its result:
- words to a dead rank;
- words to a decode that hung up, or whose rooms and loans with that rank ended: they change neither
  a result for a user nor the free pages (`test_walk` tries them all);
- prefill's heartbeats, which never change decode's state (`test_walk` tries every state);
- the order in which two writes of a rank end, unless a world includes it: prefill reports writes in
  the order in which they were queued, and a write that it has not reported counts as running;
- the order of two ranks: no rule distinguishes them, so the walk keeps only one of a state and its
  mirror image.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvflow.proof.walk.acts import Acts
from kvflow.proof.walk.decode_side import Decode
from kvflow.proof.walk.mirror import mirrored
from kvflow.proof.walk.neighbours import Neighbour, Target, neighbour, orphaned, start, target
from kvflow.proof.walk.prefill_side import Prefill
from kvflow.proof.walk.rows import Index, Interned, Numbers, Rows
from kvflow.proof.walk.states import Flag, Moves, Parts, States
from kvflow.proof.walk.world import (
    MAX_RANKS,
    NO_WORD,
    Act,
    Bounds,
    Price,
    Word,
    Words,
    World,
    described,
)

_LANE_PART = 20  # bits for each part of a lane: prefill, the queue to it, the queue to decode
_MASK = (1 << _LANE_PART) - 1
_LANE_BITS = {1: 40, 2: 23}  # bits for a lane, by the number of ranks; decode has the other bits
_WORD_BITS, _SAID_BITS, _SEEN_BITS = 8, 12, 8


class Tables:
    """The acts of all machines within `bounds`, computed when a state needs them."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds, self.world = bounds, World(bounds)
        self.acts = Acts(self.world)
        self._lane_bits = _LANE_BITS[bounds.ranks]
        self.decodes: Interned[Decode] = Interned(64 - bounds.ranks * self._lane_bits)
        self.prefills: Interned[Prefill] = Interned(_LANE_PART)
        self.queues: Interned[Words] = Interned(_LANE_PART)
        self.lanes = Index()
        self._words: Interned[Word] = Interned(_WORD_BITS)
        self._said: Interned[Words] = Interned(_SAID_BITS)
        self._seen: Interned[Neighbour] = Interned(_SEEN_BITS)
        self._target: Interned[Target] = Interned(3)
        self.texts: Interned[tuple[str, str]] = Interned(30)  # (text of an act, broken invariant)
        # Number 0 means no word, an empty queue, or no words to send.
        self._words.number(NO_WORD)
        self.queues.number(())
        self._said.number(())
        self._at_prefill = Rows(self._prefill_rows, 5)
        self._to_prefill = Rows(self._prefill_hears, 5)
        self._at_decode = Rows(self._decode_rows, 5 + bounds.ranks)
        self._to_decode = Rows(self._decode_hears, 5 + bounds.ranks)
        self._append = Rows(self._append_row, 1)
        self._fault = Rows(self._fault_rows, 3)
        # `Interned.column` caches by the question, so each question must stay the same object.
        self._head = lambda queue: self._words.number(queue[0]) if queue else 0
        self._tail = lambda queue: self.queues.number(queue[1:])
        self._mirror = lambda decode: self.decodes.number(mirrored(decode, self.world))
        self._orphan = lambda prefill: self.prefills.number(orphaned(prefill))
        self._neighbour = lambda prefill: self._seen.number(neighbour(prefill))
        rooms = len(bounds.rooms)
        self._over = lambda decode: target(decode, 0, rooms).over and not decode.busy
        self._deaf = [
            lambda decode, rank=rank: deaf(decode, rank, rooms) for rank in range(bounds.ranks)
        ]
        self._sees = [self._target_of(rank) for rank in range(bounds.ranks)]
        whole = self.world.all_bits
        self._whole = [
            lambda prefill, g=g: prefill.landed[g] == whole for g in range(bounds.last_grant + 1)
        ]

    def _target_of(self, rank: int) -> Callable[[Decode], int]:
        return lambda decode: self._target.number(target(decode, rank, len(self.bounds.rooms)))

    def start(self) -> States:
        mine, theirs = start(self.world)
        none, ranks = self.queues.number(()), self.bounds.ranks
        columns = [
            [np.array([number])] * ranks for number in (self.prefills.number(theirs), none, none)
        ]
        return self.pack(Parts(np.array([self.decodes.number(mine)]), *columns))

    # --- a state and its parts

    def pack(self, parts: Parts) -> States:
        lanes = []
        for rank, (prefill, to_prefill, to_decode) in enumerate(zip(*parts[1:], strict=True)):
            deaf = self.decodes.column(self._deaf[rank])[parts.decode] > 0
            queue = np.where(deaf, 0, to_decode)
            lane = (prefill << _LANE_PART | to_prefill) << _LANE_PART | queue
            lanes.append(self.lanes.number(lane))
        decode = parts.decode
        # Of a state and its mirror image, the walk keeps the one whose first lane is smaller.
        if len(lanes) == 2:
            first, second = lanes
            mirror = self.decodes.column(self._mirror)[decode]
            swap = (first > second) | ((first == second) & (mirror < decode))
            decode = np.where(swap, mirror, decode)
            lanes = [np.where(swap, second, first), np.where(swap, first, second)]
        packed = decode.astype(np.uint64)
        for lane in lanes:
            packed = packed << np.uint64(self._lane_bits) | lane.astype(np.uint64)
        return packed

    def parts(self, states: States) -> Parts:
        columns: list[list[Numbers]] = [[], [], []]
        for _ in range(self.bounds.ranks):
            number = states & np.uint64((1 << self._lane_bits) - 1)
            lane = self.lanes.keys[number.astype(np.int64)]
            for column in reversed(columns):
                column.insert(0, lane & _MASK)
                lane = lane >> _LANE_PART
            states = states >> np.uint64(self._lane_bits)
        return Parts(states.astype(np.int64), *columns)

    # --- what is asked about states

    def unsafe(self, parts: Parts) -> NDArray[np.bool_]:
        """Mark the states that break I2: a write may still reach free pages, or pages of a user."""
        home, writing = self.decodes.column(_home)[parts.decode], self.prefills.column(_writing)
        late = np.zeros_like(home)
        # Writes by a rank that an operator declared dead are the operator's responsibility.
        for rank, prefill in enumerate(parts.prefills):
            declared = self.decodes.column(_DECLARED[rank])[parts.decode] > 0
            late |= np.where(declared, 0, writing[prefill])
        return home & late > 0

    def at_rest(self, parts: Parts) -> NDArray[np.bool_]:
        """Mark the states at rest: no work is under way, all rooms have ended, and each open loan
        waits for a rank that cannot prove what became of its writes.
        """
        rest = self.decodes.column(self._over)[parts.decode] > 0
        # An earlier decode's loan must end too, if a fence can prove that rank 0's first life died.
        if self.bounds.fences:
            waits = self.decodes.column(_waits_for_earlier)[parts.decode] > 0
            rest &= ~(waits & (self.prefills.column(_gone)[parts.prefills[0]] > 0))
        for rank, (prefill, to_prefill, to_decode) in enumerate(zip(*parts[1:], strict=True)):
            rest &= (to_prefill == 0) & (to_decode == 0)
            rest &= self.prefills.column(self._rests)[prefill] > 0
            owes = self.decodes.column(_OWES[rank])[parts.decode]
            cannot_know = self.prefills.column(self._cannot_know)[prefill] > 0
            rest &= (owes == 0) | ((owes == 1) & cannot_know)
            oldest = self.prefills.column(_oldest)[prefill]
            settled = self.decodes.column(_SETTLED[rank])[parts.decode]
            # Prefill must remember no grant below `settled`: decode needs no message about those.
            rest &= (oldest == 0) | (oldest >= settled)
        return rest

    def _rests(self, prefill: Prefill) -> bool:
        p = prefill
        if not p.alive:
            return not p.late
        died = p.target_gone and bool(p.watched)
        return (
            p.idle
            and not died
            and not p.writes
            and not p.outcomes
            and p.asked >= len(self.bounds.rooms)
            and all(opened for _, opened in p.routes)
        )

    def _cannot_know(self, prefill: Prefill) -> bool:
        return prefill.doubts or prefill.named or (prefill.gone and not self.bounds.fences)

    # --- what can happen

    def moves(self, states: States, *, fair_only: bool = False) -> list[Moves]:
        parts = self.parts(states)
        crashed = self.decodes.column(_alive)[parts.decode] == 0
        for prefill in parts.prefills:
            crashed |= self.prefills.column(_gone)[prefill] > 0
        found = []
        for rank in range(self.bounds.ranks):
            found += [*self._prefill_moves(parts, rank), *self._decode_moves(parts, rank)]
            if not fair_only:
                found += [self._fault_moves(parts, rank, way) for way in (0, 1)]
        kept = []
        for moves in found:
            # At most one process may crash. A step that leads back to its own state adds nothing.
            keep = (moves.price != Price.CRASH) | ~crashed[moves.source]
            keep &= (moves.state != states[moves.source]) | moves.broken
            if fair_only:
                keep &= moves.fair
            kept.append(Moves(*(column[keep] for column in moves)))
        return kept

    def _prefill_moves(self, parts: Parts, rank: int) -> list[Moves]:
        prefill, seen = parts.prefills[rank], self.decodes.column(self._sees[rank])[parts.decode]
        alone = self._prefill_did(parts, rank, *self._at_prefill.of(prefill << 3 | seen))
        head = self.queues.column(self._head)[parts.to_prefill[rank]]
        some = np.flatnonzero(head)
        source, rows = self._to_prefill.of(prefill[some] << _WORD_BITS | head[some])
        return [alone, self._prefill_did(parts, rank, some[source], rows)]

    def _prefill_did(self, parts: Parts, rank: int, source: Numbers, rows: Numbers) -> Moves:
        to, said, price, flags, text = rows.T
        new = parts.at(source)
        new.prefills[rank] = to
        tail = self.queues.column(self._tail)[new.to_prefill[rank]]
        queue = np.where(flags & Flag.POP, tail, new.to_prefill[rank])
        new.to_prefill[rank] = np.where(flags & Flag.CLEAR_PREFILL, 0, queue)
        new.to_decode[rank] = np.where(flags & Flag.CLEAR_DECODE, 0, new.to_decode[rank])
        _, queued = self._append.of(self._append_key(new.to_decode, rank, said, 0))
        new.to_decode[rank] = queued[:, 0]
        return self._found(source, new, price, flags, text)

    def _decode_moves(self, parts: Parts, rank: int) -> list[Moves]:
        decode = parts.decode * self.bounds.ranks + rank
        seen = self.prefills.column(self._neighbour)[parts.prefills[rank]]
        alone = self._decode_did(parts, rank, *self._at_decode.of(decode << _SEEN_BITS | seen))
        head = self.queues.column(self._head)[parts.to_decode[rank]]
        some = np.flatnonzero(head)
        source, rows = self._to_decode.of(decode[some] << _WORD_BITS | head[some])
        return [alone, self._decode_did(parts, rank, some[source], rows)]

    def _decode_did(self, parts: Parts, rank: int, source: Numbers, rows: Numbers) -> Moves:
        # A patient decode repeats messages only while every queue is empty.
        if self.bounds.patient:
            queued = sum(parts.to_prefill + parts.to_decode, np.zeros_like(parts.decode))
            busy = queued > 0
            keep = ~(busy[source] & (rows[:, 2] & Flag.TIMER > 0))
            source, rows = source[keep], rows[keep]
        new = parts.at(source)
        new = new._replace(decode=rows[:, 0])
        tail = self.queues.column(self._tail)[new.to_decode[rank]]
        new.to_decode[rank] = np.where(rows[:, 2] & Flag.POP, tail, new.to_decode[rank])
        for other in range(self.bounds.ranks):
            dead = self.prefills.column(_alive)[new.prefills[other]] == 0
            said = np.where(dead, 0, rows[:, 5 + other])
            timer = (rows[:, 2] & Flag.TIMER > 0).astype(np.int64)
            kept, queued = self._append.of(self._append_key(new.to_prefill, other, said, timer))
            source, rows, new = source[kept], rows[kept], new.at(kept)
            new.to_prefill[other] = queued[:, 0]
            crash = rows[:, 2] & Flag.CLEAR_DECODE > 0
            new.to_decode[other] = np.where(crash, 0, new.to_decode[other])
            orphan = self.prefills.column(self._orphan)[new.prefills[other]]
            new.prefills[other] = np.where(crash, orphan, new.prefills[other])
        _, price, flags, text, succeeded = rows.T[:5]
        # This part of I8 needs decode and every rank, so no single side can check it.
        for grant in np.unique(succeeded[succeeded > 0]).tolist():
            success = np.flatnonzero(succeeded == grant)
            for prefill in new.prefills:
                partial = success[self.prefills.column(self._whole[grant])[prefill[success]] == 0]
                flags[partial] |= Flag.BROKEN
                text[partial] = self.texts.number(
                    ("a room succeeds", "I8: success without all pages of all ranks")
                )
        return self._found(source, new, price, flags, text)

    def _append_key(
        self, queues: list[Numbers], rank: int, said: Numbers, timer: Numbers | int
    ) -> Numbers:
        """Pack a queue, the words to append, the number of free places and the timer flag."""
        length = self.queues.column(len)
        others = sum(length[queue] for other, queue in enumerate(queues) if other != rank)
        free = self.bounds.in_flight - others
        return (queues[rank] << _SAID_BITS | said) << 4 | free << 1 | timer

    def _fault_moves(self, parts: Parts, rank: int, way: int) -> Moves:
        queues = (parts.to_prefill, parts.to_decode)[way]
        some = np.flatnonzero(queues[rank])
        here = parts.at(some)
        key = self._append_key(
            (here.to_prefill, here.to_decode)[way], rank, np.zeros_like(some), way
        )
        source, rows = self._fault.of(key)
        new = here.at(source)
        (new.to_prefill, new.to_decode)[way][rank] = rows[:, 0]
        return self._found(some[source], new, rows[:, 1], np.zeros_like(source), rows[:, 2])

    def _found(
        self, source: Numbers, new: Parts, price: Numbers, flags: Numbers, text: Numbers
    ) -> Moves:
        broken = flags & Flag.BROKEN > 0
        return Moves(source, self.pack(new), price, flags & Flag.FAIR > 0, broken, text)

    # --- rows, each made once

    def _prefill_rows(self, key: int) -> list[tuple[int, ...]]:
        state, seen = self.prefills.values[key >> 3], self._target.values[key & 7]
        rows = []
        for act in self.acts.of_prefill(state, seen):
            # A crash loses the words to prefill. Those to decode may arrive or be lost too.
            crash = act.price is Price.CRASH
            rows.append(self._prefill_row(act, Flag.CLEAR_PREFILL if crash else Flag(0)))
            if crash:
                rows.append(self._prefill_row(act, Flag.CLEAR_PREFILL | Flag.CLEAR_DECODE))
        return rows

    def _prefill_hears(self, key: int) -> list[tuple[int, ...]]:
        state = self.prefills.values[key >> _WORD_BITS]
        if not state.alive:
            return []
        word = self._words.values[key & (1 << _WORD_BITS) - 1]
        return [self._prefill_row(self.acts.prefill_hears(state, word), Flag.POP)]

    def _prefill_row(self, act: Act[Prefill], flags: Flag) -> tuple[int, ...]:
        said = self._said.number(act.words[0])
        text = self.texts.number((act.text, act.broken))
        return self.prefills.number(act.side), said, act.price, _flags(act, flags), text

    def _decode_rows(self, key: int) -> list[tuple[int, ...]]:
        seen = self._seen.values[key & (1 << _SEEN_BITS) - 1]
        number, rank = divmod(key >> _SEEN_BITS, self.bounds.ranks)
        return [
            self._decode_row(act)
            for act in self.acts.of_decode(self.decodes.values[number], rank, seen)
        ]

    def _decode_hears(self, key: int) -> list[tuple[int, ...]]:
        word = self._words.values[key & (1 << _WORD_BITS) - 1]
        number, rank = divmod(key >> _WORD_BITS, self.bounds.ranks)
        state = self.decodes.values[number]
        return [self._decode_row(self.acts.decode_hears(state, rank, word))] if state.alive else []

    def _decode_row(self, act: Act[Decode]) -> tuple[int, ...]:
        flags = Flag(0) if act.side.alive else Flag.CLEAR_DECODE
        said = [self._said.number(words) for words in act.words]
        text = self.texts.number((act.text, act.broken))
        number = self.decodes.number(act.side)
        return number, act.price, _flags(act, flags), text, act.succeeded, *said

    def _append_row(self, key: int) -> list[tuple[int, ...]]:
        timer, free, key = key & 1, key >> 1 & 7, key >> 4
        said = self._said.values[key & (1 << _SAID_BITS) - 1]
        queue = self.queues.values[key >> _SAID_BITS]
        if timer and any(word in queue for word in said):
            return []
        # A full queue drops the rest, like a ZMQ socket at its high-water mark.
        return [(self.queues.number((queue + said)[:free]),)]

    def _fault_rows(self, key: int) -> list[tuple[int, ...]]:
        way, free = ("to prefill", "to decode")[key & 1], key >> 1 & 7
        queue = self.queues.values[key >> (_SAID_BITS + 4)]
        rows: list[tuple[int, ...]] = []
        for i, word in enumerate(queue):
            lost = self.texts.number((f"the link loses {described(word)} on its way {way}", ""))
            rows.append((self.queues.number(queue[:i] + queue[i + 1 :]), Price.DROP, lost))
            if len(queue) < free:
                twice = self.texts.number(
                    (f"{described(word)} will arrive a second time, late, on its way {way}", "")
                )
                rows.append((self.queues.number((*queue, word)), Price.DUPLICATE, twice))
        return rows


def _flags(act: Act[Any], flags: Flag) -> Flag:
    if act.fair:
        flags |= Flag.FAIR
    if act.timer:
        flags |= Flag.TIMER
    if act.hears:
        flags |= Flag.POP
    return flags | Flag.BROKEN if act.broken else flags


def deaf(decode: Decode, rank: int, rooms: int) -> bool:
    """Return True if decode receives no word from this rank, or if no such word can change it."""
    if not decode.alive:
        return True
    mine = decode.ranks[rank]
    over = decode.opened >= rooms and not decode.rooms and not decode.busy
    return not mine.dialled or (over and not mine.owes and mine.up > 0)


def _each(question: Callable[[Decode, int], int]) -> list[Callable[[Decode], int]]:
    """Return one function for each rank, which answers `question` about a decode and this rank."""
    return [
        lambda decode, rank=rank: question(decode, rank)  # type: ignore[misc]
        for rank in range(MAX_RANKS)
    ]


def _home(decode: Decode) -> int:
    found = 0
    for number, grant in enumerate(decode.grants, 1):
        found |= grant.home << number * len(grant.target)
    return found


def _waits_for_earlier(decode: Decode) -> bool:
    return decode.alive and decode.earlier and not decode.closed


_writing = attrgetter("writing")
_oldest = attrgetter("oldest")
_alive = attrgetter("alive")
_gone = attrgetter("gone")
_OWES = _each(
    lambda decode, rank: decode.ranks[rank].owes if decode.alive and not decode.closed else 0
)
_SETTLED = _each(lambda decode, rank: decode.ranks[rank].settled if decode.alive else 0)
_DECLARED = _each(lambda decode, rank: (rank, 1) in decode.declared)
