"""One endpoint by itself: its messages and its other commands, as values that can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from kvflow.protocols.arguments import pack_pages
from kvflow.protocols.commands import (
    FreePages,
    PeerKey,
    QuarantinePages,
    RoomEnded,
    RoomFailed,
    RoomReleased,
    RoomStopped,
    SendToDecode,
    SendToPrefill,
)
from kvflow.protocols.decode.endpoint import DecodeEndpoint
from kvflow.protocols.decode.links import DecodeIdentity
from kvflow.protocols.decode.records import DecodeRoomRecord, Prompt
from kvflow.protocols.errors import Cause, Code
from kvflow.protocols.limits import Bounds, Timing
from kvflow.protocols.machines.link import LinkPhase
from kvflow.protocols.pages.coverage import served_of
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.protocols.pages.layout import PageIndices, PoolLayout, Space, build_layout
from kvflow.protocols.ports import PlaneAddress, ProcessIdentity, WriteOutcome
from kvflow.protocols.prefill.endpoint import PrefillEndpoint
from kvflow.protocols.prefill.peers import PrefillIdentity
from kvflow.protocols.prefill.records import PrefillRoomRecord
from kvflow.protocols.wire import messages as wire
from kvflow.protocols.wire.codec import encode, parse_at_decode, parse_at_prefill, routing_id
from kvflow.protocols.wire.messages import GrantId, Incarnation, Rank, RoomId
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.telemetry.counters import Counts
from kvflow.testing.shards import shard_layout

DECODE, OTHER_DECODE, THIRD_DECODE = Incarnation(77), Incarnation(88), Incarnation(99)
PREFILL, OTHER_PREFILL = Incarnation(101), Incarnation(202)
RANK = Rank(0)
LAYOUT = build_layout([("k", "uint8", (8,))], page_size=4, num_pages=16)
THREE = build_layout(
    [
        StateKind("k", "uint8", (8,)),
        StateKind("w", "uint8", (4,), space="window"),
        StateKind("s", "uint8", (2,), ROW),
    ],
    spaces=(Space("pages", 16, 4), Space("window", 9, 2, 5), Space("rows", 3, 0)),
)
"""Three spaces, of which a prompt of `TOKENS` tokens needs three pages, three pages and a row."""
ADDRESS = PlaneAddress("fake", "there", ProcessIdentity("boot", "pid", 1, 2))
OWN_ADDRESS = PlaneAddress("fake", "here", ProcessIdentity("boot", "pid", 3, 4))
TIMING = Timing(
    heartbeat_s=1.0, lost_after_s=5.0, repeat_after_s=0.5, rendezvous_s=3.0, register_s=10.0
)
DIGEST = b"d" * 32
TOKENS = 11  # three pages of four, the last one partly filled
PAGES = (7, 2, 5)
GONE = Cause(Code.CLIENT_GONE, "the client is gone")
BROKEN = Cause(Code.ENGINE_ERROR, "the engine gave up")
START = 1000.0
P_co = TypeVar("P_co", covariant=True)


class HasPhase(Protocol[P_co]):
    @property
    def phase(self) -> P_co: ...


def phase_of(record: HasPhase[P_co]) -> P_co:
    """Return the phase as it is now.

    mypy keeps what an assertion says of `record.phase`, although a later call changes it.
    """
    return record.phase


def indices(*pages: int) -> PageIndices:
    return np.array(pages, np.int32)


def seen(command: Any) -> Any:
    """A command as a value: arrays of pages as tuples."""
    pages = {
        name: tuple(v.tolist())
        for name, v in msgspec.structs.asdict(command).items()
        if hasattr(v, "tolist")
    }
    return msgspec.structs.replace(command, **pages) if pages else command


class LonePrefill:
    """A prefill rank that two decodes may know. Methods return what it asked for meanwhile."""

    def __init__(
        self,
        *,
        timing: Timing | None = TIMING,
        bounds: Bounds | None = None,
        rank: int = RANK,
        layout: PoolLayout = LAYOUT,
    ) -> None:
        self.counts, self.now = Counts(), START
        identity = PrefillIdentity(PREFILL, Rank(rank), layout, OWN_ADDRESS)
        self.endpoint = PrefillEndpoint(
            identity, observer=self.counts, timing=timing, bounds=bounds
        )
        self.core = self.endpoint.core

    def asked(self) -> list[Any]:
        found: list[Any] = []
        for command in self.endpoint.commands():
            if isinstance(command, SendToDecode):
                message = parse_at_decode(command.frame)
                assert command.peer_id == routing_id(message.target)
                assert command.at_once is isinstance(message, wire.AbortAck)
                found.append(message)
            else:
                found.append(seen(command))
        return found

    def hear(self, *messages: wire.Message, sender: Incarnation | None = None) -> list[Any]:
        for message in messages:
            self.endpoint.receive(routing_id(sender or message.target), encode(message), self.now)
        return self.asked()

    def tick(self, after_s: float = 0.0) -> list[Any]:
        self.now += after_s
        self.endpoint.tick(self.now)
        return self.asked()

    def register(self, target: Incarnation = DECODE, **fields: Any) -> list[Any]:
        return self.hear(register(target, **fields))

    def up(self, *targets: Incarnation) -> LonePrefill:
        for target in targets or (DECODE,):
            self.register(target)
            self.endpoint.route_opened(target, self.now)
        self.asked()
        return self

    def open(
        self, room: int = 7, tokens: int = TOKENS, digest: bytes = DIGEST, **more: Any
    ) -> PrefillRoomRecord:
        return self.endpoint.open_room(room, tokens, digest, now=self.now, **more)

    def matched(self, room: int = 7, grant: int = 1, **more: Any) -> PrefillRoomRecord:
        self.hear(bootstrap(room, grant))
        record = self.open(room, **more)
        self.asked()
        return record

    def send(
        self, record: PrefillRoomRecord, *pages: int, last: bool = False, handoff: bytes = b""
    ) -> list[Any]:
        self.endpoint.queue_chunk(record, indices(*pages), last=last, handoff=handoff, now=self.now)
        return self.asked()

    def sending(self, *pages: int, **more: Any) -> PrefillRoomRecord:
        """Room 7 is matched, and a chunk of it is being written."""
        record = self.matched()
        self.send(record, *pages, **more)
        return record

    def ended(
        self, write: int, outcome: WriteOutcome = WriteOutcome.LANDED, **more: Any
    ) -> list[Any]:
        self.endpoint.write_ended(write, outcome, self.now, **more)
        return self.asked()

    def close(self, record: PrefillRoomRecord, cause: Cause = BROKEN) -> list[Any]:
        self.endpoint.close_room(record, cause, self.now)
        return self.asked()


def stopped(record: PrefillRoomRecord, cause: Cause) -> list[Any]:
    return [RoomStopped(record.serial, cause), RoomReleased(record.serial)]


# --- what a decode sends


def between(target: Incarnation = DECODE, source: Incarnation = PREFILL) -> dict[str, Any]:
    return {"source": source, "target": target}


def head(
    room: int, grant: int, target: Incarnation = DECODE, source: Incarnation = PREFILL
) -> dict[str, Any]:
    return {"room": RoomId(room), "grant": GrantId(grant), **between(target, source)}


def register(target: Incarnation = DECODE, fresh_from: int = 1, **fields: Any) -> wire.Register:
    given = {"wire_version": wire.WIRE_VERSION, "layout": LAYOUT, "address": ADDRESS} | fields
    return wire.Register(fresh_from=GrantId(fresh_from), **between(target) | given)


def announce(
    room: int = 7, grant: int = 1, target: Incarnation = DECODE, **fields: Any
) -> wire.Announce:
    return wire.Announce(**head(room, grant, target, **fields))


def bootstrap(
    room: int = 7,
    grant: int = 1,
    target: Incarnation = DECODE,
    pages: tuple[int, ...] = PAGES,
    tokens: int = TOKENS,
    digest: bytes = DIGEST,
    prefix: int = 0,
    source: Incarnation = PREFILL,
) -> wire.Bootstrap:
    return wire.Bootstrap(
        pages=pack_pages(indices(*pages)),
        prompt_tokens=tokens,
        prompt_digest=digest,
        prefix_tokens=prefix,
        **head(room, grant, target, source),
    )


def abort(
    room: int = 7,
    grant: int = 1,
    target: Incarnation = DECODE,
    cause: Cause = GONE,
    source: Incarnation = PREFILL,
) -> wire.Abort:
    return wire.Abort(cause=cause, **head(room, grant, target, source))


def ask(
    *beliefs: tuple[int, int, int], target: Incarnation = DECODE, source: Incarnation = PREFILL
) -> wire.Resync:
    """A Resync about rooms given as (room, grant, next_seq)."""
    rooms = tuple(wire.Belief(RoomId(room), GrantId(grant), seq) for room, grant, seq in beliefs)
    return wire.Resync(rooms=rooms, **between(target, source))


def beat(
    settled_below: int = 0,
    target: Incarnation = DECODE,
    source: Incarnation = PREFILL,
    settled: tuple[tuple[int, int], ...] = (),
) -> wire.Heartbeat:
    ranges = tuple((GrantId(start), GrantId(end)) for start, end in settled)
    return wire.Heartbeat(
        settled_below=GrantId(settled_below), settled=ranges, **between(target, source)
    )


# --- what a prefill sends


def registered(
    refusal: str = "",
    target: Incarnation = DECODE,
    source: Incarnation = PREFILL,
    *,
    rank: int = RANK,
    size: int = 1,
    asked: int | None = None,
    fresh_from: int = 0,
    address: PlaneAddress | None = OWN_ADDRESS,
) -> wire.Registered:
    """An acceptance, by one of `size` ranks, or a refusal; `asked` is `source` unless given."""
    return wire.Registered(
        wire_version=wire.WIRE_VERSION,
        rank=Rank(rank),
        refusal=refusal,
        address=address,
        asked=source if asked is None else Incarnation(asked),
        fresh_from=GrantId(fresh_from),
        served=() if refusal else served_of(shard_layout(LAYOUT, rank, size)),
        **between(target, source),
    )


def chunk_done(
    seq: int,
    pages: int | tuple[int, ...],
    last: bool = False,
    handoff: bytes = b"",
    room: int = 7,
    grant: int = 1,
    checksum: bytes = b"",
    rank: int = RANK,
    **fields: Any,
) -> wire.ChunkDone:
    """What a rank says of a chunk. `pages` counts by space, or the pages of the only space."""
    counts = (pages,) if isinstance(pages, int) else pages
    chunk: dict[str, Any] = {"seq": seq, "pages": counts, "last": last, "rank": Rank(rank)}
    return wire.ChunkDone(
        handoff=handoff, checksum=checksum, **chunk, **head(room, grant, **fields)
    )


def begun(room: int = 7, grant: int = 1, rank: int = RANK, **fields: Any) -> wire.Begun:
    return wire.Begun(rank=Rank(rank), **head(room, grant, **fields))


def failed(
    cause: Cause, room: int = 7, grant: int = 1, rank: int = RANK, **fields: Any
) -> wire.RoomFailed:
    return wire.RoomFailed(cause=cause, rank=Rank(rank), **head(room, grant, **fields))


def ack(
    room: int = 7, grant: int = 1, *, drained: bool = True, rank: int = RANK, **fields: Any
) -> wire.AbortAck:
    return wire.AbortAck(drained=drained, rank=Rank(rank), **head(room, grant, **fields))


# --- decode


def rank_info(
    rank: int = RANK, incarnation: int = PREFILL, control: str = "", size: int = 1
) -> RankInfo:
    return RankInfo(rank, size, incarnation, control or f"tcp://prefill:{rank}", "fake", "")


def key_of(info: RankInfo) -> PeerKey:
    return PeerKey(Incarnation(info.incarnation), info.control)


ONE = (rank_info(),)
KEY = key_of(ONE[0])
TWO = (rank_info(size=2), rank_info(rank=1, incarnation=OTHER_PREFILL, size=2))
OTHER_KEY = key_of(TWO[1])
SERVED = served_of(LAYOUT)
ELSEWHERE = (rank_info(incarnation=303, control="tcp://elsewhere:1"),)  # another prefill
G = GrantId(2)  # the first that is free once `LoneDecode.up` has used one to link
AT = f"prefill at {ONE[0].control}"
SILENT = Cause(Code.PEER_LOST, f"{AT} was silent for 5 s")


class LoneDecode:
    """A decode that one or two prefill ranks may know. Messages it sends are (peer, message)."""

    def __init__(
        self,
        *,
        timing: Timing | None = TIMING,
        bounds: Bounds | None = None,
        layout: PoolLayout = LAYOUT,
        **more: Any,
    ) -> None:
        self.counts, self.now = Counts((1,)), START
        identity = DecodeIdentity(DECODE, layout, ADDRESS)
        self.endpoint = DecodeEndpoint(
            identity, observer=self.counts, timing=timing, bounds=bounds, **more
        )
        self.core = self.endpoint.core

    def asked(self) -> list[Any]:
        found: list[Any] = []
        for command in self.endpoint.commands():
            if isinstance(command, SendToPrefill):
                message = parse_at_prefill(command.frame)
                assert (message.source, message.target) == (command.peer.incarnation, DECODE)
                assert command.at_once is isinstance(message, wire.Abort)
                found.append((command.peer, message))
            else:
                found.append(seen(command))
        return found

    def hear(self, *messages: wire.Message, key: PeerKey = KEY) -> list[Any]:
        for message in messages:
            self.endpoint.receive(key, encode(message), self.now)
        return self.asked()

    def silence(self, for_s: float = 5) -> list[Any]:
        """What the second strike of the clock brings, after time without a message."""
        self.tick(for_s)
        return self.tick()

    def tick(self, after_s: float = 0.0) -> list[Any]:
        self.now += after_s
        self.endpoint.tick(self.now)
        return self.asked()

    def open(
        self,
        room: int = 7,
        ranks: tuple[RankInfo, ...] = ONE,
        tokens: int = TOKENS,
        prefix: int = 0,
        **more: Any,
    ) -> GrantId:
        return self.endpoint.open_room(
            room, ranks, Prompt(tokens, DIGEST, prefix), now=self.now, **more
        )

    def up(self, ranks: tuple[RankInfo, ...] = ONE, size: int = 0) -> LoneDecode:
        """These ranks are linked, and owe nothing; `size` is their number, if they are not all."""
        grant = self.open(999, ranks)
        fresh = self.core.next_grant
        for info in ranks:
            source = Incarnation(info.incarnation)
            self.hear(
                registered(
                    source=source, rank=info.rank, size=size or len(ranks), fresh_from=fresh
                ),
                key=key_of(info),
            )
        self.endpoint.close_room(grant, GONE, self.now)
        for info in ranks:
            source = Incarnation(info.incarnation)
            self.hear(ack(999, grant, source=source, rank=info.rank), key=key_of(info))
        self.asked()
        return self

    def lent(
        self, room: int = 7, ranks: tuple[RankInfo, ...] = ONE, **more: Any
    ) -> DecodeRoomRecord:
        grant = self.open(room, ranks, **more)
        record = self.endpoint.rooms[grant]
        self.lend(grant)
        return record

    def lend(self, grant: GrantId, pages: tuple[int, ...] = PAGES) -> list[Any]:
        assert self.endpoint.lend(grant, indices(*pages), self.now)
        return self.asked()

    def close(self, grant: GrantId, cause: Cause = GONE) -> list[Any]:
        self.endpoint.close_room(grant, cause, self.now)
        return self.asked()

    def do(self, what: Callable[[], object]) -> list[Any]:
        what()
        return self.asked()


def to(message: wire.Message, key: PeerKey = KEY) -> tuple[PeerKey, wire.Message]:
    return key, message


def other(message: wire.Message) -> tuple[PeerKey, wire.Message]:
    return to(message, OTHER_KEY)


def done(
    seq: int, pages: int | tuple[int, ...], last: bool = False, handoff: bytes = b"", **more: Any
) -> wire.ChunkDone:
    return chunk_done(seq, pages, last, handoff, grant=G, **more)


def over(grant: GrantId, cause: Cause, *, freed: bool = True) -> list[object]:
    """What a room of which nothing was lent asks for at its end."""
    return [RoomFailed(grant, cause), *([FreePages(grant)] if freed else []), RoomEnded(grant)]


def quarantined(grant: GrantId) -> list[object]:
    return [QuarantinePages(grant), RoomEnded(grant)]


def link(decode: LoneDecode) -> LinkPhase:
    return decode.core.links.peers[KEY].phase
