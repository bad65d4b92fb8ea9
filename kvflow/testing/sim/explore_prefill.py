"""One prefill rank as a value: its room, its writes, and what it remembers of a grant that has ended.

What happens is decided by `protocols.prefill_room.step`. Around it stands what handlers/prefill.py, target.py and
prefill_room.py do with a message, without sockets, tasks and time; each function is named after the handler it follows.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

import msgspec

from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines import prefill_room as p
from kvflow.protocols.ports import Landing

FIRST, LATER = Cause(Code.CLIENT_GONE, "first"), Cause(Code.PEER_LOST, "later")
"""Why rooms end: a room's cause is kept as FIRST, every event brings LATER, and no other text ever decides a step."""


S = TypeVar("S")


class ViolationError(AssertionError):
    """What must hold does not; begins with the invariant's name."""


class Word(NamedTuple):
    """A message. To prefill: bootstrap, abort, ask, settle. To decode: chunk, failed, drained, unproven, unknown."""

    name: str
    seq: int = 0

    def __str__(self) -> str:
        return f"{self.name} {self.seq}" if self.name in ("chunk", "ask") else self.name


_OPEN = (p.PrefillPhase.WAITING_FOR_INPUT, p.PrefillPhase.TRANSFERRING)


class Price(IntEnum):
    """What an action takes from the faults that are left."""

    NOTHING = 0
    DROP = 1
    DUPLICATE = 2
    CRASH = 3
    DECODE_ABORT = 4
    PREFILL_ABORT = 5
    DOUBT = 6  # a data plane that cannot say what landed
    SILENCE = 7  # heartbeats of a living peer that do not arrive in time


class Life(IntEnum):
    ALIVE = 0
    DEAD = 1
    RESTARTED = 2  # another incarnation answers at the same address


class Engine(IntEnum):
    ABSENT = 0  # the engine's half has not come yet
    HERE = 1
    OTHER_PROMPT = 2
    NEVER = 3


class Hold(IntEnum):
    """What `Target` knows of the grant."""

    UNKNOWN = 0
    OPEN = 1
    CLOSED = 2
    SETTLED = 3  # below the low-water mark


class Half(IntEnum):
    """What `EndedHalves` remembers of the room."""

    NONE = 0
    ENGINE = 1
    DECODE = 2


class Prefill(NamedTuple):
    life: Life = Life.ALIVE
    engine: Engine = Engine.ABSENT
    room: p.PrefillRoom | None = None
    hold: Hold = Hold.UNKNOWN
    half: Half = Half.NONE
    said: tuple[Word, ...] = ()
    running: int = 0  # writes under way: the truth, beside what the room counts
    reported: int = 0  # writes whose end was reported
    late: bool = False  # some write in doubt, or of a dead process, may still move bytes
    told: bool = False  # the engine knows the ending
    target_gone: bool = False  # decode's process is dead

    @property
    def landed(self) -> int:
        """Chunks that are known to have landed."""
        return sum(word.name == "chunk" for word in self.said)

    @property
    def writing(self) -> bool:
        """Something may still write into decode's pages."""
        return self.running > 0 or self.late

    @property
    def gone(self) -> bool:
        return self.life is not Life.ALIVE

    @property
    def unknowing(self) -> bool:
        """Alive, and it has said that it cannot prove where its writes went."""
        return self.life is Life.ALIVE and Word("unproven") in self.said

    @property
    def half_open(self) -> bool:
        return self.room is not None and self.room.phase in (p.PrefillPhase.EXPECTED, p.PrefillPhase.BOOTSTRAPPED)

    @property
    def at_rest(self) -> bool:
        if self.life is not Life.ALIVE:
            return not self.late
        return self.room is None and not self.running and self.engine is not Engine.ABSENT

    @property
    def tidy(self) -> bool:
        """It remembers nothing of a grant that decode has settled."""
        return self.gone or self.target_gone or self.hold in (Hold.UNKNOWN, Hold.SETTLED)


class Act(NamedTuple, Generic[S]):
    """One thing that can happen to one side, and what comes of it."""

    text: str
    price: Price
    fair: bool  # happens by itself, sooner or later, without a new fault
    side: S
    words: tuple[tuple[Word, ...], ...]  # said on the way, per rank
    timer: bool = False  # said again only when the same word is not on its way already
    hears: bool = False  # takes the first word of the queue
    broken: str = ""  # what must hold and does not


class PrefillSide:
    """A prefill rank in the middle of one action."""

    def __init__(self, state: Prefill, chunks: int) -> None:
        self.state, self.chunks = state, chunks
        self.words: list[Word] = []
        self._landing: Landing | None = None

    def put(self, **changes: object) -> None:
        self.state = self.state._replace(**changes)  # type: ignore[arg-type]

    # --- messages

    def hear(self, word: Word) -> None:
        _HEAR[word.name](self, word)

    def on_bootstrap(self, _: Word) -> None:
        s = self.state
        if s.hold is Hold.OPEN:
            return
        if s.hold is Hold.CLOSED:
            self.say_again(0)
        elif s.hold is Hold.SETTLED or (s.room is None and self._take(Half.DECODE)):
            self._refuse()
        else:
            if s.room is None:
                self._new_room(p.PrefillPhase.BOOTSTRAPPED)
            self.put(hold=Hold.OPEN)
            if s.engine in (Engine.HERE, Engine.OTHER_PROMPT):
                self._meet()

    def on_abort(self, _: Word) -> None:
        if self.state.hold is Hold.OPEN:
            self.feed(p.PrefillKind.ABORT_RECEIVED)
            return
        if self.state.hold is Hold.UNKNOWN:
            self._end_other_half()
            self.put(hold=Hold.CLOSED, said=())
        self.words.append(Word("unproven" if Word("unproven") in self.state.said else "drained"))

    def on_resync(self, word: Word) -> None:
        if self.state.hold in (Hold.OPEN, Hold.CLOSED):
            self.say_again(word.seq)
        else:
            self.words.append(Word("unknown"))

    def on_heartbeat(self, _: Word) -> None:
        if self.state.hold is not Hold.OPEN:
            self.put(hold=Hold.SETTLED, said=())

    def say_again(self, next_seq: int) -> None:
        self.words += [word for word in self.state.said if word.name != "chunk" or word.seq >= next_seq]

    def _refuse(self) -> None:
        self.put(hold=Hold.CLOSED, said=())
        self._say(Word("failed"))
        self._say(Word("drained"))

    def _end_other_half(self) -> None:
        if self.state.room is None:
            if not self._take(Half.DECODE):
                self.put(half=Half.DECODE)
        else:
            self.feed(p.PrefillKind.ENDED_LOCALLY)
            self._take(Half.DECODE)

    def _take(self, half: Half) -> bool:
        """The other half of the room has ended."""
        found = self.state.half
        self.put(half=Half.NONE)
        return found not in (Half.NONE, half)

    # --- the engine and its writes

    def open_room(self, engine: Engine) -> None:
        self.put(engine=engine)
        if self.state.room is None:
            self._new_room(p.PrefillPhase.EXPECTED)
        if self.state.hold is Hold.OPEN:
            self._meet()
        elif self._take(Half.ENGINE):
            self.feed(p.PrefillKind.ENDED_LOCALLY)

    def send(self) -> None:
        room = self.state.room
        assert room is not None
        self.feed(p.PrefillKind.CHUNK_QUEUED, last=room.queued == self.chunks - 1)

    def close(self) -> None:
        self.feed(p.PrefillKind.ENDED_LOCALLY)

    def lose(self) -> None:
        self.feed(p.PrefillKind.TARGET_LOST)

    def flight_ended(self, landing: Landing) -> None:
        s = self.state
        self.put(running=s.running - 1, reported=s.reported + 1, late=s.late or landing is Landing.UNPROVEN)
        self._landing = landing
        if s.room is not None:
            self.feed(None, landing=landing)

    def _new_room(self, phase: p.PrefillPhase) -> None:
        self.put(room=p.PrefillRoom(phase), told=False)

    def _meet(self) -> None:
        same = self.state.engine is Engine.HERE
        self.feed(p.PrefillKind.MATCHED if same else p.PrefillKind.MISMATCHED)

    # --- the machine

    def feed(self, kind: p.PrefillKind | None, *, last: bool = False, landing: Landing | None = None) -> None:
        before = self.state.room
        assert before is not None
        room, commands = p.step(before, p.PrefillEvent(kind, last, landing, LATER))
        if before.phase in p.TERMINAL and room.phase is not before.phase:
            raise ViolationError(f"I6: prefill's room went from {before.phase.name} to {room.phase.name}")
        if before.cause is not None and room.cause != before.cause:
            raise ViolationError("I4: prefill's room forgot its first cause")
        self.put(room=room if room.cause is None else msgspec.structs.replace(room, cause=FIRST))
        for command in commands:
            _RUN[command](self)

    def _start_write(self) -> None:
        self.put(running=self.state.running + 1)

    def _send_chunk_done(self) -> None:
        if self._landing is not Landing.LANDED:
            raise ViolationError(
                f"I3: chunk {self.state.reported - 1} is said to have landed, and its writes are in doubt"
            )
        self._say(Word("chunk", self.state.reported - 1))

    def _send_drained(self) -> None:
        self._say(Word("drained"))

    def _say(self, word: Word) -> None:
        self.put(said=(*self.state.said, word))
        self.words.append(word)

    def _tell(self) -> None:
        if self.state.told:
            raise ViolationError("I4: prefill's engine is told two endings")
        self.put(told=True)

    def _end(self) -> None:
        s = self.state
        if s.room is None or s.room.phase not in p.TERMINAL:
            raise ViolationError("I4: prefill's room ends twice, or before its end")
        half = s.half
        if s.engine is Engine.ABSENT or s.engine is Engine.NEVER:
            half = Half.DECODE
        elif s.hold is not Hold.OPEN:
            half = Half.ENGINE
        hold = Hold.CLOSED if s.hold is Hold.OPEN else s.hold
        self.put(hold=hold, half=half, room=None, reported=0, told=False)


_HEAR: dict[str, Callable[[PrefillSide, Word], None]] = {
    "bootstrap": PrefillSide.on_bootstrap,
    "abort": PrefillSide.on_abort,
    "ask": PrefillSide.on_resync,
    "settle": PrefillSide.on_heartbeat,
}
_C = p.PrefillCommand
_RUN: dict[p.PrefillCommand, Callable[[PrefillSide], None]] = {
    _C.TELL_MATCHED: lambda side: None,
    _C.START_WRITE: PrefillSide._start_write,
    _C.SEND_CHUNK_DONE: PrefillSide._send_chunk_done,
    _C.CANCEL_WRITES: lambda side: None,
    _C.SEND_FAILED: lambda side: side._say(Word("failed")),
    _C.SEND_DRAINED: PrefillSide._send_drained,
    _C.SEND_UNPROVEN: lambda side: side._say(Word("unproven")),
    _C.TELL_SUCCESS: PrefillSide._tell,
    _C.TELL_ENDED: PrefillSide._tell,
    _C.END: PrefillSide._end,
}


def acts(state: Prefill, chunks: int, word: Word, *, decode_over: bool) -> list[Act[Prefill]]:
    """Everything that can happen at this rank by itself, and that `word` (or "nothing") is heard."""
    found: list[Act[Prefill]] = []

    def may(text: str, do: Callable[[PrefillSide], None], price: Price = Price.NOTHING, *, fair: bool = False) -> None:
        found.append(_act(state, chunks, f"prefill {text}", do, price, fair=fair))

    if state.life is not Life.ALIVE:
        if state.late:
            may("is dead, and its last writes land", lambda side: side.put(late=False), fair=True)
        if state.life is Life.DEAD:
            may("restarts at its address", lambda side: side.put(life=Life.RESTARTED))
        return found
    may("crashes", _crash, Price.CRASH)
    if word.name != "nothing":
        act = _act(state, chunks, f"prefill hears {word}", lambda side: side.hear(word), Price.NOTHING, fair=True)
        found.append(act._replace(hears=True))
    if state.engine is Engine.ABSENT:
        may("is asked by its engine", lambda side: side.open_room(Engine.HERE), fair=True)
        may("is asked with another prompt", lambda side: side.open_room(Engine.OTHER_PROMPT), Price.PREFILL_ABORT)
        may("is never asked", lambda side: side.put(engine=Engine.NEVER), Price.PREFILL_ABORT)
    if state.late:
        may("has doubtful writes that land", lambda side: side.put(late=False))
    if state.running:
        may("has its oldest write land", lambda side: side.flight_ended(Landing.LANDED), fair=True)
        may("has its oldest write end in doubt", lambda side: side.flight_ended(Landing.UNPROVEN), Price.DOUBT)
        if state.room is None or state.room.phase is p.PrefillPhase.DRAINING:
            may("has its oldest write cancelled", lambda side: side.flight_ended(Landing.DRAINED), fair=True)
    if state.room is not None and state.room.phase not in p.TERMINAL:
        if state.room.phase in _OPEN and not state.room.last_queued:
            may("starts to write a chunk", PrefillSide.send, fair=True)
        may("has its room ended by the engine", PrefillSide.close, Price.PREFILL_ABORT)
        if state.half_open and (decode_over or state.engine is Engine.NEVER):
            may("has waited long enough for the other half", PrefillSide.close, fair=True)
    if state.room is not None and state.hold is Hold.OPEN:
        if state.target_gone:
            may("sees decode's death", PrefillSide.lose, fair=True)
        else:
            may("misses decode's heartbeat", PrefillSide.lose, Price.SILENCE)
    return found


def _act(
    state: Prefill, chunks: int, text: str, do: Callable[[PrefillSide], None], price: Price, *, fair: bool
) -> Act[Prefill]:
    """Do one thing to a copy of `state`."""
    side, broken = PrefillSide(state, chunks), ""
    try:
        do(side)
    except AssertionError as error:  # a TransitionError is one: the table says it cannot happen
        broken = str(error)
    if state.hold > Hold.OPEN and side.state.hold is Hold.OPEN:
        broken = broken or "I6: a grant that was closed is open again"
    words = () if side.state.target_gone else tuple(side.words)
    return Act(text, price, fair, side.state, (words,), broken=broken)


def _crash(side: PrefillSide) -> None:
    """What ran may still land; all else is gone with the process, but for what is known to have landed."""
    s = side.state
    chunks = tuple(word for word in s.said if word.name == "chunk")
    side.state = Prefill(Life.DEAD, said=chunks, late=s.writing and not s.target_gone, target_gone=s.target_gone)
