"""The overview as a document: what `GET /overview`, the page and `kvflow top` show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvflow.router.overview.answers import Cache, Info, Peer, Pool, Rank, Room
from kvflow.router.overview.rates import Change, added, quantile, summed
from kvflow.router.workers import Worker

MAX_SHOWN_ROOMS = 80


class Seen(msgspec.Struct):
    """The latest answers of one worker, and what was wrong with the last question."""

    info: Info | None = None
    rooms: tuple[Room, ...] = ()
    peers: tuple[Peer, ...] = ()
    answered_at_s: float | None = None  # time of the event loop
    trouble: str = ""
    change: Change | None = None


class RouterView(msgspec.Struct, frozen=True, kw_only=True):
    """The router's own state. Errors are requests that failed after all tries, by code."""

    model: str
    draining: bool
    running: int
    waiting: int
    trouble: str  # why no request can be served; empty while requests can be
    errors: dict[str, int]


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. What only the worker knows is None or empty until it has answered."""

    id: str
    url: str
    role: str
    up: bool
    leaving: bool
    trouble: str  # why it gets no requests
    not_seen: str  # why the last question about its figures has no answer
    answered_ago_s: float | None
    requests: int  # requests of this router that are there now
    tries: int
    prefix_hits: int
    version: str = ""
    incarnation: str = ""
    data_plane: str = ""
    draining: bool = False
    pool: Pool | None = None
    pages: dict[str, int] = {}
    cache: Cache | None = None
    quarantine_pages: int = 0
    quarantine_overdue_pages: int = 0
    quarantine_limit_pages: int = 0
    pinned_pages: int = 0
    rooms: dict[str, int] = {}
    running: int | None = None
    waiting: int | None = None
    bytes_moved: int | None = None
    tokens_per_s: float | None = None
    bytes_per_s: float | None = None
    hit_share: float | None = None
    ranks: tuple[Rank, ...] = ()
    peers: tuple[Peer, ...] = ()


class Half(msgspec.Struct, frozen=True):
    """One side of a room. It is stale if its worker did not answer the last question."""

    worker: str
    stale: bool
    phase: str
    ended: bool
    cause: str | None
    bytes_landed: int | None
    bytes_total: int | None


class RoomView(msgspec.Struct, kw_only=True):
    """Both halves of a room. The number is a text: JavaScript rounds integers above 2**53."""

    room: str
    request_id: str
    opened_ago_s: float | None
    prefill: Half | None = None
    decode: Half | None = None

    @property
    def open(self) -> bool:
        halves = (half for half in (self.prefill, self.decode) if half is not None)
        return any(not (half.ended or half.stale) for half in halves)


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One point of the plots. None stands for "no request in these seconds"."""

    at_unix_s: float
    tokens_per_s: float | None
    requests_per_s: float | None
    failed_per_s: float | None
    bytes_per_s: float | None
    first_token_p50_s: float | None
    first_token_p95_s: float | None
    inter_token_p50_s: float | None
    inter_token_p95_s: float | None
    transfer_p50_s: float | None
    transfer_p95_s: float | None
    running: int
    waiting: int
    quarantine_pages: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One look at everything."""

    interval_s: float
    window_s: float
    router: RouterView
    now: Point
    workers: tuple[WorkerView, ...]
    workers_left_out: int
    rooms: tuple[RoomView, ...]
    rooms_left_out: int


def worker_view(worker: Worker, trouble: str, seen: Seen, now_s: float) -> WorkerView:
    """Return the entry of one worker. `now_s` is the time of the event loop."""
    answered = None if seen.answered_at_s is None else round(now_s - seen.answered_at_s, 1)
    own: dict[str, Any] = {
        "id": worker.id,
        "url": worker.url,
        "role": worker.role,
        "up": worker.up,
        "leaving": worker.leaving,
        "trouble": trouble,
        "not_seen": seen.trouble,
        "answered_ago_s": answered,
        "requests": worker.running,
        "tries": worker.served,
        "prefix_hits": worker.prefix_hits,
    }
    info, change = seen.info, seen.change
    if info is None:
        return WorkerView(**own)
    moved = None if change is None else change.per_s(change.bytes_moved)
    return WorkerView(
        **own,
        version=info.version,
        incarnation=info.incarnation,
        data_plane=info.data_plane,
        draining=info.draining,
        pool=info.pool,
        pages=info.pages,
        cache=info.prefix_cache,
        quarantine_pages=info.quarantine_pages,
        quarantine_overdue_pages=info.quarantine_overdue_pages,
        quarantine_limit_pages=info.quarantine_limit_pages,
        pinned_pages=info.pinned_pages,
        rooms=info.rooms,
        running=info.running,
        waiting=info.waiting,
        bytes_moved=info.bytes_moved,
        tokens_per_s=None if change is None else change.per_s(change.tokens),
        bytes_per_s=moved,
        hit_share=_hit_share(info, change),
        ranks=info.ranks,
        peers=seen.peers,
    )


def _hit_share(info: Info, change: Change | None) -> float | None:
    """Return the cached share of the prompts, of the last seconds if there were any."""
    if change is not None and change.asked_tokens > 0:
        return round(change.hit_tokens / change.asked_tokens, 4)
    cache = info.prefix_cache
    return round(cache.hit_tokens / cache.asked_tokens, 4) if cache and cache.asked_tokens else None


def point(seen: Mapping[Worker, Seen], at_unix_s: float, running: int, waiting: int) -> Point:
    """Return the figures of all workers together.

    Both legs of a request count its tokens and its bytes, so each figure is taken from one role.
    """
    decodes = _changes(seen, "decode")
    prefills = _changes(seen, "prefill")
    figures: dict[str, float | None] = {}
    for name, source, changes in (
        ("first_token", "time_to_first_token_s", decodes),
        ("inter_token", "inter_token_s", decodes),
        ("transfer", "transfer_s", prefills),
    ):
        total = added(one.latencies[source] for one in changes if source in one.latencies)
        figures[f"{name}_p50_s"] = quantile(total, 0.5)
        figures[f"{name}_p95_s"] = quantile(total, 0.95)
    infos = [one.info for one in seen.values() if one.info is not None]
    return Point(
        at_unix_s=round(at_unix_s, 3),
        tokens_per_s=summed([one.per_s(one.tokens) for one in decodes]),
        requests_per_s=summed(
            [one.per_s(one.finished + one.failed + one.aborted) for one in decodes]
        ),
        failed_per_s=summed([one.per_s(one.failed) for one in decodes]),
        bytes_per_s=summed([one.per_s(one.bytes_moved) for one in prefills]),
        running=running,
        waiting=waiting,
        quarantine_pages=sum(info.quarantine_pages for info in infos),
        **figures,
    )


def _changes(seen: Mapping[Worker, Seen], role: str) -> list[Change]:
    return [
        one.change for worker, one in seen.items() if worker.role == role and one.change is not None
    ]


def merged_rooms(seen: Mapping[Worker, Seen]) -> tuple[tuple[RoomView, ...], int]:
    """Return the rooms of all workers, open ones first, and how many are left out."""
    found: dict[tuple[int, str], RoomView] = {}
    for worker, one in seen.items():
        for room in one.rooms:
            view = found.setdefault(
                (room.room, room.request_id),
                RoomView(
                    room=str(room.room),
                    request_id=room.request_id,
                    opened_ago_s=room.opened_ago_s,
                ),
            )
            _add(view, worker, room, stale=bool(one.trouble))
    open_first = sorted(found.values(), key=_order)
    return tuple(open_first[:MAX_SHOWN_ROOMS]), max(0, len(open_first) - MAX_SHOWN_ROOMS)


def _add(view: RoomView, worker: Worker, room: Room, *, stale: bool) -> None:
    half = Half(
        worker.url,
        stale,
        room.phase,
        room.ended,
        room.cause,
        room.bytes_landed,
        room.bytes_total,
    )
    if worker.role == "prefill":
        view.prefill = half
    else:
        view.decode = half
    if room.opened_ago_s is not None:
        view.opened_ago_s = max(view.opened_ago_s or 0.0, room.opened_ago_s)


def _order(view: RoomView) -> tuple[bool, float]:
    """Order open rooms by age, the oldest first, and ended ones with the latest first."""
    age_s = view.opened_ago_s or 0.0
    return (not view.open, -age_s if view.open else age_s)
