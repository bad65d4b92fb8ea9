"""One decode room, its loans and its prefill ranks, joined by a link that loses, repeats and reorders.

The tables are the shipped ones. Around them stands the least of glue that can run their commands: what the handlers do
with a message, without sockets, tasks and time. `World.check` is run after every action.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from kvflow.protocols import decode_room as d
from kvflow.protocols import loans
from kvflow.protocols import prefill_room as p
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.loans import LoanCommand, LoanKind, LoanPhase
from kvflow.protocols.ports import Landing

CHUNKS = 3  # of one page each
GONE = Cause(Code.CLIENT_GONE)


class Said(NamedTuple):
    """A message of one rank's link. `word`: bootstrap, abort, resync, chunk, failed, drained, unproven, unknown."""

    rank: int
    to_prefill: bool
    word: str
    seq: int = 0
    last: bool = False


@dataclass
class Rank:
    """A prefill rank: its room, its writes, and what it remembers of a grant that has ended."""

    engine: bool = False  # the engine's half is here
    room: p.PrefillRoom | None = None
    bootstrapped: bool = False
    closed: bool = False
    said: list[Said] = field(default_factory=list)
    flights: list[Landing | None] = field(default_factory=list)  # not reported yet; None: running
    sent: int = 0
    landed: set[int] = field(default_factory=set)
    late: int = 0  # writes in doubt that may still move bytes
    doubted: bool = False  # there was one, though it may have landed since: nobody can know
    reported: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    dead: bool = False


class World:
    """`broken` replaces one rule by a bug that somebody has had: the checks must find it."""

    def __init__(self, rng: random.Random, ranks: int, broken: str = "") -> None:
        self.rng, self.broken = rng, broken
        self.ranks = [Rank() for _ in range(ranks)]
        self.link: list[Said] = []
        self.room = d.opened(CHUNKS, ranks)
        self.loans: list[LoanPhase | None] = [None] * ranks
        self.home = self.room_ended = self.recalled = False
        self.ends: Counter[str] = Counter()
        self.connected = [True] * ranks
        self.decode(d.DecodeEvent(d.DecodeKind.REGISTERED))

    # --- decode

    def decode(self, event: d.DecodeEvent) -> None:
        self.room, commands = d.step(self.room, event)
        for command in commands:
            self.ends[command.name] += 1
            if command is d.DecodeCommand.SEND_BOOTSTRAP:
                for rank in range(len(self.ranks)):
                    self.loans[rank] = LoanPhase.LENT
                    self.say(Said(rank, True, "bootstrap"))
            elif command is d.DecodeCommand.RECALL_LOANS:
                self.recalled = True
                for rank in range(len(self.ranks)):
                    self.loan(rank, LoanKind.RECALL)
                self.loans_changed()
            elif command is d.DecodeCommand.END:
                self.room_ended = True
                if self.room.phase is d.DecodePhase.SUCCESS or self.broken == "free on the end of the room":
                    self.home = True
                self.go_home()

    def loan(self, rank: int, kind: LoanKind) -> None:
        phase = self.loans[rank]
        if phase is None:
            return
        self.loans[rank], commands = loans.step(phase, kind)
        if LoanCommand.SEND_ABORT in commands and self.recalled:
            self.say(Said(rank, True, "abort"))
        if commands:
            self.loans_changed()
        self.go_home()

    def loans_changed(self) -> None:
        if not self.recalled or self.room_ended:
            return
        open_loans = [phase for phase in self.loans if phase is not LoanPhase.RETURNED]
        if not open_loans:
            self.decode(d.DecodeEvent(d.DecodeKind.LOANS_ENDED))
        elif all(phase is LoanPhase.DOUBTFUL for phase in open_loans):
            self.decode(d.DecodeEvent(d.DecodeKind.LOANS_DOUBTFUL))

    def go_home(self) -> None:
        if self.room_ended and all(phase is LoanPhase.RETURNED for phase in self.loans):
            self.home = True

    def at_decode(self, m: Said) -> None:
        match m.word:
            case "chunk":
                if self.room_ended or m.seq != self.room.next_seq[m.rank]:
                    return
                if m.last:
                    self.loan(m.rank, LoanKind.LANDED)
                self.decode(d.DecodeEvent(d.DecodeKind.CHUNK_LANDED, m.rank, m.seq, 1, m.last))
            case "failed":
                self.decode(d.DecodeEvent(d.DecodeKind.ROOM_FAILED, cause=GONE))
            case "drained":
                self.loan(m.rank, LoanKind.DRAINED)
            case "unproven":
                proof = LoanKind.DRAINED if self.broken == "doubt taken for proof" else LoanKind.UNPROVEN
                self.loan(m.rank, proof)
            case "unknown":
                open_room = self.room.phase in (d.DecodePhase.WAITING_FOR_INPUT, d.DecodePhase.TRANSFERRING)
                if open_room and not self.room.next_seq[m.rank]:
                    self.say(Said(m.rank, True, "bootstrap"))

    def sweep(self) -> None:
        """What time brings: aborts and questions are repeated."""
        open_room = self.room.phase in (d.DecodePhase.WAITING_FOR_INPUT, d.DecodePhase.TRANSFERRING)
        for rank, next_seq in enumerate(self.room.next_seq):
            if self.connected[rank]:
                self.loan(rank, LoanKind.REPEAT_DUE)
                if open_room:
                    self.say(Said(rank, True, "resync", next_seq))

    def lose(self, rank: int) -> None:
        self.connected[rank] = False
        self.decode(d.DecodeEvent(d.DecodeKind.SOURCE_LOST, cause=GONE))
        self.loan(rank, LoanKind.SOURCE_LOST)

    def come_back(self, rank: int) -> None:
        self.connected[rank] = True
        self.loan(rank, LoanKind.SOURCE_BACK)

    def crash(self, rank: int) -> None:
        """The process ends, and with it everything it could still write."""
        r = self.ranks[rank]
        r.dead, r.late, r.flights = True, 0, []
        self.link = [m for m in self.link if m.rank != rank or not m.to_prefill]

    def fence(self, rank: int) -> None:
        """Decode observes that death."""
        self.lose(rank)
        self.loan(rank, LoanKind.FENCED)

    # --- prefill

    def prefill(self, rank: int, event: p.PrefillEvent) -> None:
        r = self.ranks[rank]
        assert r.room is not None
        r.room, commands = p.step(r.room, event)
        for command in commands:
            r.ends[command.name] += 1
            match command:
                case p.PrefillCommand.START_WRITE:
                    r.flights.append(None)
                    r.sent += 1
                case p.PrefillCommand.SEND_CHUNK_DONE:
                    last = r.reported == CHUNKS
                    self.answer(r, Said(rank, False, "chunk", r.reported - 1, last))
                case p.PrefillCommand.SEND_FAILED:
                    self.answer(r, Said(rank, False, "failed"))
                case p.PrefillCommand.SEND_DRAINED:
                    self.answer(r, Said(rank, False, "drained"))
                case p.PrefillCommand.SEND_UNPROVEN:
                    self.answer(r, Said(rank, False, "unproven"))
                case p.PrefillCommand.CANCEL_WRITES if self.broken == "ack before drain":
                    self.answer(r, Said(rank, False, "drained"))
                case p.PrefillCommand.END:
                    r.closed = r.closed or r.bootstrapped

    def answer(self, r: Rank, m: Said) -> None:
        r.said.append(m)
        self.say(m)

    def meet(self, rank: int) -> None:
        r = self.ranks[rank]
        if r.engine and r.bootstrapped and r.room is not None and r.room.phase < p.PrefillPhase.WAITING_FOR_INPUT:
            self.prefill(rank, p.PrefillEvent(p.PrefillKind.MATCHED))

    def at_prefill(self, m: Said) -> None:
        r = self.ranks[m.rank]
        if r.dead:
            return
        known = r.closed or r.bootstrapped
        match m.word:
            case "bootstrap" if r.closed:
                self.say_again(r, 0)
            case "bootstrap" if not r.bootstrapped:
                if r.room is not None and r.room.phase in p.TERMINAL:  # the engine's half has ended: refused
                    r.closed = True
                    self.answer(r, Said(m.rank, False, "failed"))
                    self.answer(r, Said(m.rank, False, "drained"))
                    return
                r.room = r.room or p.PrefillRoom(p.PrefillPhase.BOOTSTRAPPED)
                r.bootstrapped = True
                self.meet(m.rank)
            case "abort" if r.bootstrapped and not r.closed:
                self.prefill(m.rank, p.PrefillEvent(p.PrefillKind.ABORT_RECEIVED, cause=GONE))
            case "abort":
                r.closed = True
                if r.room is not None and r.room.phase is p.PrefillPhase.EXPECTED:
                    self.prefill(m.rank, p.PrefillEvent(p.PrefillKind.ENDED_LOCALLY, cause=GONE))
                doubt = any(word.word == "unproven" for word in r.said) and self.broken != "doubt forgotten"
                self.say(Said(m.rank, False, "unproven" if doubt else "drained"))
            case "resync" if known:
                self.say_again(r, m.seq)
            case "resync":
                self.say(Said(m.rank, False, "unknown"))

    def say_again(self, r: Rank, next_seq: int) -> None:
        for word in r.said:
            if word.word != "chunk" or word.seq >= next_seq:
                self.say(word)

    def engine_opens(self, rank: int) -> None:
        r = self.ranks[rank]
        r.engine = True
        if not r.closed:
            r.room = r.room or p.PrefillRoom(p.PrefillPhase.EXPECTED)
            self.meet(rank)

    def can_send(self, rank: int) -> bool:
        r = self.ranks[rank]
        running = (p.PrefillPhase.WAITING_FOR_INPUT, p.PrefillPhase.TRANSFERRING)
        return not r.dead and r.room is not None and r.room.phase in running and r.sent < CHUNKS

    def send(self, rank: int) -> None:
        self.prefill(rank, p.PrefillEvent(p.PrefillKind.CHUNK_QUEUED, last=self.ranks[rank].sent == CHUNKS - 1))

    def end_write(self, rank: int, landing: Landing, flight: int = 0) -> None:
        """A write ends; it is reported when those before it have been."""
        r = self.ranks[rank]
        r.flights[flight] = landing
        if landing is Landing.UNPROVEN:
            r.late += 1
            r.doubted = True
        while r.flights and (first := r.flights[0]) is not None:
            r.flights.pop(0)
            if first is Landing.LANDED:
                r.landed.add(r.reported)
            r.reported += 1
            self.prefill(rank, p.PrefillEvent(None, landing=first, cause=None if first is Landing.LANDED else GONE))

    # --- the link

    def say(self, m: Said) -> None:
        self.link.append(m)

    def deliver(self, index: int = 0) -> None:
        m = self.link.pop(index)
        if not self.connected[m.rank] and not self.ranks[m.rank].dead:
            self.come_back(m.rank)
        (self.at_prefill if m.to_prefill else self.at_decode)(m)

    # --- what must hold

    def check(self) -> None:
        for rank, r in enumerate(self.ranks):
            if self.home:
                assert not r.flights, f"I2: pages are free while rank {rank} writes"
                assert not r.late, f"I2: pages are free while a doubtful write of rank {rank} may land"
            for m in r.said:
                assert m.word != "chunk" or m.seq in r.landed, f"I3: chunk {m.seq} was said to have landed"
            assert r.ends["END"] <= 1 and r.ends["TELL_SUCCESS"] + r.ends["TELL_ENDED"] <= 1, "I4: prefill ends once"
            if self.room.phase is d.DecodePhase.SUCCESS:
                assert r.landed == set(range(CHUNKS)), "I8: success without every page of every rank"
        assert self.ends["END"] <= 1 and self.ends["TELL_LANDED"] + self.ends["TELL_FAILED"] <= 1, "I4: one ending"
        assert self.room_ended == (self.room.phase in d.TERMINAL)

    def at_rest(self) -> bool:
        prefill_done = all(r.dead or r.room is None or r.room.phase in p.TERMINAL for r in self.ranks)
        return self.room_ended and prefill_done and (self.home or any(r.doubted for r in self.ranks))
