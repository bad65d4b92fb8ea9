"""The router's view of a worker's prefix cache.

It follows the cache events of a worker that publishes them. For any other worker, it assumes that
the cache has the prompts that the router sent there most recently.
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
    """The prompts of one request, as hash chains, and as block hashes if the tokens are known."""

    chains: list[Chain]
    blocks: dict[int, list[BlockHashes]]  # by block size in tokens


NO_PROMPTS = Prompts([], {})


class CacheView:
    """The router's view of one worker's cache. `name` appears in the log."""

    def __init__(self, name: str) -> None:
        self.prefixes = KnownPrefixes()
        self.feed: BlockFeed | None = None
        self._name = name

    @property
    def caches(self) -> bool:
        """True if the worker has a prefix cache."""
        return self.prefixes.limit_bytes > 0

    @property
    def block_size(self) -> int | None:
        """Tokens per block, or None while the worker's events are not followed."""
        return self.feed.source.block_size if self.feed is not None and self.feed.live else None

    def follow(self, source: Source | None) -> None:
        """Follow the events at `source`, or no events if it is None. Needs a running loop."""
        if self.feed is not None and self.feed.source != source:
            self.feed.stop()
            self.feed = None
        if source is not None and self.feed is None:
            self.feed = BlockFeed(self._name, source)

    async def close(self) -> None:
        if self.feed is not None:
            await self.feed.close()

    def matched(self, prompts: Prompts) -> int:
        """Return how many leading tokens, over all prompts, the worker has or will soon have."""
        size = self.block_size
        if size is not None and self.feed is not None and size in prompts.blocks:
            return size * sum(map(self.feed.blocks.matched, prompts.blocks[size]))
        return CHUNK_TOKENS * self.prefixes.matched(prompts.chains)

    def missing(self, prompts: Prompts) -> int:
        """Return about how many tokens, over all prompts, the worker has to compute.

        The incomplete block at the end of each prompt counts as a whole one.
        """
        size = self.block_size
        if size is not None and self.feed is not None and size in prompts.blocks:
            blocks = self.feed.blocks
            return size * sum(1 + len(one) - blocks.matched(one) for one in prompts.blocks[size])
        return self.prefixes.missing_tokens(prompts.chains)

    @contextmanager
    def expecting(self, prompts: Prompts) -> Iterator[None]:
        """Record that these prompts are being sent to the worker.

        Within the `with` block, their blocks count as cached. After it, events report them.
        """
        self.prefixes.note(prompts.chains)
        # A restart of the worker may replace `self.feed` with a feed that does not expect these.
        feed = self.feed
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
        """Forget all prompts, because the worker emptied its cache. Events update the feed."""
        self.prefixes.forget()

    def begin_anew(self) -> None:
        """Forget everything, because another process with another cache answers at this address."""
        self.forget()
        self.follow(None)
