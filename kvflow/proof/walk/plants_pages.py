"""Bugs in the ownership of decode's pages, each of which the exhaustive walk must find."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from kvflow.proof.sim.swap import swapped_cells, swapped_item
from kvflow.proof.walk.plants_tables import TINY, Install, Plant
from kvflow.protocols.commands import FreePages
from kvflow.protocols.decode import core as decode_core
from kvflow.protocols.machines import ownership
from kvflow.protocols.machines.decode_room import DecodeCommand
from kvflow.protocols.machines.ownership import PageCommand, PageKind, PagePhase, Source
from kvflow.protocols.machines.tables import IGNORE, Move

_RETURN = Move(PagePhase.FREED, (PageCommand.RETURN,))


def _cells(source: Source, changes: dict[tuple[PagePhase, PageKind], Any]) -> Install:
    return lambda: swapped_cells(ownership.TABLES[source], changes)


_end = decode_core._RUN[DecodeCommand.END]


def _ends_earlier(core: Any, record: Any, now: float) -> None:
    _end(core, record, now)
    ledger = core.ledger
    for writer in core.earlier.writers.values():
        for grant in ledger.grants_of(writer):
            if ledger.find(writer, grant).room == record.room:
                core.outbox.append(FreePages(grant))


def _earlier_ended() -> AbstractContextManager[object]:
    return swapped_item(decode_core._RUN, DecodeCommand.END, _ends_earlier)


PAGES: tuple[Plant, ...] = (
    Plant(
        "page freed while staged copy runs",
        "places of staging return when the last loan ends, whatever still copies them",
        _cells(Source.STAGING, {(PagePhase.LENT, PageKind.FREE): _RETURN}),
        "I13",
        TINY._replace(staged=True, checksums=1, aborts=1),
    ),
    Plant(
        "kept pages freed twice",
        "the close of a room whose pages its user kept gives them back",
        _cells(Source.STORE, {(PagePhase.KEPT, PageKind.CLOSE): _RETURN}),
        "I1",
        TINY._replace(user=True),
    ),
    Plant(
        "refused room keeps pages",
        "a room that is refused goes on holding its caller's pages",
        _cells(Source.OWN, {(PagePhase.TAKEN, PageKind.FREE): IGNORE}),
        "I1",
        TINY._replace(own_pages=True, aborts=1),
    ),
    Plant(
        "quarantine skipped for own pages",
        "pages of the caller's own are let go although a rank may still write into them",
        _cells(Source.OWN, {(PagePhase.LENT, PageKind.QUARANTINE): Move(PagePhase.RETURNING)}),
        "I2",
        TINY._replace(own_pages=True, doubts=1),
    ),
    Plant(
        "inherited loan freed with its room",
        "a room ends, and with it what an earlier decode lent for a room of the same number",
        _earlier_ended,
        "I2",
        TINY._replace(earlier=True, aborts=1),
    ),
)
