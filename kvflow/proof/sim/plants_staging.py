"""Planted bugs of decodes with staging: places that return too early, rooms whose turn never
comes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from kvflow.handlers.decode import DecodeShell
from kvflow.handlers.verify import ChunkVerifier
from kvflow.proof.sim.swap import swapped
from kvflow.protocols import waiting
from kvflow.protocols.pages.layout import PageIndices
from kvflow.protocols.ports import Arrivals

Installed = AbstractContextManager[object]


class _Unheld:
    """Arrivals whose places are not held while they are copied."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.begin, self.lent = arrivals.begin, self

    def hold(self, pages: PageIndices) -> None: ...

    def unhold(self, pages: PageIndices) -> None: ...


def given_back_before_the_copy_ended() -> Installed:
    original = ChunkVerifier.begin

    def begin(verifier: ChunkVerifier, *arguments: Any) -> None:
        if verifier._arrivals is None:
            return original(verifier, *arguments)
        with swapped(verifier, "_arrivals", _Unheld(verifier._arrivals)):
            return original(verifier, *arguments)

    return swapped(ChunkVerifier, "begin", begin)


def waiting_rooms_not_woken() -> Installed:
    return swapped(DecodeShell, "_lend_waiting", DecodeShell.run)


def large_rooms_always_passed() -> Installed:
    return swapped(waiting, "PASSED_FOR_S", float("inf"))


PLANTS = (
    (
        "staging given back before the copy ended",
        "nothing holds places of staging while they are copied to the room's own pages",
        given_back_before_the_copy_ended,
        "I13",
    ),
    (
        "rooms that wait for staging are not woken",
        "places of staging come back, and the rooms that wait for them are not looked at",
        waiting_rooms_not_woken,
        "I7",
    ),
    (
        "a large room is passed for ever",
        (
            "rooms that fit into what is free of the staging go before one that does not, however "
            "long that one has waited"
        ),
        large_rooms_always_passed,
        "I7",
    ),
)
