"""Bounded worlds for the walk over decode, prefill and their links. Each answers one question."""

from __future__ import annotations

from typing import NamedTuple

from kvflow.proof.walk.plants_tables import ONE
from kvflow.proof.walk.world import Bounds


class Named(NamedTuple):
    text: str
    bounds: Bounds


_QUIET = Bounds(
    chunks=1, in_flight=2, drops=0, duplicates=0, crashes=0, aborts=0, doubts=0, silences=0
)
"""A world of one room without faults. Most others change a few of its bounds."""

_STAGED = _QUIET._replace(doubts=1, aborts=1, checksums=1, staged=True, user=True)
_SPACES = _QUIET._replace(chunks=2, fills=((1, 0), (1, 1)), doubts=1, aborts=1)
_OWN_PAGES = _QUIET._replace(doubts=1, aborts=1, own_pages=True, user=True)

RANKS_ENDED = Bounds(
    ranks=2, in_flight=3, drops=1, duplicates=0, doubts=0, silences=0, restarts=False, patient=True
)

WORLDS: dict[str, Named] = {
    "pair": Named(
        "one room of one pair, every fault; decode is patient", Bounds(restarts=False, patient=True)
    ),
    "ranks": Named(
        "three machines, three chunks; the link loses a message and brings one twice",
        Bounds(
            ranks=2, in_flight=3, drops=1, duplicates=1, doubts=0, silences=0, crashes=0, aborts=0
        ),
    ),
    "ranks-ended": Named(
        "three machines, three chunks, one of them crashes, either side aborts; decode is patient",
        RANKS_ENDED,
    ),
    "registration": Named(
        "Register is lost, repeated, refused; prefill's data plane stalls",
        _QUIET._replace(drops=1, duplicates=1, silences=1, registered=False, refusals=1),
    ),
    "redial": Named(
        "a link is given up and dialled again; two rooms, and no message is lost",
        _QUIET._replace(in_flight=3, silences=1, patient=True, registered=False, rooms=(1, 2)),
    ),
    "restart": Named(
        "another life of prefill answers at the same address; two rooms, the registry may be late",
        _QUIET._replace(crashes=1, registered=False, rooms=(1, 2)),
    ),
    "displaced": Named(
        "a silent decode loses its place at prefill to another, and comes back",
        _QUIET._replace(drops=1, doubts=1, silences=2, others=1, targets=1),
    ),
    "eviction": Named(
        "only one ended grant is remembered",
        _QUIET._replace(duplicates=1, doubts=1, closed_grants=1, rooms=(1, 2)),
    ),
    "checksums": Named(
        "chunks are verified: checksums agree, differ, cannot be computed, come late",
        _QUIET._replace(chunks=2, drops=1, aborts=1, verify=True, checksums=1),
    ),
    "staged": Named(
        "chunks are copied from staging, copies end late; the room's user keeps or closes",
        _STAGED._replace(chunks=2, crashes=1),
    ),
    "own-pages": Named(
        "rooms bring pages of their caller's, and are refused, end in doubt, land",
        _OWN_PAGES._replace(crashes=1, silences=1, leaves=1),
    ),
    "shutdown": Named(
        "either side leaves in the middle",
        _QUIET._replace(doubts=1, leaves=2, crashes=1, registered=False),
    ),
    "declared": Named(
        "an operator declares prefill dead: it is, or is only silent",
        _QUIET._replace(doubts=1, silences=1, declares=1, crashes=1),
    ),
    "no-fence": Named(
        "a data plane that never proves a death",
        _QUIET._replace(doubts=1, silences=1, fences=False, crashes=1, aborts=1),
    ),
    "earlier": Named(
        "a decode closed over this pool has lent pages to the same prefill, and its write may land "
        "at any time",
        _QUIET._replace(silences=1, crashes=1, earlier=True),
    ),
    "again": Named(
        "the same room id again, under a later grant", _QUIET._replace(drops=1, rooms=(1, 1))
    ),
    "rooms": Named("two rooms of one pair", _QUIET._replace(aborts=1, rooms=(1, 2), patient=True)),
    "announced": Named(
        "announced long before pages are offered, withdrawn, refused",
        _QUIET._replace(drops=1, duplicates=1, aborts=1, doubts=1, silences=1, announce=True),
    ),
    "quarantine": Named(
        "pages in doubt keep the next room out",
        _QUIET._replace(doubts=1, aborts=1, announce=True, rooms=(1, 2), quarantine_share=0.0),
    ),
    "prefix": Named(
        "the whole prompt is at decode already",
        _QUIET._replace(
            chunks=0, drops=1, duplicates=1, silences=1, crashes=1, aborts=1, announce=True
        ),
    ),
    "steps": Named(
        "one room or loan is dealt with at a time, messages come in between",
        _QUIET._replace(drops=1, silences=1, aborts=1, step_by_step=True),
    ),
    "order": Named(
        "writes end in any order", _QUIET._replace(chunks=3, doubts=1, aborts=1, out_of_order=True)
    ),
    "spaces": Named(
        "pools of two spaces; one chunk has a page of the first, one of the second, one of both",
        _SPACES._replace(
            chunks=3,
            fills=((1, 0), (0, 1), (1, 1)),
            in_flight=3,
            drops=1,
            crashes=1,
            restarts=False,
        ),
    ),
    "small-pair": Named("one room, few faults", ONE),
    "small-earlier": Named(
        "an earlier decode's loan, few faults",
        _QUIET._replace(silences=1, crashes=1, earlier=True, restarts=False),
    ),
    "small-staged": Named("one chunk is copied from staging, and its thread may hang", _STAGED),
    "small-own-pages": Named("pages of the caller's own, few faults", _OWN_PAGES),
    "small-ranks": Named("three machines, one chunk", _QUIET._replace(ranks=2, aborts=1)),
    "small-spaces": Named(
        "pools of two spaces: a chunk of one of them, and one that completes both, are verified",
        _SPACES._replace(verify=True, checksums=1),
    ),
}

SETS: dict[str, tuple[str, ...]] = {
    "full": (*(name for name in WORLDS if not name.startswith(("small", "redial"))), "redial"),
    "wide": ("ranks", "ranks-ended"),
    "small": (
        *("small-pair", "small-ranks", "registration", "checksums", "shutdown", "declared"),
        *("announced", "order", "small-earlier", "small-staged", "small-own-pages"),
        "small-spaces",
    ),
}
"""Sets of worlds by name. The test suite walks `small`."""
