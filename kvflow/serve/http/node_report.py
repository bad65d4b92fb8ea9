"""The part of a report that is a node's own."""

from __future__ import annotations

from collections.abc import Mapping

from kvflow.node import DecodeNode, PrefillNode
from kvflow.serve.http.completion_service import Report


def node_report(
    node: PrefillNode | DecodeNode,
    *,
    pages_free: int,
    pages_by_kind: Mapping[str, int],
    at_rest: bool,
) -> Report:
    """On the node's own loop. Who has which page, its engine knows."""
    return Report(
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
