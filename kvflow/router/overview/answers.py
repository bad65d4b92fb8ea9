"""The parts of a worker's answers that the overview keeps.

Any program may answer at a worker's address, so every value has a type, and every list and text a
limit. Fields that an older worker lacks have defaults.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_ROOMS = 300  # of one worker; kvflow's workers remember 256
MAX_PEERS = 64
MAX_RANKS = 128
MAX_KINDS = 16  # kinds of page owners, or states of rooms
MAX_TEXT = 2048
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
# Rates divide counts, and the page's numbers are exact up to here.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Pool(msgspec.Struct, frozen=True):
    page_size: Count = 0
    tokens: Count = 0
    bytes: Count = 0
    dtype: Text = ""
    device: Text = ""


class Storage(msgspec.Struct, frozen=True):
    readable: bool = True
    writable: bool = True
    errors: Count = 0


class Cache(msgspec.Struct, frozen=True):
    """Pages of a prefix cache by tier, and counters since the worker's start."""

    pages: Count = 0
    evictable_pages: Count = 0
    asked_tokens: Count = 0
    hit_tokens: Count = 0
    evicted_pages: Count = 0
    host_pages: Count = 0
    host_limit_pages: Count = 0
    saved_pages: Count = 0
    loaded_pages: Count = 0
    stored_pages: Count = 0
    fetched_pages: Count = 0
    failed_copies: Count = 0
    storage: Storage | None = None


class Rank(msgspec.Struct, frozen=True):
    rank: Count = 0
    up: bool = False
    pages_free: Count = 0
    pages_total: Count = 0
    rooms: dict[str, Count] = {}
    requests: Count = 0
    bytes_moved: Count = 0


class Counts(msgspec.Struct, frozen=True):
    """A histogram: values up to each bound, which the previous bound excludes."""

    bounds: tuple[float, ...] = ()
    counts: tuple[Count, ...] = ()


class Completions(msgspec.Struct, frozen=True):
    generated_tokens: Count = 0
    finished: Count = 0
    failed: Count = 0
    aborted: Count = 0
    latencies: dict[str, Counts] = {}


class Info(msgspec.Struct, frozen=True):
    """A worker's /server_info."""

    role: Text = ""
    version: Text = ""
    incarnation: Text = ""
    data_plane: Text = ""
    pool: Pool = Pool()
    pages: dict[str, Count] = {}  # "free", "total", and one entry for each kind of owner
    prefix_cache: Cache | None = None
    quarantine_pages: Count = 0
    quarantine_overdue_pages: Count = 0
    quarantine_limit_pages: Count = 0
    pinned_pages: Count = 0
    rooms: dict[str, Count] = {}
    ranks: tuple[Rank, ...] = ()
    bytes_moved: Count = 0
    running: Count = 0
    waiting: Count = 0
    completions: Completions = Completions()
    draining: bool = False


class Room(msgspec.Struct, frozen=True):
    """One half of a room, as a worker's /rooms reports it."""

    room: int
    request_id: Text = ""
    phase: Text = ""
    ended: bool = False
    cause: Text | None = None
    opened_ago_s: float | None = None
    bytes_landed: Count | None = None
    bytes_total: Count | None = None


class Peer(msgspec.Struct, frozen=True):
    """A node of the other role, as a worker's /peers reports it."""

    incarnation: Text = ""
    phase: Text = ""
    rank: Count | None = None
    heard_ago_s: float | None = None
    rooms: Count | None = None  # of a decode, at prefill
    loans: Count | None = None  # of a prefill, at decode
    quarantine_pages: Count = 0
    pinned_pages: Count = 0


class _Rooms(msgspec.Struct):
    rooms: list[Room] = []


class _Peers(msgspec.Struct):
    peers: list[Peer] = []


def read_info(raw: bytes) -> Info:
    """Raises: ValueError for an answer that is no /server_info of a worker."""
    found = msgspec.json.decode(raw)
    if not isinstance(found, dict):
        raise ValueError("/server_info is not an object")
    if isinstance(pages := found.get("pages"), dict):
        found["pages"] = {name: n for name, n in pages.items() if name != "home"}
    info = msgspec.convert(found, Info)
    return msgspec.structs.replace(
        info,
        pages=_bounded(info.pages),
        rooms=_bounded(info.rooms),
        ranks=tuple(
            msgspec.structs.replace(rank, rooms=_bounded(rank.rooms))
            for rank in info.ranks[:MAX_RANKS]
        ),
    )


def read_rooms(raw: bytes) -> tuple[Room, ...]:
    """Raises: ValueError for an answer that is no /rooms of a worker."""
    return tuple(msgspec.json.decode(raw, type=_Rooms).rooms[:MAX_ROOMS])


def read_peers(raw: bytes) -> tuple[Peer, ...]:
    """Raises: ValueError for an answer that is no /peers of a worker."""
    return tuple(msgspec.json.decode(raw, type=_Peers).peers[:MAX_PEERS])


def _bounded(counts: dict[str, int]) -> dict[str, int]:
    return {name[:40]: count for name, count in list(counts.items())[:MAX_KINDS]}
