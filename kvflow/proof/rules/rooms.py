"""Rules for rooms and for the notices that their users receive (I3 to I6, I8, I12).

A room ends once on each side, and keeps its first cause. Its user learns of the end once, in time,
and with a true cause.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvflow.proof.rules.both_sides import (
    OVER_AT_DECODE,
    OVER_AT_PREFILL,
    BothSides,
    Record,
    promise_of,
    promises_of,
)
from kvflow.proof.rules.judge import Judge, Promise
from kvflow.proof.rules.transfers import Transfers
from kvflow.protocols.decode.records import DecodeRoomRecord
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.machines import decode_room, prefill_room
from kvflow.protocols.machines.decode_room import DecodeRoomState
from kvflow.protocols.machines.prefill_room import PrefillRoomState
from kvflow.protocols.ports import WriteOutcome
from kvflow.protocols.prefill.records import PrefillRoomRecord

DEADLINE_SLACK_S = 0.1


class Rooms(BothSides):
    def __init__(self, judge: Judge, transfers: Transfers) -> None:
        super().__init__(judge, transfers)
        self.endings: Counter[str] = Counter()
        # Cause that the user of each ended room received, or None for a success.
        self.told: dict[Record, Cause | None] = {}
        self.damaged = False  # True after bytes were damaged on purpose
        self.leaving: set[int] = set()  # incarnations of nodes that have begun to shut down
        self._matched: set[PrefillRoomRecord] = set()
        self._told_begun: set[DecodeRoomRecord] = set()
        # Rooms whose whole prompt has a place in the engine.
        self._begun: set[PrefillRoomRecord] = set()
        self._by_serial: dict[tuple[int, int], PrefillRoomRecord] = {}
        self._stopped: set[int] = set()  # rooms with a write that did not land
        self._causes: dict[int, set[Cause]] = {}  # causes that the driver gave, by room
        self._deadlines: dict[int, float] = {}  # earliest deadline of each room's halves
        self._prompts: dict[int, set[tuple[int, bytes]]] = {}

    # --- what the world does to a room

    def issue(self, room: int, cause: Cause) -> Cause:
        self._causes.setdefault(room, set()).add(cause)
        return cause

    def asked(self, room: int, deadline_at_s: float) -> None:
        self._deadlines[room] = min(deadline_at_s, self._deadlines.get(room, deadline_at_s))

    def write_ended(self, record: PrefillRoomRecord, outcome: WriteOutcome) -> None:
        if outcome is not WriteOutcome.LANDED:
            self._stopped.add(record.room)

    def leaves(self, incarnation: int) -> None:
        self.leaving.add(incarnation)

    def _opens(self, incarnation: int, room: int, prompt: tuple[int, bytes]) -> None:
        if incarnation in self.leaving:
            self.broken("I4", f"{self.sides[incarnation].name} shuts down, and opens room {room}")
        self._prompts.setdefault(room, set()).add(prompt)

    # --- decode's rooms

    def opened_at_decode(self, target: int, record: DecodeRoomRecord) -> None:
        self._opens(target, record.room, (record.prompt.tokens, record.prompt.digest))
        for key in promises_of(target, record):
            if key in self.decodes:
                self.broken("I6", f"{key} is opened again")
            self.decodes[key] = record
            # The engine's half may have failed before decode opened the room.
            half = self.engine_half(key[0], record.room)
            if half is not None and half.state.cause is not None:
                self.look(key)

    def at_decode(self, target: int, record: DecodeRoomRecord, before: DecodeRoomState) -> None:
        now = record.state
        if before is now:
            return
        self._one_ending(f"room {record.room} at decode", before, now, decode_room.TERMINAL)
        if before.phase not in OVER_AT_DECODE and now.phase in OVER_AT_DECODE:
            self.over_at_s[record] = self.now_s()
            self._count("decode", now)
            # The endpoint's commands notify the user at the same moment, so check right after them.
            self.later(0.0, self._check_told, "decode", record)
            if now.cause is not None:
                self.over_at_decode(target, record)

    def told_begun(self, target: int, record: DecodeRoomRecord) -> None:
        """Verify a notice to decode's user that prefill has a place for the whole prompt."""
        if record in self.told or record in self._told_begun:
            when = "after its end" if record in self.told else "twice"
            self.broken("I4", f"room {record.room} is told {when} that prefill has begun")
        if not self.has_begun(target, record):
            self.broken("I4", f"room {record.room} is said to have begun, and not every rank has")
        self._told_begun.add(record)

    def has_begun(self, target: int, record: DecodeRoomRecord) -> bool:
        return all(self.prefills.get(key) in self._begun for key in promises_of(target, record))

    def told_at_decode(self, target: int, record: DecodeRoomRecord, cause: Cause | None) -> None:
        self._tell(target, record, cause, record.deadline_at_s)

    def ended_at_decode(self, record: DecodeRoomRecord, *, in_table: bool) -> None:
        self._check_ended("decode", record)
        if in_table:
            self.broken("I5", f"room {record.room} has ended at decode, and is in its table")

    # --- prefill's rooms

    def opened_at_prefill(self, source: int, record: PrefillRoomRecord) -> None:
        assert record.prompt is not None
        self._by_serial[source, record.serial] = record
        self._opens(source, record.room, record.prompt)
        self._halves[source, record.room] = record
        self._legs[source, record.room].append(record)

    def begun_at_prefill(self, record: PrefillRoomRecord) -> None:
        self._begun.add(record)

    def bound(self, source: int, record: PrefillRoomRecord) -> None:
        key = self._key(source, record)
        self._by_serial[source, record.serial] = record
        if key in self.prefills or key in self.acked:
            self.broken("I6", f"{key} opens room {record.room} at prefill, and was closed before")
        if key not in self.decodes:
            self.broken("I6", f"{key} opens room {record.room} at prefill, decode never opened it")
            return
        self.prefills[key] = record
        self.known_at_prefill(source, record)
        # Decode's half may have failed while its Bootstrap was on the way.
        if self.decodes[key].state.cause is not None:
            self.look(key)

    def at_prefill(self, source: int, record: PrefillRoomRecord, before: PrefillRoomState) -> None:
        now = record.state
        self.known_at_prefill(source, record)
        if before is now:
            return
        self._one_ending(f"room {record.room} at prefill", before, now, prefill_room.TERMINAL)
        if before.phase not in OVER_AT_PREFILL and now.phase in OVER_AT_PREFILL:
            self.over_at_s[record] = self.now_s()
            self._count("prefill", now)
            if record.prompt is not None:
                self.later(0.0, self._check_told, "prefill", record)
            if now.cause is not None:
                self.over_at_prefill(source, record)
        if before.phase not in prefill_room.TERMINAL and now.phase in prefill_room.TERMINAL:
            self._check_drained(source, record, "has ended at prefill")

    def matched(self, source: int, record: PrefillRoomRecord) -> None:
        if record in self._matched or record in self.told:
            when = "after its end" if record in self.told else "twice"
            self.broken("I4", f"room {record.room} is matched {when}")
        self._matched.add(record)
        prompt = self.decodes[self._key(source, record)].prompt
        if record.prompt != (prompt.tokens, prompt.digest):
            self.broken("I8", f"room {record.room} is matched, and its halves mean other prompts")

    def told_at_prefill(self, source: int, record: PrefillRoomRecord, cause: Cause | None) -> None:
        """Verify the ending that the engine receives. A success requires that all pages landed."""
        self._tell(source, record, cause, record.own_deadline_at_s)
        if cause is None:
            writes = self.transfers.writes.get(self._key(source, record), ())
            landed = [write for write in writes if write.outcome is WriteOutcome.LANDED]
            there = sum(len(write.sources) for write in landed)
            if there != len(record.target_pages) or len(landed) < len(writes):
                text = f"room {record.room} succeeds at prefill over a write that has not landed"
                self.broken("I3", text)

    def sent_a_chunk(self, record: PrefillRoomRecord) -> None:
        """Verify that the room did not end during `send()`, while the engine still used it."""
        if record.ended:
            self.broken("I4", f"room {record.room} ends inside of its engine's own send()")

    def released(self, source: int, serial: int, *, in_table: bool) -> None:
        record = self._by_serial[source, serial]
        # Without the engine's half there is no user.
        if record.prompt is not None:
            self._check_ended("prefill", record)
        self._check_drained(source, record, "is released")
        if in_table:
            self.broken("I5", f"room {record.room} has ended at prefill, and is in its table")

    def record_of(self, source: int, serial: int) -> PrefillRoomRecord:
        return self._by_serial[source, serial]

    @staticmethod
    def _key(source: int, record: PrefillRoomRecord) -> Promise:
        key = promise_of(source, record)
        assert key is not None
        return key

    def _check_drained(self, source: int, record: PrefillRoomRecord, what: str) -> None:
        key = promise_of(source, record)
        if key is not None and self.transfers.running(key):
            self.broken("I12", f"room {record.room} {what} while a write of it runs")

    # --- endings

    def _one_ending(self, who: str, before: Any, now: Any, terminal: frozenset[Any]) -> None:
        if before.phase in terminal and now.phase is not before.phase:
            self.broken("I4", f"{who} ended {before.phase.name} and now is {now.phase.name}")
        if before.cause is not None and now.cause != before.cause:
            self.broken("I4", f"{who}: first {before.cause}, then {now.cause}")

    def _count(self, role: str, state: Any) -> None:
        how = state.phase.name.lower() if state.cause is None else state.cause.code
        self.endings[f"{role} {how}"] += 1

    def _check_told(self, role: str, record: Record) -> None:
        if record not in self.told:
            self.broken("I4", f"room {record.room} ended at {role}, its user was not told")

    def _check_ended(self, role: str, record: Record) -> None:
        self._check_told(role, record)
        cause = self.told.get(record)
        if cause is not None and record.state.cause != cause:
            text = f"room {record.room} at {role}: first {cause}, then {record.state.cause}"
            self.broken("I4", text)

    def _tell(
        self, incarnation: int, record: Record, cause: Cause | None, deadline_at_s: float
    ) -> None:
        node, room = self.sides[incarnation], record.room
        if record in self.told:
            self.broken("I4", f"{node.name}: the user of room {room} is told two endings")
        self.told[record] = cause
        late = self.now_s() > deadline_at_s + DEADLINE_SLACK_S
        if late and node.troubled_at_s < deadline_at_s:
            self.broken("I4", f"{node.name}: room {room} was to end at {deadline_at_s:.3f} s")
        if cause is not None and not self._is_true(room, cause):
            self.broken("I4", f"{node.name}: the user of room {room} is told {cause}")

    def _is_true(self, room: int, cause: Cause) -> bool:
        # A cause that the driver gives to a room names the room, so that a mix-up is detected.
        if "#" in cause.text:
            named = cause.text.rpartition("#")[2]
            return named == str(room) and cause in self._causes.get(room, ())
        if cause.code is Code.DEADLINE:
            return self.now_s() >= self._deadlines.get(room, float("inf"))
        if cause.code is Code.PROMPT_MISMATCH:
            return len(self._prompts.get(room, ())) > 1
        if cause.code is Code.TRANSFER_ERROR:
            return room in self._stopped or self.damaged
        # Every simulated node keeps to the protocol, so PROTOCOL_ERROR is never true.
        return cause.code is not Code.PROTOCOL_ERROR
