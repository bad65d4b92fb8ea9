"""Two shipped endpoints joined by a link that loses, repeats and reorders, with rules of
hypothesis.

The world knows what neither endpoint can: which writes run, which pages are free, what users were
told.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvflow.proof.simulators import Choice
from kvflow.protocols import commands as c
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.decode.links import DecodeIdentity
from kvflow.protocols.decode.records import Prompt
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machines.decode_room import TERMINAL as OVER_AT_DECODE
from kvflow.protocols.machines.prefill_room import TERMINAL as OVER_AT_PREFILL
from kvflow.protocols.machines.prefill_room import PrefillPhase
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.ports import PlaneAddress, ProcessIdentity, WriteOutcome
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.prefill.peers import PrefillIdentity
from kvflow.protocols.prefill.records import PrefillRoomRecord
from kvflow.protocols.wire.codec import routing_id
from kvflow.protocols.wire.messages import GrantId, Incarnation, Rank
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.telemetry.counters import Counts
from tests.soak import sized

PAGES, TOKENS, DIGEST, CONTROL = 2, 8, b"d" * 32, "tcp://prefill:1"
LAYOUT = build_layout([("k", "uint8", (8,))], page_size=4, num_pages=16)
ADDRESS = PlaneAddress("fake", "there", ProcessIdentity("boot", "pid:[1]", 1, 1))
TIMING = Timing(
    heartbeat_s=0.5, lost_after_s=1.5, repeat_after_s=0.4, rendezvous_s=2.0, register_s=1.5
)
WHY = Cause(Code.CLIENT_GONE, "by rule")
PICK = st.integers(0, 7)
MOMENT = st.sampled_from((0.01, 0.1, 0.41, 1.6))


class Write:
    """`left`: pages of decode's that it may still write."""

    def __init__(self, number: int, grant: int, serial: int, life: int, targets: list[int]) -> None:
        self.number, self.grant, self.serial, self.life = number, grant, serial, life
        self.targets, self.left = targets, set(targets)
        self.outcome: WriteOutcome | None = None


class Joined(RuleBasedStateMachine):
    """One decode, and one prefill that may crash and come back under another incarnation."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.free = list(range(LAYOUT.num_pages))
        # By page: the grant that has it; its negative once it is the user's.
        self.owners: dict[int, int] = {}
        self.lent: dict[int, list[int]] = {}
        self.linked: list[GrantId] = []
        self.told: dict[int, Cause | None] = {}  # at decode, by grant
        self.stopped: dict[int, Cause | None] = {}  # at prefill, by serial
        self.legs: dict[int, PrefillRoomRecord] = {}  # at prefill, by serial, until released
        self.matched: set[int] = set()
        self.writes: list[Write] = []  # that may still land
        self.landed: dict[int, set[int]] = {}  # by grant
        self.routes: list[Incarnation] = []  # to be opened
        self.watched: set[c.PeerKey] = set()
        self.dialled: list[c.PeerKey] = []
        self.to_prefill: list[bytes] = []
        self.to_decode: list[bytes] = []
        self.lives = 0
        self.next_room = 0
        identity = DecodeIdentity(Incarnation(1000), LAYOUT, ADDRESS)
        self.decode = DecodeEndpoint(
            identity, observer=Counts(), timing=TIMING, bounds=Bounds(quarantine_share=1.0)
        )
        self._start()

    def _start(self) -> None:
        self.lives += 1
        identity = PrefillIdentity(Incarnation(self.lives), Rank(0), LAYOUT, ADDRESS)
        self.prefill = PrefillEndpoint(
            identity, observer=Counts(), timing=TIMING, bounds=Bounds(closed_grants=2)
        )
        self.info = RankInfo(0, 1, self.lives, CONTROL, "fake", "m")

    # --- what endpoints ask for

    def run_both(self) -> None:
        while (mine := self.decode.commands()) or self.prefill.core.outbox:
            for asked in mine:
                self._run_for_decode(asked)
            for command in self.prefill.commands():
                self._run_for_prefill(command)

    def _run_for_decode(self, command: Any) -> None:
        match command:
            case c.Dial():
                self.dialled.append(command.peer)
            case c.HangUp() if command.peer in self.dialled:
                self.dialled.remove(command.peer)
            case c.WatchWriter():
                self.watched.add(command.peer)
            case c.StopWatch():
                self.watched.discard(command.peer)
            case c.SendToPrefill():
                self.to_prefill.append(command.frame)
            case c.Linked():
                self.linked.append(command.grant)
            case c.RoomLanded():
                assert command.grant not in self.told, "I4: decode's user is told twice"
                self.told[command.grant] = None
                pages = self.lent[command.grant]
                assert command.handoff == b"handoff", "I9"
                assert self.landed[command.grant] >= set(pages), "I8: success without all pages"
                for page in pages:
                    self.owners[page] = -command.grant
            case c.RoomFailed():
                assert command.grant not in self.told, "I4: decode's user is told twice"
                assert command.cause.code is not Code.PROTOCOL_ERROR, command.cause
                self.told[command.grant] = command.cause
            case c.RoomEnded():
                assert command.grant in self.told, "I4: a room ends, and its user is not told"
            case c.FreePages():
                for page in self.lent.pop(command.grant, ()):
                    owner = self.owners.pop(page)
                    assert owner == command.grant, "I1: pages are given back that are not lent"
                    self.free.append(page)

    def _run_for_prefill(self, command: Any) -> None:
        match command:
            case c.SendToDecode():
                self.to_decode.append(command.frame)
            case c.OpenRoute():
                self.routes.append(Incarnation(self.lives))
            case c.StartWrite():
                grant, targets = self.legs[command.serial].grant, command.target_pages.tolist()
                owners = {self.owners.get(page) for page in targets}
                assert owners <= {grant}, "I2: a write begins on pages that are not lent"
                self.writes.append(Write(command.write, grant, command.serial, self.lives, targets))
            case c.RoomMatched():
                assert command.serial not in self.matched
                self.matched.add(command.serial)
            case c.RoomDone() | c.RoomStopped():
                assert command.serial not in self.stopped, "I4: the engine is told twice"
                self.stopped[command.serial] = getattr(command, "cause", None)
            case c.RoomReleased() if command.serial in self.legs:
                told = command.serial in self.stopped
                assert told, "I4: a room ends at prefill, and its engine is not told"
                assert not any(w.serial == command.serial for w in self._running()), "I12"
                del self.legs[command.serial]

    def _running(self) -> list[Write]:
        return [
            write for write in self.writes if write.life == self.lives and write.outcome is None
        ]

    # --- rules: users

    @initialize()
    def begin(self) -> None:
        self.run_both()

    @rule(announce=st.booleans())
    def open_at_decode(self, announce: bool) -> None:
        self.next_room += 1
        self._open(self.next_room, announce)

    @rule(announce=st.booleans())
    def open_both(self, announce: bool) -> None:
        self.next_room += 1
        self._open(self.next_room, announce)
        self.expect(0)

    @rule(send=st.booleans())
    def meet(self, send: bool) -> None:
        self.open_both(True)
        self._deliver_all()
        while self.linked:
            self.offer(0)
        self._deliver_all()
        if send and self._sendable():
            self.send_chunk(-1, False)

    @precondition(lambda self: self.next_room)
    @rule(back=PICK)
    def expect(self, back: int) -> None:
        room = max(1, self.next_room - back)
        try:
            record = self.prefill.open_room(room, TOKENS, DIGEST, now=self.now)
        except KvflowError:
            return
        self.legs[record.serial] = record
        self.run_both()

    def _open(self, room: int, announce: bool) -> None:
        try:
            self.decode.open_room(
                room, [self.info], Prompt(TOKENS, DIGEST), now=self.now, announce=announce
            )
        except KvflowError as error:
            assert error.code is Code.PEER_LOST, error
        self.run_both()

    @precondition(lambda self: self.linked)
    @rule(pick=PICK)
    def offer(self, pick: int) -> None:
        grant = self.linked.pop(pick % len(self.linked))
        if len(self.free) < PAGES:
            self.decode.close_room(grant, Cause(Code.CAPACITY, "no pages"), self.now)
            return self.run_both()
        pages = [self.free.pop(0) for _ in range(PAGES)]
        for page in pages:
            self.owners[page] = grant
        self.lent[grant] = pages
        if not self.decode.lend(grant, np.array(pages, np.int32), self.now):
            for page in self.lent.pop(grant):
                del self.owners[page]
                self.free.append(page)
        return self.run_both()

    @precondition(lambda self: self._sendable())
    @rule(pick=PICK, whole=st.booleans())
    def send_chunk(self, pick: int, whole: bool) -> None:
        found = self._sendable()
        record = found[pick % len(found)]
        left = PAGES - sum(record.placed)
        count = left if whole else 1
        last = count == left
        handoff = b"handoff" if last else b""
        self.prefill.queue_chunk(
            record, np.arange(count, dtype=np.int32), last=last, handoff=handoff, now=self.now
        )
        self.run_both()

    def _sendable(self) -> list[PrefillRoomRecord]:
        phases = (PrefillPhase.WAITING_FOR_INPUT, PrefillPhase.TRANSFERRING)
        return [
            leg for leg in self.legs.values() if leg.phase in phases and not leg.state.last_queued
        ]

    @precondition(lambda self: self._running())
    @rule(pick=PICK, outcome=st.sampled_from(WriteOutcome))
    def write_ends(self, pick: int, outcome: WriteOutcome) -> None:
        running = self._running()
        self._end_write(running[pick % len(running)], outcome)

    def _end_write(self, write: Write, outcome: WriteOutcome) -> None:
        write.outcome = outcome
        if outcome is WriteOutcome.LANDED:
            self._lands(write, write.targets)
        if outcome is not WriteOutcome.UNPROVEN:
            self.writes.remove(write)
        self.prefill.write_ended(write.number, outcome, self.now)
        self.run_both()

    def _lands(self, write: Write, pages: list[int]) -> None:
        for page in pages:
            assert self.owners.get(page) == write.grant, (
                "I2: a byte lands on a page that is not lent"
            )
            self.landed.setdefault(write.grant, set()).add(page)

    @precondition(lambda self: self.decode.rooms)
    @rule(pick=PICK)
    def abort_at_decode(self, pick: int) -> None:
        grants = list(self.decode.rooms)
        self.decode.close_room(grants[pick % len(grants)], WHY, self.now)
        self.run_both()

    @precondition(lambda self: self.legs)
    @rule(pick=PICK)
    def abort_at_prefill(self, pick: int) -> None:
        legs = list(self.legs.values())
        self.prefill.close_room(legs[pick % len(legs)], WHY, self.now)
        self.run_both()

    # --- rules: link, time, processes

    @precondition(lambda self: self.to_prefill)
    @rule(at=st.sampled_from((0, 0, 0, 1, 2)), keep=st.booleans())
    def deliver_to_prefill(self, at: int, keep: bool) -> None:
        at = min(at, len(self.to_prefill) - 1)
        frame = (
            self.to_prefill[at] if keep and len(self.to_prefill) < 12 else self.to_prefill.pop(at)
        )
        self.prefill.receive(routing_id(Incarnation(1000)), frame, self.now)
        self.run_both()

    @precondition(lambda self: self.to_decode)
    @rule(keep=st.booleans())
    def deliver_to_decode(self, keep: bool) -> None:
        frame = self.to_decode[0] if keep and len(self.to_decode) < 12 else self.to_decode.pop(0)
        if self.dialled:
            self.decode.receive(self.dialled[-1], frame, self.now)
            self.run_both()

    @rule()
    def deliver_all(self) -> None:
        self._deliver_all()

    def _deliver_all(self) -> None:
        for _ in range(50):
            if self.routes:
                self.open_route()
            if not (self.to_prefill or self.to_decode):
                return
            if self.to_prefill:
                self.deliver_to_prefill(0, False)
            if self.to_decode:
                self.deliver_to_decode(False)

    @precondition(lambda self: self.to_prefill)
    @rule(pick=PICK)
    def lose_to_prefill(self, pick: int) -> None:
        del self.to_prefill[pick % len(self.to_prefill)]

    @precondition(lambda self: self.to_decode)
    @rule(pick=PICK)
    def lose_to_decode(self, pick: int) -> None:
        del self.to_decode[pick % len(self.to_decode)]

    @precondition(lambda self: self.routes)
    @rule()
    def open_route(self) -> None:
        life = self.routes.pop(0)
        if life == self.lives:
            self.prefill.route_opened(Incarnation(1000), self.now)
            self.run_both()

    @rule(after_s=MOMENT)
    def time_passes(self, after_s: float) -> None:
        self.now += after_s
        self.decode.tick(self.now)
        self.prefill.tick(self.now)
        self.run_both()

    @precondition(lambda self: self.lives < 3)
    @rule(proven=st.booleans())
    def crash_prefill(self, proven: bool) -> None:
        old = self.lives
        self.writes = [write for write in self.writes if write.life != old]
        self.legs.clear()
        self.matched.clear()
        self.stopped.clear()
        self.to_decode.clear()
        self._start()
        if proven:
            self._prove(old)

    def _prove(self, life: int) -> None:
        for key in [key for key in self.watched if key.incarnation == life]:
            self.watched.discard(key)
            self.decode.writer_died(key, self.now)
        self.run_both()

    # --- what must hold

    @invariant()
    def every_page_has_one_owner(self) -> None:
        assert sorted([*self.free, *self.owners]) == list(range(LAYOUT.num_pages)), "I1"

    @invariant()
    def no_write_can_reach_a_page_of_another(self) -> None:
        for write in self.writes:
            assert all(self.owners.get(page) == write.grant for page in write.targets), "I2"

    @invariant()
    def what_has_ended_is_in_no_table(self) -> None:
        assert not any(record.phase in OVER_AT_DECODE for record in self.decode.rooms.values()), (
            "I5"
        )
        assert not any(record.phase in OVER_AT_PREFILL for record in self.prefill.rooms.values()), (
            "I5"
        )

    def teardown(self) -> None:
        """Without further faults every user is told, and every loan ends."""
        for leg in list(self.legs.values()):
            self.prefill.close_room(leg, WHY, self.now)
        for grant in list(self.decode.rooms):
            self.decode.close_room(grant, WHY, self.now)
        self.run_both()
        for _ in range(120):
            for write in list(self._running()):
                self._end_write(write, WriteOutcome.CANCELLED)
            for life in range(1, self.lives):
                self._prove(life)
            self._deliver_all()
            self.time_passes(0.41)
        unproven = {write.grant for write in self.writes}
        assert not self.prefill.rooms and not self.legs, "a room at prefill hangs"
        assert not self.decode.rooms, "a room at decode hangs"
        assert {owner for owner in self.owners.values() if owner > 0} <= unproven, (
            "a loan has not ended"
        )


SETTINGS: dict[str, Any] = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
}


def test_two_endpoints_keep_their_promises() -> None:
    run_state_machine_as_test(
        Joined, settings=settings(max_examples=60, stateful_step_count=40, **SETTINGS)
    )


@pytest.mark.parametrize(
    "plant",
    [
        *("ack before drain", "doubt taken for proof", "double ending"),
        *("lent after the end", "doubt forgotten", "dropped from one table"),
    ],
)
def test_a_planted_bug_is_found(plant: str) -> None:
    found = settings(
        max_examples=400, stateful_step_count=40, database=None, phases=[Phase.generate], **SETTINGS
    )
    with Choice(bare=True).load().planted(plant), pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(Joined, settings=found)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_they_do_so_in_longer_lives() -> None:
    run_state_machine_as_test(
        Joined,
        settings=settings(max_examples=sized(80, 700), stateful_step_count=120, **SETTINGS),
    )
