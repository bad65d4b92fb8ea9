"""A subscriber that knows only the contract, and an independent computation of its hashes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

from kvflow.protocols.cache.events import Cleared, Event, Stored


def digest_chain(ids: Iterable[int], page_size: int, previous: bytes = b"") -> list[bytes]:
    """Page hashes as the wire has them, computed from nothing of kvflow's."""
    tokens, digests = list(ids), []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = tokens[start : start + page_size]
        previous = hashlib.sha256(previous + struct.pack(f"<{page_size}I", *page)).digest()
        digests.append(previous)
    return digests


def block_hash(digest: bytes) -> int:
    number = int(digest.hex()[:16], 16)
    return number - (1 << 64) if number >= 1 << 63 else number


class Subscriber:
    """Which blocks are where. Everything a stream must not do is an assertion."""

    def __init__(self, media: Sequence[str] = ("GPU", "CPU", "STORAGE")) -> None:
        # To the parent's hash.
        self.blocks: dict[str, dict[int, int | None]] = {medium: {} for medium in media}
        self.num_stored = 0

    def stored(self, medium: str, hashes: list[int], parent: int | None) -> None:
        held = self.blocks[medium]
        self.num_stored += 1
        assert hashes, "an event of no blocks"
        for number in hashes:
            assert parent is None or parent in held, f"{medium}: a child before its parent"
            assert number not in held, f"{medium}: stored twice"
            held[number] = parent
            parent = number

    def removed(self, medium: str, hashes: list[int]) -> None:
        held = self.blocks[medium]
        for number in hashes:
            assert number not in held.values(), f"{medium}: a parent was removed before its child"
            del held[number]

    def cleared(self) -> None:
        for held in self.blocks.values():
            held.clear()

    def replay(self, events: Iterable[Event]) -> None:
        mediums = list(self.blocks)
        for event in events:
            if isinstance(event, Cleared):
                self.cleared()
            elif isinstance(event, Stored):
                self.stored(mediums[event.tier], event.hashes, event.parent)
            else:
                self.removed(mediums[event.tier], event.hashes)

    def content(self) -> list[set[int]]:
        return [set(held) for held in self.blocks.values()]
