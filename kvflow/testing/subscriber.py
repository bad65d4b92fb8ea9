"""A subscriber to cache events, and an independent implementation of the hashes in them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from kvflow.protocols.cache.events import Cleared, Event, Stored, Tier


def digests_of_prompt(tokens: Iterable[int], page_size: int) -> list[bytes]:
    """Return the digest of every full page: SHA-256 of the previous digest and the page's tokens.

    The tokens are hashed as little-endian uint32.
    """
    ids, found, previous = list(tokens), list[bytes](), b""
    for start in range(0, len(ids) - page_size + 1, page_size):
        page = struct.pack(f"<{page_size}I", *ids[start : start + page_size])
        previous = hashlib.sha256(previous + page).digest()
        found.append(previous)
    return found


def block_hash(digest: bytes) -> int:
    """Return the number of a page in events: its digest's first 8 bytes, signed, big-endian."""
    return int.from_bytes(digest[:8], "big", signed=True)


class Subscriber:
    """The blocks in each tier, as a map from a block's hash to the hash of its parent."""

    def __init__(self) -> None:
        self.blocks: tuple[dict[int, int | None], ...] = ({}, {}, {})

    def replay(self, events: Iterable[Event]) -> None:
        """Apply events in order. Raises: AssertionError if they violate I10."""
        for event in events:
            if isinstance(event, Cleared):
                for held in self.blocks:
                    held.clear()
            elif isinstance(event, Stored):
                self._stored(event.tier, event.hashes, event.parent)
            else:
                self._removed(event.tier, event.hashes)

    def _stored(self, tier: Tier, hashes: list[int], parent: int | None) -> None:
        held = self.blocks[tier]
        for number in hashes:
            if parent is not None and parent not in held:
                raise _violation(tier, "a child is told of before its parent")
            if number in held:
                raise _violation(tier, "a page is told of twice")
            # Within one event each block is the parent of the next.
            held[number] = parent
            parent = number

    def _removed(self, tier: Tier, hashes: list[int]) -> None:
        held = self.blocks[tier]
        for number in hashes:
            if number not in held:
                raise _violation(tier, "a page is removed that was not told of")
            if number in held.values():
                raise _violation(tier, "a parent is removed before its child")
            del held[number]


def _violation(tier: Tier, text: str) -> AssertionError:
    return AssertionError(f"I10: {tier.name.lower()}: {text}")
