"""A report of a node's state. It is cheap enough to be made every second."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.waiting import Waits
from kvflow.protocols.wire.ranks import PoolShape
from kvflow.telemetry.counters import TransferMeasures


class SpaceReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures about one space of a pool that has several; see `Space`."""

    name: str
    places: int  # pages or rows
    place_bytes: int
    quarantine: int
    quarantine_overdue: int
    # With more overdue places than this, new requests are refused.
    quarantine_limit: int
    pinned: int
    # New rooms of a decode are refused while it pins more places than this.
    pinned_limit: int


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Figures about the pages, rooms, peers and transfers of one node, whatever its engine."""

    incarnation: int
    control_endpoint: str
    data_plane: str
    fingerprint: str = ""  # identifies the model of the KV in the pool
    pool: PoolShape
    pool_bytes: int  # including rows
    pool_dtype: str
    pool_device: str
    pages_free: int
    pages_total: int
    pages_by_kind: dict[str, int] = {}
    # True while every page and row of the pool and the staging is free, reserved or evictable.
    pages_at_rest: bool
    rows_free: int = 0
    # 0 if the model has no state per request.
    rows_total: int = 0
    rows_by_kind: dict[str, int] = {}
    # Empty if the pool has one space. `pages_*` are about the first space with pages, and `rows_*`
    # about the first with rows.
    spaces: tuple[SpaceReport, ...] = ()
    staging_waits: Waits | None = None
    # The figures of quarantine and pinning count the places of all spaces. Each space has a limit
    # of its own, and these are the sums.
    quarantine_pages: int = 0
    quarantine_overdue_pages: int = 0
    # With more overdue pages than this, new requests are refused.
    quarantine_limit_pages: int = 0
    pinned_pages: int = 0
    # New rooms of a decode are refused while it pins more pages than this.
    pinned_limit_pages: int = 0
    peers_by_phase: dict[str, int] = {}
    peers_declared_dead: int = 0
    rooms_by_state: dict[str, int] = {}
    rooms_ended: dict[str, int] = {}
    # Keys are the stage ("bootstrap", "transfer" or "engine") and the code of the cause.
    rooms_failed: dict[tuple[str, str], int] = {}
    # Requests that were refused before they had a room, by the code of the cause.
    requests_refused: dict[str, int] = {}
    # The node's live object: it keeps changing after the report is made.
    transfers: TransferMeasures | None = None
    bytes_moved: int = 0
    chunks_mismatched: int = 0
    messages_dropped: dict[str, int] = {}
    internal_errors: dict[str, int] = {}


def node_report(
    node: PrefillNode | DecodeNode,
    *,
    pages_free: int,
    pages_by_kind: Mapping[str, int],
    at_rest: bool,
) -> NodeReport:
    """Return a report on `node`. Call it on the node's event loop.

    The engine passes what only it knows: the number of free pages, the number of pages for each
    kind of owner, and whether its stores are at rest.
    """
    return NodeReport(
        incarnation=node.incarnation,
        control_endpoint=node.control,
        data_plane=node.plane.name,
        fingerprint=node.pool.layout.fingerprint,
        pool=node.shape,
        pool_bytes=node.pool.layout.size_bytes,
        pool_dtype=node.pool.layout.dtypes,
        pool_device=node.pool.device,
        pages_free=pages_free,
        pages_total=node.pool.layout.num_pages,
        pages_by_kind=dict(pages_by_kind),
        pages_at_rest=at_rest,
        spaces=_spaces(node),
        staging_waits=node.staging_waits,
        quarantine_pages=node.quarantined_pages,
        quarantine_overdue_pages=node.overdue_pages,
        quarantine_limit_pages=node.quarantine_limit,
        pinned_pages=node.pinned_pages,
        pinned_limit_pages=sum(node.pinned_limits),
        peers_by_phase=node.peers_by_phase(),
        peers_declared_dead=node.counts.declared_dead,
        rooms_by_state=node.rooms_by_phase(),
        rooms_ended=dict(node.counts.endings),
        rooms_failed={
            (where, str(code)): count for (where, code), count in node.counts.failures.items()
        },
        requests_refused={str(code): count for code, count in node.counts.refusals.items()},
        transfers=node.counts.transfers,
        bytes_moved=node.counts.bytes_moved,
        chunks_mismatched=node.counts.mismatched,
        messages_dropped=node.counts.dropped,
        internal_errors={"handler": node.counts.handler_errors},
    )


def _spaces(node: PrefillNode | DecodeNode) -> tuple[SpaceReport, ...]:
    layout, ledger = node.pool.layout, node.shell.endpoint.core.ledger
    if len(layout.spaces) == 1:
        return ()
    pinned, limits = node.pinned, node.pinned_limits
    return tuple(
        SpaceReport(
            name=space.name,
            places=space.count,
            place_bytes=layout.place_bytes[i],
            quarantine=ledger.quarantined[i],
            quarantine_overdue=ledger.overdue[i],
            quarantine_limit=ledger.quarantine_limit[i],
            pinned=pinned[i],
            pinned_limit=limits[i],
        )
        for i, space in enumerate(layout.spaces)
    )
