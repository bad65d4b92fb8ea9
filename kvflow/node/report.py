"""The report of a node about its state, cheap enough to be taken every second."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.waiting import Waits
from kvflow.protocols.wire.ranks import PoolShape
from kvflow.telemetry.counters import TransferMeasures


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Pages, rooms, peers and transfers of one node, whatever engine it serves."""

    incarnation: int
    control_endpoint: str
    data_plane: str
    fingerprint: str = ""  # that of the model whose KV the pool holds
    pool: PoolShape
    pool_bytes: int  # rows included
    pool_dtype: str
    pool_device: str
    pages_free: int
    pages_total: int
    pages_by_kind: dict[str, int] = {}
    pages_at_rest: bool  # rows and lent staging included
    rows_free: int = 0
    rows_total: int = 0  # 0: the model keeps no state once per request
    rows_by_kind: dict[str, int] = {}
    staging_waits: Waits | None = None
    quarantine_pages: int = 0
    quarantine_overdue_pages: int = 0
    quarantine_limit_pages: int = 0  # with more overdue, new requests are refused
    pinned_pages: int = 0
    pinned_limit_pages: int = 0  # above it for one decode, its requests are refused
    peers_by_phase: dict[str, int] = {}
    peers_declared_dead: int = 0
    rooms_by_state: dict[str, int] = {}
    rooms_ended: dict[str, int] = {}
    # The key is the stage ("bootstrap", "transfer", "engine") and the cause's code.
    rooms_failed: dict[tuple[str, str], int] = {}
    requests_refused: dict[str, int] = {}  # refused before they had a room, by the cause's code
    # The live object, which is filled further after the report.
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
    """Report on `node`; call it on the node's own loop.

    The engine passes what only it knows: which pages are free, and whose the others are.
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
        staging_waits=node.staging_waits,
        quarantine_pages=node.quarantined_pages,
        quarantine_overdue_pages=node.overdue_pages,
        quarantine_limit_pages=node.quarantine_limit,
        pinned_pages=node.pinned_pages,
        pinned_limit_pages=node.pinned_limit,
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
