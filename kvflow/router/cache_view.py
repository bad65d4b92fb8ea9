"""What is known of a worker's prefix cache: by its events where it publishes them, else by what it
was sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kvflow.router.blocks import BlockHashes
from kvflow.router.feed import BlockFeed, Source
from kvflow.router.prefixes import KnownPrefixes
from kvflow.router.prompts import CHUNK_TOKENS, Chain


class Prompts(NamedTuple):
    """The prompts of one request, by what stands in its body, and by their blocks where their
    tokens are known.
    """

    chains: list[Chain]
    blocks: dict[int, list[BlockHashes]]  # by tokens per block


NO_PROMPTS = Prompts([], {})


class CacheView:
    """One worker's. `name` is for the log."""

    def __init__(self, name: str) -> None:
        self.prefixes = KnownPrefixes()
        self.feed: BlockFeed | None = None
        self._name = name

    @property
    def caches(self) -> bool:
        """Whether the worker has a prefix cache."""
        return self.prefixes.limit_bytes > 0

    @property
    def block_size(self) -> int | None:
        """In tokens, of a worker whose events are followed now."""
        return self.feed.source.block_size if self.feed is not None and self.feed.live else None

    def follow(self, source: Source | None) -> None:
        """Its events come from there, or it publishes none. Only on a running loop."""
        if self.feed is not None and self.feed.source != source:
            self.feed.stop()
            self.feed = None
        if source is not None and self.feed is None:
            self.feed = BlockFeed(self._name, source)

    async def close(self) -> None:
        if self.feed is not None:
            await self.feed.close()

    def matched(self, prompts: Prompts) -> int:
        """How many tokens these prompts begin with that the worker has, or is about to have, over
        all of them.
        """
        size = self.block_size
        if size is not None and self.feed is not None and size in prompts.blocks:
            return size * sum(map(self.feed.blocks.matched, prompts.blocks[size]))
        return CHUNK_TOKENS * self.prefixes.matched(prompts.chains)

    @contextmanager
    def expecting(self, prompts: Prompts) -> Iterator[None]:
        """The worker is sent these prompts: until they are answered it is about to have them."""
        self.prefixes.note(prompts.chains)
        feed = self.feed  # which may be another one by then
        if feed is None or (hashes := prompts.blocks.get(feed.source.block_size)) is None:
            yield
            return
        for one in hashes:
            feed.blocks.expect(one)
        try:
            yield
        finally:
            for one in hashes:
                feed.blocks.settle(one)

    def forget(self) -> None:
        """Its cache is empty, which its events say by themselves."""
        self.prefixes.forget()

    def begin_anew(self) -> None:
        """It is another process, and its cache another one."""
        self.forget()
        self.follow(None)
