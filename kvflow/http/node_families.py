"""Prometheus families for the memory and the transfers of a node, whatever its engine is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvflow.http.families import Figure, each, histograms, labelled

if TYPE_CHECKING:
    from kvflow.node.report import NodeReport

_GAUGES: tuple[Figure, ...] = (
    ("pool_pages", "Pages of the KV pool.", "pages_total"),
    ("pool_bytes", "Bytes of the KV pool, its rows included."),
    (
        "quarantine_pages",
        "Pages in quarantine: lent, and no proof yet that their writer has ended.",
    ),
)
# In a pool of several spaces, these have a sample for each space, since each has its own limit.
_BY_SPACE: tuple[tuple[str, str, str], ...] = (
    (
        "quarantine_overdue_pages",
        "Pages in quarantine whose writer is in doubt, or has not answered in time that it has "
        "ended.",
        "quarantine_overdue",
    ),
    (
        "quarantine_limit_pages",
        "Overdue pages in quarantine above which new requests are refused.",
        "quarantine_limit",
    ),
    (
        "pinned_pages",
        "Pages at prefill that writes of rooms that have ended still read: their decode does not "
        "take them.",
        "pinned",
    ),
    (
        "pinned_limit_pages",
        "Pinned pages of one decode above which its new requests are refused.",
        "pinned_limit",
    ),
)
_COUNTERS: tuple[Figure, ...] = (
    ("peers_declared_dead", "Prefills that an operator has declared dead."),
    ("transfer_bytes", "KV bytes that have landed.", "bytes_moved"),
    ("chunks_mismatched", "Chunks whose checksum after landing differs from the one sent."),
)
_TRANSFERS: tuple[Figure, ...] = (
    ("bootstrap_seconds", "From opening a room until the other side is ready."),
    ("allocation_seconds", "From then until decode has pages to offer."),
    ("transfer_seconds", "From the first chunk (decode: the offer) to the last."),
    ("room_bytes", "KV bytes of a room.", "transfer_bytes"),
    ("transfer_bytes_per_second", "Of a room's transfer."),
)


def node_families(report: NodeReport) -> Iterator[Metric]:
    """Yield the families for the memory and the transfers in `report`."""
    yield from _memory(report)
    yield from _rooms(report)


def _memory(report: NodeReport) -> Iterator[Metric]:
    pages = GaugeMetricFamily("kvflow_pages", "Pages of the KV pool by owner.", labels=["owner"])
    yield labelled(pages, {"free": report.pages_free, **report.pages_by_kind})
    # Only models with one state per request, such as a recurrent state, have rows.
    if report.rows_total:
        rows = GaugeMetricFamily(
            "kvflow_rows", "State rows of the pool by owner; a request has one.", labels=["owner"]
        )
        yield labelled(rows, {"free": report.rows_free, **report.rows_by_kind})
        row = ("pool_rows", "State rows of the pool.", "rows_total")
        yield from each(GaugeMetricFamily, "kvflow_", report, row)
    yield from each(GaugeMetricFamily, "kvflow_", report, *_GAUGES)
    for name, text, of_space in _BY_SPACE:
        if report.spaces:
            by_space = GaugeMetricFamily(f"kvflow_{name}", text, labels=["space"])
            yield labelled(by_space, {s.name: getattr(s, of_space) for s in report.spaces})
        else:
            yield from each(GaugeMetricFamily, "kvflow_", report, (name, text))
    if (waits := report.staging_waits) is not None:
        text = (
            "Rooms that wait for pages of staging; stuck ones want more than there is without what "
            "is in quarantine."
        )
        counts = GaugeMetricFamily("kvflow_staging_waiting_rooms", text, labels=["state"])
        yield labelled(
            counts, {"queued": waits.rooms - waits.stuck_rooms, "stuck": waits.stuck_rooms}
        )
        text = "For how long the oldest room has waited for pages of staging."
        yield GaugeMetricFamily("kvflow_staging_waiting_seconds", text, value=waits.oldest_s)


def _rooms(report: NodeReport) -> Iterator[Metric]:
    peers = GaugeMetricFamily("kvflow_peers", "Nodes of the other role by phase.", labels=["phase"])
    yield labelled(peers, report.peers_by_phase)
    rooms = GaugeMetricFamily("kvflow_rooms", "Open rooms by state.", labels=["state"])
    yield labelled(rooms, report.rooms_by_state)
    ended = CounterMetricFamily(
        "kvflow_rooms_ended", "Rooms that have ended, by how.", labels=["ending"]
    )
    yield labelled(ended, report.rooms_ended)
    failed = CounterMetricFamily(
        "kvflow_rooms_failed",
        "Rooms that have failed, and not because their client left, by where and why.",
        labels=["phase", "reason"],
    )
    for (phase, reason), count in report.rooms_failed.items():
        failed.add_metric([phase, reason], count)
    yield failed
    yield from each(CounterMetricFamily, "kvflow_", report, *_COUNTERS)
    dropped = CounterMetricFamily(
        "kvflow_messages_dropped", "Control messages that changed nothing.", labels=["why"]
    )
    yield labelled(dropped, report.messages_dropped)
    errors = CounterMetricFamily(
        "kvflow_internal_errors", "Internal errors that the process survived.", labels=["where"]
    )
    yield labelled(errors, report.internal_errors)
    if report.transfers is not None:
        for name, text, *field in _TRANSFERS:
            found = getattr(report.transfers, *field or [name])
            yield histograms(f"kvflow_{name}", text, {(): found})
