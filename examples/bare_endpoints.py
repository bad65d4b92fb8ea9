"""Both halves of the protocol driven by hand, without event loop, thread or socket.

    python examples/bare_endpoints.py

An endpoint decides, its engine acts: call a method, then do what `commands()` asks for. Here frames
go through lists, and a write is a copy between two numpy arrays, one page per turn; an engine puts
links and copies of its own in their place. Room 1 lands. Room 2 is aborted in the middle of a
write: decode gets its pages back when prefill's answer proves that the write has stopped, and not
before.
"""

from collections import deque
from collections.abc import Callable
from time import monotonic

import numpy as np

from kvflow import Cause, Code, RankInfo, build_layout
from kvflow.protocols import commands as c
from kvflow.protocols.arguments import check_prompt
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.decode.links import DecodeIdentity
from kvflow.protocols.decode.records import Prompt
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import PlaneAddress, ProcessIdentity, WriteOutcome
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.prefill.peers import PrefillIdentity
from kvflow.protocols.prefill.records import PrefillRoomRecord
from kvflow.protocols.wire.codec import routing_id
from kvflow.protocols.wire.messages import GrantId, Incarnation, Rank
from kvflow.telemetry.counters import Counts

PAGES, PAGE_SIZE, DIM = 32, 4, 8
LAYOUT = build_layout([("k", "float32", (DIM,))], page_size=PAGE_SIZE, num_pages=PAGES)
# How the other side's copies reach a pool.
HERE = PlaneAddress("copy", "this process", ProcessIdentity("", "", 0, 0))
PREFILL = RankInfo(0, 1, incarnation=99, control="in memory", backend="copy", model="")
DECODE = Incarnation(77)


class Link:
    """The frames on their way, in order."""

    def __init__(self) -> None:
        self.to_prefill: deque[bytes] = deque()
        self.to_decode: deque[bytes] = deque()


class Write:
    """A copy under way: one page per turn, so that there is a middle in which it can be stopped."""

    def __init__(self, command: c.StartWrite) -> None:
        self.pairs = deque(zip(command.source_pages, command.target_pages, strict=True))
        self.cancelled = False


class Prefill:
    def __init__(self, link: Link, target: "Decode") -> None:
        self.link, self.target = link, target
        self.memory = np.random.default_rng(0).random((PAGES, PAGE_SIZE, DIM), dtype=np.float32)
        identity = PrefillIdentity(Incarnation(PREFILL.incarnation), Rank(0), LAYOUT, HERE)
        self.endpoint = PrefillEndpoint(identity, observer=Counts(LAYOUT.place_bytes))
        self.writes: dict[int, Write] = {}
        self.matched: set[int] = set()  # rooms, by serial
        self.released: set[int] = set()

    def open(self, room: int, prompt: list[int]) -> PrefillRoomRecord:
        tokens, digest = check_prompt(prompt)
        return self.endpoint.open_room(room, tokens, digest, now=monotonic())

    def turn(self) -> None:
        """What a loop does each time round: feed what has come, copy a little, see to the time, run
        the commands.
        """
        while self.link.to_prefill:
            self.endpoint.receive(routing_id(DECODE), self.link.to_prefill.popleft(), monotonic())
        self.copy()
        if monotonic() >= self.endpoint.next_tick():
            self.endpoint.tick(monotonic())
        while commands := self.endpoint.commands():
            for command in commands:
                self.run(command)

    def run(self, command: c.PrefillCommand) -> None:
        match command:
            case c.SendToDecode():
                self.link.to_decode.append(command.frame)
            case c.OpenRoute():  # connect to `command.address`, whose pool is `command.layout`
                self.endpoint.route_opened(command.peer, monotonic())
            case c.StartWrite():
                self.writes[command.write] = Write(command)
            case c.CancelWrite():
                self.writes[command.write].cancelled = True
            case c.RoomMatched():
                self.matched.add(command.serial)
            case c.RoomReleased():
                self.released.add(command.serial)
            case c.RoomStopped():
                print(f"prefill: a room has ended: {command.cause}")
            case c.RoomDone() | c.WatchProcess() | c.CloseRoute():
                pass  # the other side lives as long as this process

    def copy(self) -> None:
        for number, write in list(self.writes.items()):
            if write.pairs and not write.cancelled:
                source, target = write.pairs.popleft()
                self.target.memory[target] = self.memory[source]
            if not write.pairs or write.cancelled:
                del self.writes[number]
                outcome = WriteOutcome.CANCELLED if write.pairs else WriteOutcome.LANDED
                self.endpoint.write_ended(number, outcome, monotonic())


class Decode:
    def __init__(self, link: Link) -> None:
        self.link = link
        self.memory = np.zeros((PAGES, PAGE_SIZE, DIM), np.float32)
        self.endpoint = DecodeEndpoint(
            DecodeIdentity(DECODE, LAYOUT, HERE), observer=Counts(LAYOUT.place_bytes)
        )
        self.free = deque(range(PAGES))
        self.pages: dict[GrantId, PageIndices] = {}
        self.landed: dict[GrantId, bytes] = {}

    def open(self, room: int, prompt: list[int]) -> GrantId:
        tokens, digest = check_prompt(prompt)
        return self.endpoint.open_room(room, [PREFILL], Prompt(tokens, digest), now=monotonic())

    def turn(self) -> None:
        while self.link.to_decode:
            key = c.PeerKey(Incarnation(PREFILL.incarnation), PREFILL.control)
            self.endpoint.receive(key, self.link.to_decode.popleft(), monotonic())
        if monotonic() >= self.endpoint.next_tick():
            self.endpoint.tick(monotonic())
        while commands := self.endpoint.commands():
            for command in commands:
                self.run(command)

    def run(self, command: c.DecodeCommand) -> None:
        match command:
            case c.SendToPrefill():
                self.link.to_prefill.append(command.frame)
            case c.Linked(grant):  # every rank is there: lend pages
                (count,) = self.endpoint.rooms[grant].counts  # of each space: this pool has one
                self.pages[grant] = np.array([self.free.popleft() for _ in range(count)], np.int32)
                self.endpoint.lend(grant, self.pages[grant], monotonic())
            case c.RoomLanded(grant, handoff):
                self.landed[grant] = handoff
            case c.RoomFailed(grant, cause):
                print(f"decode: grant {grant} has failed: {cause}")
            # The only way back for pages that were lent and have not landed.
            case c.FreePages(grant):
                self.free.extend(self.pages.pop(grant).tolist())
            case (
                c.Dial()
                | c.HangUp()
                | c.WatchWriter()
                | c.StopWatch()
                | c.RoomEnded()
                | c.QuarantinePages()
            ):
                # One link that is always there, to a writer that lives as long as this process.
                pass
            case c.VerifyChunk() | c.StopVerifying():
                raise AssertionError("this endpoint was made without verify")


def main() -> None:
    link = Link()
    decode = Decode(link)
    prefill = Prefill(link, decode)

    def turns_until(what: str, is_true: Callable[[], bool]) -> None:
        for count in range(1000):
            if is_true():
                print(f"{what} after {count} turns")
                return
            decode.turn()
            prefill.turn()
        raise TimeoutError(what)

    prompt = list(range(30))  # 8 pages
    source = np.arange(10, 18, dtype=np.int32)  # what this engine has computed, in pages of its own

    first, grant = prefill.open(1, prompt), decode.open(1, prompt)
    turns_until("room 1: matched", lambda: first.serial in prefill.matched)
    prefill.endpoint.queue_chunk(first, source[:4], last=False, handoff=b"", now=monotonic())
    prefill.endpoint.queue_chunk(
        first, source[4:], last=True, handoff=b"first token: 42", now=monotonic()
    )
    turns_until("room 1: landed", lambda: grant in decode.landed)
    identical = bool((decode.memory[decode.pages[grant]] == prefill.memory[source]).all())
    print(f"room 1: {len(source)} pages, {decode.landed[grant].decode()}, identical: {identical}")
    decode.free.extend(decode.pages.pop(grant).tolist())  # they have landed: they are the engine's

    second, grant = prefill.open(2, prompt), decode.open(2, prompt)
    turns_until("room 2: matched", lambda: second.serial in prefill.matched)
    prefill.endpoint.queue_chunk(second, source, last=True, handoff=b"", now=monotonic())
    turns_until(
        "room 2: in the middle",
        lambda: any(len(write.pairs) == 5 for write in prefill.writes.values()),
    )
    decode.endpoint.close_room(grant, Cause(Code.CLIENT_GONE, "the client has left"), monotonic())
    assert grant in decode.pages  # lent: prefill may still write into them
    turns_until("room 2: its pages are free", lambda: grant not in decode.pages)
    assert not prefill.writes and second.serial in prefill.released
    assert (
        identical
        and len(decode.free) == PAGES
        and not decode.endpoint.rooms
        and not prefill.endpoint.rooms
    )


if __name__ == "__main__":
    main()
