"""The machine of a room's pages at decode: who owns them, from the moment the room takes them (I1).

A room has one or two sets of pages. The target is the set that the room's user receives: pages from
the node's store, or the caller's own. Without staging, prefill ranks write into the target. With
staging, they write into a second set, an equal number of places in the staging pool, and decode
copies each chunk into the target. Each set has its own phase, and a table that depends on its
source.

A set that is no longer needed returns to its store when no rank can reach it. It first waits in
RETURNING while a thread still checksums or copies its pages (I13).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import msgspec

from kvflow.protocols.machines.tables import ERROR, IGNORE, Cell, Move, Table, rest


class PagePhase(IntEnum):
    NONE = 0  # the room has no pages yet
    TAKEN = 1  # the room has them, and no rank can reach them
    LENT = 2  # prefill ranks may write into them
    LANDED = 3  # every chunk landed, and the room's user may read them
    KEPT = 4  # the room's user passed them to another owner
    QUARANTINED = 5  # the room ended, and some rank may still write into them
    RETURNING = 6  # no rank can reach them; a thread may still use them
    FREED = 7
    ABANDONED = 8  # the node closed before proof arrived; a thread may still use them
    WITHHELD = 9  # back in the store, where the pool's quarantine keeps them until proof arrives


class PageKind(IntEnum):
    TAKE = 0  # the store allocated the pages, or holds the caller's own pages
    LEND = 1
    USE = 2  # a thread begins to checksum or copy them
    LAND = 3
    KEEP = 4
    CLOSE = 5  # the room's user closed the room after its success
    QUARANTINE = 6  # the room ended before its loans did
    FREE = 7  # the last loan ended, or no page was lent
    ABANDON = 8  # the node closed
    IDLE = 9  # no thread uses them


class PageCommand(IntEnum):
    RETURN = 0  # give them back to the store, or end the hold on the caller's own pages
    GIVE_TO_KEEPER = 1
    GIVE_TO_QUARANTINE = 2


class Source(IntEnum):
    """The place that the pages of a set come from."""

    STORE = 0
    OWN = 1  # the caller's own pages, which the store only holds
    STAGING = 2


P, K, C = PagePhase, PageKind, PageCommand
PageTable = Table[PagePhase, PageKind, PageCommand]
Rows = Mapping[PagePhase, Mapping[PageKind, Cell[PagePhase, PageCommand]]]

_STORE: Rows = {
    # A room that fails before its pages are taken has none to return.
    P.NONE: rest(K, ERROR)
    | {
        K.TAKE: Move(P.TAKEN),
        K.FREE: Move(P.FREED),
        K.ABANDON: Move(P.FREED),
    },
    P.TAKEN: rest(K, ERROR)
    | {
        K.LEND: Move(P.LENT),
        # The events below happen in rooms with staging, whose target no rank can reach. FREE also
        # happens in other rooms, which may fail between taking and lending.
        K.USE: Move(P.TAKEN),
        K.LAND: Move(P.LANDED),
        K.QUARANTINE: Move(P.RETURNING),
        K.FREE: Move(P.RETURNING),
        K.ABANDON: Move(P.RETURNING),
    },
    P.LENT: rest(K, ERROR)
    | {
        K.USE: Move(P.LENT),
        K.LAND: Move(P.LANDED),
        K.QUARANTINE: Move(P.QUARANTINED, (C.GIVE_TO_QUARANTINE,)),
        K.FREE: Move(P.RETURNING),
        K.ABANDON: Move(P.ABANDONED),
    },
    P.LANDED: rest(K, ERROR)
    | {
        K.KEEP: Move(P.KEPT, (C.GIVE_TO_KEEPER,)),
        K.CLOSE: Move(P.FREED, (C.RETURN,)),
        K.ABANDON: IGNORE,
    },
    P.KEPT: rest(K, ERROR) | {K.CLOSE: IGNORE, K.ABANDON: IGNORE},
    P.QUARANTINED: rest(K, ERROR)
    | {
        K.FREE: Move(P.RETURNING),
        K.ABANDON: Move(P.ABANDONED),
    },
    P.RETURNING: rest(K, IGNORE)
    | {
        K.TAKE: ERROR,
        K.LEND: ERROR,
        K.USE: ERROR,
        K.LAND: ERROR,
        K.KEEP: ERROR,
        K.IDLE: Move(P.FREED, (C.RETURN,)),
    },
    P.FREED: rest(K, ERROR)
    | {
        # The room ended while a custom store was still allocating the pages.
        K.TAKE: Move(P.FREED, (C.RETURN,)),
        # With staging, the target is freed before the loans end, and the staging pages before the
        # user closes the room, so these events may come late.
        K.FREE: IGNORE,
        K.CLOSE: IGNORE,
        K.ABANDON: IGNORE,
    },
    P.ABANDONED: rest(K, ERROR) | {K.IDLE: Move(P.WITHHELD, (C.RETURN,))},
    P.WITHHELD: rest(K, ERROR),
}

_OWN: Rows = {
    **_STORE,
    # The store ends its hold when the pages land, because the caller owned them all along.
    P.TAKEN: {**_STORE[P.TAKEN], K.LAND: Move(P.LANDED, (C.RETURN,))},
    P.LENT: {
        **_STORE[P.LENT],
        K.LAND: Move(P.LANDED, (C.RETURN,)),
        K.QUARANTINE: Move(P.QUARANTINED),
    },
    P.LANDED: {**_STORE[P.LANDED], K.KEEP: Move(P.KEPT), K.CLOSE: Move(P.FREED)},
}

_STAGING: Rows = {
    **_STORE,
    P.TAKEN: {**_STORE[P.TAKEN], K.USE: ERROR, K.LAND: ERROR},
    # Every chunk is copied to the target, so the staging pages are no longer needed.
    P.LENT: {**_STORE[P.LENT], K.LAND: Move(P.RETURNING)},
    P.LANDED: rest(K, ERROR),
    P.KEPT: rest(K, ERROR),
}

STORE: PageTable = Table(P, K, _STORE)
OWN: PageTable = Table(P, K, _OWN)
STAGING: PageTable = Table(P, K, _STAGING)
TABLES = {Source.STORE: STORE, Source.OWN: OWN, Source.STAGING: STAGING}

# Phases in which the room holds the pages of a set until FREE or ABANDON.
CLAIMED = frozenset({P.TAKEN, P.LENT, P.QUARANTINED})
# Phases in which none of the room's writes, checksums and copies touches the target any more.
SETTLED = frozenset({P.LANDED, P.KEPT, P.FREED})
_WAITING = (P.RETURNING, P.ABANDONED)  # waiting for the last thread that uses the pages
_OF_BOTH = frozenset({K.LAND, K.QUARANTINE, K.FREE, K.ABANDON, K.USE})


class Ownership(msgspec.Struct, frozen=True, gc=False):
    """The state of one room's pages: an immutable, hashable value."""

    target: PagePhase = P.NONE
    staging: PagePhase | None = None  # None for a room whose target is lent
    own: bool = False  # the target has the caller's own pages
    uses: int = 0  # checksums and copies in progress

    @property
    def claimed(self) -> bool:
        """True while the room holds the pages of some set until FREE or ABANDON."""
        return self.target in CLAIMED or self.staging in CLAIMED


Commands = tuple[tuple[Source, PageCommand], ...]


def step(
    pages: Ownership, kind: PageKind, source: Source | None = None
) -> tuple[Ownership, Commands]:
    """Return the next state and the commands to run, each with the source of the set it concerns.

    For TAKE, `source` states where the pages come from. The kind of any other event decides which
    sets it concerns.
    """
    target, staging, uses = pages.target, pages.staging, pages.uses
    own = pages.own or source is Source.OWN
    of_target = Source.OWN if own else Source.STORE
    commands: list[tuple[Source, PageCommand]] = []
    if kind is K.IDLE:
        uses -= 1
    else:
        of_both = kind in _OF_BOTH
        of_staging = staging is not None and (source is Source.STAGING or kind is K.LEND)
        if of_both or not of_staging:
            target = _moved(target, kind, of_target, commands)
        if staging is not None and (of_both or of_staging):
            staging = _moved(staging, kind, Source.STAGING, commands)
        uses += kind is K.USE
    if not uses:
        if target in _WAITING:
            target = _moved(target, K.IDLE, of_target, commands)
        if staging in _WAITING:
            staging = _moved(staging, K.IDLE, Source.STAGING, commands)
    return Ownership(target, staging, own, uses), tuple(commands)


def _moved(
    phase: PagePhase, kind: PageKind, source: Source, commands: list[tuple[Source, PageCommand]]
) -> PagePhase:
    move = TABLES[source].moves[phase, kind]
    if move is None:
        return phase
    commands += [(source, command) for command in move.commands]
    return move.phase
