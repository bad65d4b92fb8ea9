"""The joined machines as tables of numbers, so that a million states are moved on at once.

A state is one 64-bit number: decode, and for each rank prefill and the two queues between them, each the number of an
interned value. What one side does depends on that side and the first word of a queue; it is worked out once, by the
shipped machines (`explore_prefill`, `explore_decode`), when a state that was reached needs it.

What is left out because it cannot matter:
- words to a rank that is dead: its next life refuses them, as it does decode's heartbeat, which needs no queue;
- words to a decode whose room and loan with that rank have ended: none changes it (`test_explore` asks them all);
- the order in which two writes of a rank end: they are reported in the order they were queued, and a write that is not
  reported is still taken for one that runs;
- the order of two ranks: no rule tells one from the other, so of a state and its mirror image one is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntFlag
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.machines.loan import LoanPhase
from kvflow.testing.sim import explore_decode, explore_prefill
from kvflow.testing.sim.explore_decode import Decode, LinkState, Neighbour
from kvflow.testing.sim.explore_prefill import Act, Hold, Life, Prefill, Price, Word
from kvflow.testing.sim.explore_rows import Interned, Numbers, Rows

States = NDArray[np.uint64]
Words = tuple[Word, ...]


UNLIMITED = -1


class Bounds(NamedTuple):
    """Faults are bounded, the rest is not. A full queue loses what is sent, as a ZMQ socket at its high-water mark."""

    ranks: int = 1
    chunks: int = 3
    in_flight: int = 4  # each way, over all ranks
    drops: int = 2
    duplicates: int = 2
    crashes: int = 1
    aborts: int = 1  # by each side
    doubts: int = UNLIMITED
    silences: int = UNLIMITED


class Flag(IntFlag):
    """What a row says beside where it leads."""

    POP = 1  # the first word of the queue was heard
    FAIR = 2
    TIMER = 4  # not while the same word is on its way
    CLEAR_PREFILL = 8  # what was on its way to prefill is lost
    CLEAR_DECODE = 16
    SUCCESS = 32  # decode's room has just succeeded
    BROKEN = 64


class Parts(NamedTuple):
    """States taken apart: numbers of decode, and per rank of prefill, the queue to it and the queue to decode."""

    decode: Numbers
    prefills: list[Numbers]
    to_prefill: list[Numbers]
    to_decode: list[Numbers]

    def at(self, which: Numbers) -> Parts:
        return Parts(self.decode[which], *([column[which] for column in columns] for columns in self[1:]))


class Moves(NamedTuple):
    """Steps of many states: from `source` (an index) to `state`, at a price; `text` numbers what happened."""

    source: Numbers
    state: States
    price: Numbers
    fair: NDArray[np.bool_]
    broken: NDArray[np.bool_]
    text: Numbers


_PREFILL_BITS, _DECODE_BITS, _WORD_BITS, _SAID_BITS = 9, 10, 4, 7


class Tables:
    """Everything the machines can do within `bounds`, as far as it was needed."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._queue_bits = 12 if bounds.ranks == 1 else 9
        self.decodes: Interned[Decode] = Interned(_DECODE_BITS)
        self.prefills: Interned[Prefill] = Interned(_PREFILL_BITS)
        self.queues: Interned[Words] = Interned(self._queue_bits)
        self._words: Interned[Word] = Interned(_WORD_BITS)
        self._said: Interned[Words] = Interned(_SAID_BITS)
        self._seen: Interned[Neighbour] = Interned(4)
        self.texts: Interned[tuple[str, str]] = Interned(30)  # what happened, and what it broke
        self._words.number(Word("nothing"))
        self.queues.number(())
        self._said.number(())
        queues = 1 << self._queue_bits
        self._at_prefill = Rows(self._prefill_rows, 2 << (_PREFILL_BITS + _WORD_BITS), 5)
        self._at_decode = Rows(self._decode_rows, bounds.ranks << (_DECODE_BITS + 4 + _WORD_BITS), 4 + bounds.ranks)
        self._append = Rows(self._append_row, queues << (_SAID_BITS + 4), 1)
        self._fault = Rows(self._fault_rows, queues << (_SAID_BITS + 4), 3)
        # what is asked about a value, one object each
        self._head = lambda queue: self._words.number(queue[0]) if queue else 0
        self._tail = lambda queue: self.queues.number(queue[1:])
        self._mirror = lambda decode: self.decodes.number(_mirrored(decode))
        self._orphan = lambda prefill: self.prefills.number(orphaned(prefill))
        self._neighbour = lambda prefill: self._seen.number(neighbour(prefill))
        self._whole = lambda prefill: prefill.landed == bounds.chunks

    def start(self) -> States:
        decode = self.decodes.number(Decode(True, (LinkState.UP,) * self.bounds.ranks))
        prefill, none = self.prefills.number(Prefill()), self.queues.number(())
        ranks = self.bounds.ranks
        columns = [[np.array([number])] * ranks for number in (prefill, none, none)]
        return self.pack(Parts(np.array([decode]), *columns))

    # --- a state and its parts

    def pack(self, parts: Parts) -> States:
        lanes = []
        for rank, (prefill, to_prefill, to_decode) in enumerate(zip(*parts[1:], strict=True)):
            deaf = self.decodes.column(_DEAF[rank])[parts.decode] > 0
            queues = to_prefill << self._queue_bits | np.where(deaf, 0, to_decode)
            lanes.append(prefill << (2 * self._queue_bits) | queues)
        decode = parts.decode
        if len(lanes) == 2:
            first, second = lanes
            mirror = self.decodes.column(self._mirror)[decode]
            swap = (first > second) | ((first == second) & (mirror < decode))
            decode = np.where(swap, mirror, decode)
            lanes = [np.where(swap, second, first), np.where(swap, first, second)]
        packed = decode.astype(np.uint64)
        for lane in lanes:
            packed = packed << np.uint64(2 * self._queue_bits + _PREFILL_BITS) | lane.astype(np.uint64)
        return packed

    def parts(self, states: States) -> Parts:
        columns: list[list[Numbers]] = [[], [], []]
        for _ in range(self.bounds.ranks):
            for column, bits in zip(
                reversed(columns), (self._queue_bits, self._queue_bits, _PREFILL_BITS), strict=True
            ):
                column.insert(0, (states & np.uint64((1 << bits) - 1)).astype(np.int64))
                states = states >> np.uint64(bits)
        return Parts(states.astype(np.int64), *columns)

    # --- what is asked about states

    def unsafe(self, parts: Parts) -> NDArray[np.bool_]:
        """I2: the pages are free, and somebody may write into them."""
        home = self.decodes.column(_home)[parts.decode] > 0
        writing = self.prefills.column(_writing)
        late = np.zeros_like(home)
        for prefill in parts.prefills:
            late |= writing[prefill] > 0
        return home & late

    def at_rest(self, parts: Parts) -> NDArray[np.bool_]:
        """Nothing is under way, both sides have ended, and pages that are not home wait for a rank that cannot know."""
        rest = self.decodes.column(_over)[parts.decode] > 0
        for rank, (prefill, to_prefill, to_decode) in enumerate(zip(*parts[1:], strict=True)):
            rest &= (self.decodes.column(_settled)[parts.decode] == 0) | (self.prefills.column(_tidy)[prefill] > 0)
            rest &= (self.prefills.column(_rests)[prefill] > 0) & (to_prefill == 0) & (to_decode == 0)
            loan = self.decodes.column(_LOAN[rank])[parts.decode]
            unknowing = self.prefills.column(_unknowing)[prefill] > 0
            rest &= (loan == LoanPhase.RETURNED) | ((loan == LoanPhase.DOUBTFUL) & unknowing)
        return rest

    # --- what can happen

    def moves(self, states: States, *, fair_only: bool = False) -> list[Moves]:
        parts = self.parts(states)
        crashed = self.decodes.column(_alive)[parts.decode] == 0
        for prefill in parts.prefills:
            crashed |= self.prefills.column(_gone)[prefill] > 0
        found = []
        for rank in range(self.bounds.ranks):
            found += [self._prefill_moves(parts, rank), self._decode_moves(parts, rank)]
            if not fair_only:
                found += [self._fault_moves(parts, rank, way) for way in (0, 1)]
        spent = crashed if self.bounds.crashes else np.ones_like(crashed)
        kept = []
        for moves in found:
            keep = (moves.price != Price.CRASH) | ~spent[moves.source]
            keep &= (moves.state != states[moves.source]) | moves.broken
            if fair_only:
                keep &= moves.fair
            kept.append(Moves(*(column[keep] for column in moves)))
        return kept

    def _prefill_moves(self, parts: Parts, rank: int) -> Moves:
        over = self.decodes.column(_over)[parts.decode]
        head = self.queues.column(self._head)[parts.to_prefill[rank]]
        source, rows = self._at_prefill.of((parts.prefills[rank] * 2 + over) << _WORD_BITS | head)
        to, said, price, flags, text = rows.T
        new = parts.at(source)
        new.prefills[rank] = to
        queue = np.where(flags & Flag.POP, self.queues.column(self._tail)[new.to_prefill[rank]], new.to_prefill[rank])
        new.to_prefill[rank] = np.where(flags & Flag.CLEAR_PREFILL, 0, queue)
        new.to_decode[rank] = np.where(flags & Flag.CLEAR_DECODE, 0, new.to_decode[rank])
        _, queued = self._append.of(self._append_key(new.to_decode, rank, said, 0))
        new.to_decode[rank] = queued[:, 0]
        return self._found(source, new, price, flags, text)

    def _decode_moves(self, parts: Parts, rank: int) -> Moves:
        seen = self.prefills.column(self._neighbour)[parts.prefills[rank]]
        head = self.queues.column(self._head)[parts.to_decode[rank]]
        key = ((parts.decode * self.bounds.ranks + rank) << 4 | seen) << _WORD_BITS | head
        source, rows = self._at_decode.of(key)
        new = parts.at(source)
        new = new._replace(decode=rows[:, 0])
        for other in range(self.bounds.ranks):
            flags = rows[:, 2]
            deaf = self.prefills.column(_gone)[new.prefills[other]] > 0
            said = np.where(deaf, 0, rows[:, 4 + other])
            timer = (flags & Flag.TIMER > 0).astype(np.int64)
            kept, queued = self._append.of(self._append_key(new.to_prefill, other, said, timer))
            source, rows, new = source[kept], rows[kept], new.at(kept)
            new.to_prefill[other] = queued[:, 0]
            crash = rows[:, 2] & Flag.CLEAR_DECODE > 0
            new.to_decode[other] = np.where(crash, 0, new.to_decode[other])
            orphan = self.prefills.column(self._orphan)[new.prefills[other]]
            new.prefills[other] = np.where(crash, orphan, new.prefills[other])
        _, price, flags, text = rows.T[:4]
        queue = new.to_decode[rank]
        new.to_decode[rank] = np.where(flags & Flag.POP, self.queues.column(self._tail)[queue], queue)
        success = np.flatnonzero(flags & Flag.SUCCESS)
        for prefill in new.prefills:
            partial = success[self.prefills.column(self._whole)[prefill[success]] == 0]
            flags[partial] |= Flag.BROKEN
            text[partial] = self.texts.number(("decode's room succeeds", "I8: success without all pages of all ranks"))
        return self._found(source, new, price, flags, text)

    def _append_key(self, queues: list[Numbers], rank: int, said: Numbers, timer: Numbers | int) -> Numbers:
        """What is said, to which queue, and how much may be in flight beside it."""
        length = self.queues.column(len)
        others = sum(length[queue] for other, queue in enumerate(queues) if other != rank)
        free = self.bounds.in_flight - others
        return (queues[rank] << _SAID_BITS | said) << 4 | free << 1 | timer

    def _fault_moves(self, parts: Parts, rank: int, way: int) -> Moves:
        queues = (parts.to_prefill, parts.to_decode)[way][rank]
        source, rows = self._fault.of(
            self._append_key((parts.to_prefill, parts.to_decode)[way], rank, np.zeros_like(queues), way)
        )
        new = parts.at(source)
        (new.to_prefill, new.to_decode)[way][rank] = rows[:, 0]
        return self._found(source, new, rows[:, 1], np.zeros_like(source), rows[:, 2])

    def _found(self, source: Numbers, new: Parts, price: Numbers, flags: Numbers, text: Numbers) -> Moves:
        broken = flags & Flag.BROKEN > 0
        return Moves(source, self.pack(new), price, flags & Flag.FAIR > 0, broken, text)

    # --- rows, each made once

    def _prefill_rows(self, key: int) -> list[tuple[int, ...]]:
        key, word = key >> _WORD_BITS, self._words.values[key & (1 << _WORD_BITS) - 1]
        state, chunks = self.prefills.values[key >> 1], self.bounds.chunks
        rows = []
        for act in explore_prefill.acts(state, chunks, word, decode_over=bool(key & 1)):
            flags = _flags(act, Flag.POP if act.hears else Flag(0))
            crash = act.price is Price.CRASH
            rows.append(self._prefill_row(act, flags | (Flag.CLEAR_PREFILL if crash else 0)))
            if crash:
                rows.append(self._prefill_row(act, flags | Flag.CLEAR_PREFILL | Flag.CLEAR_DECODE))
        return rows

    def _prefill_row(self, act: Act[Prefill], flags: int) -> tuple[int, ...]:
        said = self._said.number(act.words[0])
        return self.prefills.number(act.side), said, act.price, flags, self.texts.number((act.text, act.broken))

    def _decode_rows(self, key: int) -> list[tuple[int, ...]]:
        key, word = key >> _WORD_BITS, self._words.values[key & (1 << _WORD_BITS) - 1]
        seen, key = self._seen.values[key & 15], key >> 4
        number, rank = divmod(key, self.bounds.ranks)
        state, rows = self.decodes.values[number], []
        for act in explore_decode.acts(state, self.bounds.chunks, rank, seen, word):
            flags = _flags(act, Flag.POP if act.hears else Flag(0))
            if not act.side.alive:
                flags |= Flag.CLEAR_DECODE
            if act.side.succeeded and not state.succeeded:
                flags |= Flag.SUCCESS
            text = self.texts.number((act.text, act.broken))
            said = [self._said.number(words) for words in act.words]
            rows.append((self.decodes.number(act.side), act.price, flags, text, *said))
        return rows

    def _append_row(self, key: int) -> list[tuple[int, ...]]:
        timer, free, key = key & 1, key >> 1 & 7, key >> 4
        said, queue = self._said.values[key & (1 << _SAID_BITS) - 1], self.queues.values[key >> _SAID_BITS]
        if timer and any(word in queue for word in said):
            return []
        return [(self.queues.number((queue + said)[:free]),)]

    def _fault_rows(self, key: int) -> list[tuple[int, ...]]:
        way, free, queue = (
            ("to prefill", "to decode")[key & 1],
            key >> 1 & 7,
            self.queues.values[key >> (_SAID_BITS + 4)],
        )
        rows: list[tuple[int, ...]] = []
        for i, word in enumerate(queue):
            lost = self.texts.number((f"the link loses {word!s} on its way {way}", ""))
            rows.append((self.queues.number(queue[:i] + queue[i + 1 :]), Price.DROP, lost))
            if len(queue) < free:
                twice = self.texts.number((f"{word!s} will arrive a second time, late, on its way {way}", ""))
                rows.append((self.queues.number((*queue, word)), Price.DUPLICATE, twice))
        return rows


def _flags(act: Act[Any], flags: Flag) -> Flag:
    if act.fair:
        flags |= Flag.FAIR
    if act.timer:
        flags |= Flag.TIMER
    return flags | Flag.BROKEN if act.broken else flags


def _mirrored(decode: Decode) -> Decode:
    """The same with its two ranks in each other's place."""
    room = decode.room
    if room is not None:
        finished = room.finished >> 1 | (room.finished & 1) << 1
        swapped = {"next_seq": room.next_seq[::-1], "filled": room.filled[::-1], "finished": finished}
        room = msgspec.structs.replace(room, **swapped)
    return decode._replace(room=room, links=decode.links[::-1], loans=decode.loans[::-1])


def neighbour(prefill: Prefill) -> Neighbour:
    alive = prefill.life is Life.ALIVE
    remembers = alive and prefill.hold in (Hold.UNKNOWN, Hold.CLOSED)
    return Neighbour(alive, prefill.life is Life.RESTARTED, not alive and not prefill.late, remembers)


def orphaned(prefill: Prefill) -> Prefill:
    """Decode's process is gone, and with it the memory that late writes could reach."""
    return prefill._replace(target_gone=True, late=False) if prefill.life is Life.ALIVE else Prefill(prefill.life)


def _loan(rank: int) -> Callable[[Decode], int]:
    return lambda decode: decode.loans[rank] if decode.alive and decode.loans else LoanPhase.RETURNED


def _deaf(rank: int) -> Callable[[Decode], bool]:
    return lambda decode: decode.deaf(rank)


_LOAN = [_loan(0), _loan(1)]
_DEAF = [_deaf(0), _deaf(1)]
_over = attrgetter("over")
_home = attrgetter("home")
_settled = attrgetter("settled")
_alive = attrgetter("alive")
_writing = attrgetter("writing")
_rests = attrgetter("at_rest")
_unknowing = attrgetter("unknowing")
_tidy = attrgetter("tidy")
_gone = attrgetter("gone")
