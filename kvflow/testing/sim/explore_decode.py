"""The decode node as a value: one room, its loans and its links to every prefill rank.

What happens is decided by `protocols.decode_room.step` and `protocols.loans.step`. Around them stands what
handlers/decode.py, decode_room.py, ledger.py and link.py do with a message, without sockets, tasks and time.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import msgspec

from kvflow.protocols.errors import Code
from kvflow.protocols.machines import decode_room as d
from kvflow.protocols.machines import loan as loans
from kvflow.testing.sim.explore_prefill import FIRST, LATER, Act, Price, ViolationError, Word

_OPEN = (d.DecodePhase.WAITING_FOR_INPUT, d.DecodePhase.TRANSFERRING)


class LinkState(IntEnum):
    UP = 0
    SILENT = 1
    GONE = 2  # another incarnation answers, or its death was seen


class Decode(NamedTuple):
    alive: bool
    links: tuple[LinkState, ...]
    room: d.DecodeRoom | None = None
    loans: tuple[loans.LoanPhase, ...] = ()
    refused: bool = False  # there were no pages for the room, or a prefill was lost
    recalled: bool = False
    told: bool = False  # the client knows the ending
    ended: bool = False

    @property
    def over(self) -> bool:
        return not self.alive or self.refused or self.ended

    @property
    def home(self) -> bool:
        """The pages are free to be used for something else."""
        return self.ended and all(phase is loans.LoanPhase.RETURNED for phase in self.loans)

    @property
    def settled(self) -> bool:
        return self.alive and (self.refused or self.home)

    def deaf(self, rank: int) -> bool:
        """No word of this rank changes anything here any more."""
        return self.alive and self.over and (not self.loans or self.loans[rank] is loans.LoanPhase.RETURNED)

    @property
    def succeeded(self) -> bool:
        return self.room is not None and self.room.phase is d.DecodePhase.SUCCESS

    @property
    def open(self) -> bool:
        return self.alive and self.room is not None and self.room.phase in _OPEN


class DecodeSide:
    """Decode in the middle of one action."""

    def __init__(self, state: Decode, chunks: int) -> None:
        self.state, self.chunks = state, chunks
        self.words: list[list[Word]] = [[] for _ in state.links]

    def put(self, **changes: object) -> None:
        self.state = self.state._replace(**changes)  # type: ignore[arg-type]

    # --- messages

    def hear(self, rank: int, word: Word) -> None:
        _HEAR[word.name](self, rank, word)

    def on_chunk_done(self, rank: int, word: Word) -> None:
        room = self.state.room
        if room is None or self.state.ended:
            return
        self.heard(rank)
        if not in_order(room, rank, word.seq) or self.state.loans[rank] is loans.LoanPhase.DOUBTFUL:
            return
        last = word.seq == self.chunks - 1
        if last:
            self.loan(rank, loans.LoanKind.LANDED)
        self.feed(d.DecodeEvent(d.DecodeKind.CHUNK_LANDED, rank, word.seq, 1, last))

    def on_room_failed(self, rank: int, _: Word) -> None:
        if self.state.room is not None and not self.state.ended:
            self.heard(rank)
            self.feed(d.DecodeEvent(d.DecodeKind.ROOM_FAILED, cause=LATER))

    def on_abort_ack(self, rank: int, word: Word) -> None:
        self.heard(rank)
        self.loan(rank, loans.LoanKind.DRAINED if word.name == "drained" else loans.LoanKind.UNPROVEN)

    def on_resync(self, rank: int, _: Word) -> None:
        self.heard(rank)
        room = self.state.room
        if room is not None and self.state.open and room.next_seq[rank] == 0:
            self.words[rank].append(Word("bootstrap"))

    # --- links and time

    def heard(self, rank: int) -> None:
        if self.state.links[rank] is LinkState.SILENT:
            self._link(rank, LinkState.UP)
            self.loan(rank, loans.LoanKind.SOURCE_BACK)

    def lose(self, rank: int, link: LinkState) -> None:
        self._link(rank, link)
        if self.state.room is not None and not self.state.ended:
            self.feed(d.DecodeEvent(d.DecodeKind.SOURCE_LOST, cause=LATER))
        self.loan(rank, loans.LoanKind.SOURCE_LOST)

    def fenced(self, rank: int) -> None:
        self.lose(rank, LinkState.GONE)
        self.loan(rank, loans.LoanKind.FENCED)

    def ask_again(self, rank: int) -> None:
        assert self.state.room is not None
        self.words[rank].append(Word("ask", self.state.room.next_seq[rank]))

    def _link(self, rank: int, link: LinkState) -> None:
        links = self.state.links
        self.put(links=(*links[:rank], link, *links[rank + 1 :]))

    def forget_links(self) -> None:
        """A link that owes nothing any more may be up or not: nothing asks."""
        links = [LinkState.UP if self.state.deaf(rank) else link for rank, link in enumerate(self.state.links)]
        self.put(links=tuple(links))

    # --- the room

    def open_room(self) -> None:
        self.put(room=d.opened(self.chunks, len(self.state.links)))
        self.feed(d.DecodeEvent(d.DecodeKind.REGISTERED))

    def refuse(self) -> None:
        """No pages: the prefill legs are told, once."""
        self.put(refused=True)
        for words in self.words:
            words.append(Word("abort"))

    def crash(self) -> None:
        self.state = Decode(False, (LinkState.UP,) * len(self.words))

    def close(self) -> None:
        self.feed(d.DecodeEvent(d.DecodeKind.ENDED_LOCALLY, cause=LATER))

    def feed(self, event: d.DecodeEvent) -> None:
        before = self.state.room
        assert before is not None
        room, commands = d.step(before, event)
        if before.phase in d.TERMINAL and room.phase is not before.phase:
            raise ViolationError(f"I6: decode's room went from {before.phase.name} to {room.phase.name}")
        if before.cause is not None and room.cause != before.cause:
            raise ViolationError("I4: decode's room forgot its first cause")
        if room.cause is not None and room.cause.code is Code.PROTOCOL_ERROR:
            raise ViolationError(f"I8: chunks do not add up: {room.cause.text}")
        self.put(room=room if room.cause is None else msgspec.structs.replace(room, cause=FIRST))
        for command in commands:
            _RUN[command](self)

    def _send_bootstrap(self) -> None:
        self.put(loans=(loans.LoanPhase.LENT,) * len(self.words))
        for words in self.words:
            words.append(Word("bootstrap"))

    def _recall_loans(self) -> None:
        self.put(recalled=True)
        for rank in range(len(self.words)):
            self.loan(rank, loans.LoanKind.RECALL)
        self._loans_changed()

    def _tell(self) -> None:
        if self.state.told:
            raise ViolationError("I4: decode's client is told two endings")
        self.put(told=True)

    def _end(self) -> None:
        if self.state.ended:
            raise ViolationError("I4: decode's room ends twice")
        assert self.state.room is not None
        bare = d.opened(self.chunks, len(self.words))  # what was counted decides nothing from here on
        self.put(
            ended=True, room=msgspec.structs.replace(bare, phase=self.state.room.phase, cause=self.state.room.cause)
        )

    # --- the loans

    def loan(self, rank: int, kind: loans.LoanKind) -> None:
        if not self.state.loans or self.state.loans[rank] is loans.LoanPhase.RETURNED:
            return
        lent = self.state.loans
        phase, commands = loans.step(lent[rank], kind)
        self.put(loans=(*lent[:rank], phase, *lent[rank + 1 :]))
        if loans.LoanCommand.SEND_ABORT in commands and self.state.recalled:
            self.words[rank].append(Word("abort"))
        if commands:
            self._loans_changed()

    def _loans_changed(self) -> None:
        if not self.state.recalled or self.state.ended:
            return
        left = [phase for phase in self.state.loans if phase is not loans.LoanPhase.RETURNED]
        if not left:
            self.feed(d.DecodeEvent(d.DecodeKind.LOANS_ENDED))
        elif all(phase is loans.LoanPhase.DOUBTFUL for phase in left):
            self.feed(d.DecodeEvent(d.DecodeKind.LOANS_DOUBTFUL, cause=LATER))


def in_order(room: d.DecodeRoom, rank: int, seq: int) -> bool:
    return seq == room.next_seq[rank]


_HEAR: dict[str, Callable[[DecodeSide, int, Word], None]] = {
    "chunk": DecodeSide.on_chunk_done,
    "failed": DecodeSide.on_room_failed,
    "drained": DecodeSide.on_abort_ack,
    "unproven": DecodeSide.on_abort_ack,
    "unknown": DecodeSide.on_resync,
}
_C = d.DecodeCommand
_RUN: dict[d.DecodeCommand, Callable[[DecodeSide], None]] = {
    _C.SEND_BOOTSTRAP: DecodeSide._send_bootstrap,
    _C.RECALL_LOANS: DecodeSide._recall_loans,
    _C.TELL_LANDED: DecodeSide._tell,
    _C.TELL_FAILED: DecodeSide._tell,
    _C.END: DecodeSide._end,
}


class Neighbour(NamedTuple):
    """What the world lets decode find out about one rank."""

    alive: bool
    restarted: bool
    fenced: bool  # dead, and none of its writes can land any more
    remembers: bool  # it keeps something about a grant that is settled here


def acts(state: Decode, chunks: int, rank: int, seen: Neighbour, word: Word) -> list[Act[Decode]]:
    """Everything that can happen at decode by itself, as far as it concerns `rank`, and that `word` of it is heard."""
    found: list[Act[Decode]] = []

    def may(text: str, do: Callable[[DecodeSide], None], price: Price = Price.NOTHING, *, fair: bool = False) -> None:
        found.append(_act(state, chunks, f"decode {text}", do, price, fair=fair))

    def must(text: str, do: Callable[[DecodeSide], None]) -> None:
        may(text, do, fair=True)

    def every(text: str, do: Callable[[DecodeSide], None]) -> None:
        must(text, do)
        found.append(found.pop()._replace(timer=True))

    if not state.alive:
        return found
    if word.name != "nothing":
        must(f"hears {word}", lambda side: side.hear(rank, word))
        found.append(found.pop()._replace(hears=True))
    if rank == 0:
        may("crashes", DecodeSide.crash, Price.CRASH)
        if state.room is None and not state.refused:
            if all(link is LinkState.UP for link in state.links):
                must("lends its pages", DecodeSide.open_room)
                may("has no pages", DecodeSide.refuse, Price.DECODE_ABORT)
            else:
                must("has lost a prefill, and opens no room", lambda side: side.put(refused=True))
        if state.room is not None:
            may("loses its client", DecodeSide.close, Price.DECODE_ABORT)
    link = state.links[rank]
    if state.open and link is LinkState.UP:
        every("asks what it missed", lambda side: side.ask_again(rank))
    if state.loans and state.loans[rank] is loans.LoanPhase.RECALLED:
        every("repeats its Abort", lambda side: side.loan(rank, loans.LoanKind.REPEAT_DUE))
    if state.settled and seen.remembers:
        every("says it is settled", lambda side: side.words[rank].append(Word("settle")))
    if state.deaf(rank):
        return found
    if link is LinkState.UP:
        price = Price.SILENCE if seen.alive else Price.NOTHING
        may("misses prefill's heartbeat", lambda side: side.lose(rank, LinkState.SILENT), price, fair=not seen.alive)
    if link is LinkState.SILENT and seen.alive:
        must("hears prefill's heartbeat", lambda side: side.heard(rank))
    if link is not LinkState.GONE and seen.restarted:
        must("is answered by prefill's next life", lambda side: side.lose(rank, LinkState.GONE))
    if seen.fenced:
        must("has proof of prefill's death", lambda side: side.fenced(rank))
    return found


def _act(
    state: Decode, chunks: int, text: str, do: Callable[[DecodeSide], None], price: Price, *, fair: bool
) -> Act[Decode]:
    """Do one thing to a copy of `state`."""
    side, broken = DecodeSide(state, chunks), ""
    try:
        do(side)
        side.forget_links()
    except AssertionError as error:  # a TransitionError is one: the table says it cannot happen
        broken = str(error)
    return Act(text, price, fair, side.state, tuple(map(tuple, side.words)), broken=broken)
