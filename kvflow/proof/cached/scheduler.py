"""Scheduler with prefix caches: it uses the cached pages of prompts, and caches the others."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress

import numpy as np

from kvflow.aio import in_thread
from kvflow.handlers.rooms import DecodeRoom, PrefillRoom
from kvflow.node import DecodeNode, PrefillNode
from kvflow.proof.cached.node_cache import NodeCache
from kvflow.proof.cached.texts import Texts
from kvflow.proof.sim.engine import Job, opened
from kvflow.proof.sim.pages import books_of
from kvflow.proof.sim.variety import PAGE_SIZE
from kvflow.protocols.errors import Code, KvflowError
from kvflow.protocols.pages.layout import PageIndices
from kvflow.serve.cache.prefix import Prefix

# Share of requests after which every evictable page is reclaimed.
PRESSED = 0.15
MAKE_ROOM_S, MAKE_ROOM_TURNS = 0.5, 50
# Longest time that a request waits for its pages to be fetched or loaded.
LOAD_S = 0.15
# Longest time that a request then waits for its turn, while others evict pages that are not locked.
MOST_TURN_S = 0.05


class CachingScheduler:
    """Scheduler that starts every job immediately, and uses the cache of the job's node.

    The cache keeps only the pages of rooms that succeeded.
    """

    def __init__(
        self, texts: Texts, caches: dict[int, NodeCache], counts: Counter[str], rng: random.Random
    ) -> None:
        """Use `caches`, which maps the `id()` of a node to its cache."""
        self._texts, self._caches, self._counts, self._rng = texts, caches, counts, rng
        # Number of pages that open jobs need beyond their prefixes, by the `id()` of the node.
        self._promised: Counter[int] = Counter()

    async def prefill(self, node: PrefillNode, job: Job) -> None:
        if job.refused:
            return node.refuse(job.room, job.cause(Code.CAPACITY, "the engine will not have it"))
        mine, prompt, owner = self._caches[id(node)], np.array(job.prompt), object()
        total = -(-len(job.prompt) // PAGE_SIZE)
        async with node.room(job.room, job.prompt, deadline_s=job.deadline_s) as room:
            job.close = room.close
            await self._fetch(mine, job.prompt, len(job.prompt) - 1)
            had = await room.matched()
            async with self._found(mine, job.prompt, len(job.prompt) - 1) as prefix:
                cached = kept = int(prefix.pages.size)
                node.pool.pages.reclaim(total - cached)
                try:
                    own = node.pages.take_room((total - cached,), owner)
                except KvflowError as error:
                    room.close(error.cause())
                    raise
                pages = np.concatenate([prefix.pages, own])
                try:
                    sent, at = -(-had // PAGE_SIZE), 0
                    for number, count in enumerate(self._chunks(job, total)):
                        if number == job.fails_at:
                            # This is a method, so that a planted bug can replace it.
                            kept = self.engine_failed(node, job, room, pages, owner, prefix)
                            return None
                        at += count
                        first = max(at - count, cached)
                        await in_thread(self._model_step(node, job, pages, first, at))
                        last = at == total
                        if last or at > sent:
                            handoff = job.handoff if last else b""
                            room.send(pages[sent:at], last=last, handoff=handoff)
                            sent = max(at, sent)
                    await room.done()
                    mine.check(prefix, job.prompt, "after use")
                    kept = mine.cache.keep(prompt, pages, owner, prefix)
                    self._press(node)
                    job.succeeded = True
                finally:
                    node.pages.give_back(pages[kept:], owner)
        return None

    async def decode(self, node: DecodeNode, job: Job) -> None:
        if job.refused:
            cause = job.cause(Code.CAPACITY, "decode will not have it")
            return node.refuse(job.room, job.ranks(), cause)
        mine, prompt = self._caches[id(node)], np.array(job.prompt)
        async with AsyncExitStack() as stack:
            prefix = await stack.enter_async_context(self._found(mine, job.prompt, len(job.prompt)))
            stack.enter_context(self._promise(node, job, prefix))
            await self._make_room(node)
            room = await opened(node, job, prefix.tokens)
            try:
                async with room:
                    await room.landed()
                    await self._generate(node, job, room, prefix, prompt)
            except KvflowError:
                self.room_failed(node, job, room, prefix)
                raise
        return None

    async def _generate(
        self, node: DecodeNode, job: Job, room: DecodeRoom, prefix: Prefix, prompt: np.ndarray
    ) -> None:
        mine, owner, kept = self._caches[id(node)], object(), 0
        own, cached = room.keep(owner), int(prefix.pages.size)
        try:
            await asyncio.sleep(job.kept_s)
            mine.check(prefix, job.prompt, "after use")
            pages = np.concatenate([prefix.pages, own])
            kept = mine.cache.keep(prompt, pages, owner, prefix) - cached
            self._press(node)
            job.succeeded = True
        finally:
            node.pages.give_back(own[kept:], owner)

    # --- what must not be kept: bugs are planted here

    def room_failed(self, node: DecodeNode, job: Job, room: DecodeRoom, prefix: Prefix) -> None:
        """Count the room. The cache must not keep its pages: a writer may still reach them."""
        self._counts["rooms that failed"] += 1

    def engine_failed(
        self,
        node: PrefillNode,
        job: Job,
        room: PrefillRoom,
        pages: PageIndices,
        owner: object,
        prefix: Prefix,
    ) -> int:
        """Close the room, and return the size of the prefix, whose pages the cache owns.

        The cache must not keep the other pages: some of them were perhaps never computed.
        """
        room.close(job.cause(Code.ENGINE_ERROR, "the engine broke down"))
        return int(prefix.pages.size)

    # --- parts of both

    def _press(self, node: PrefillNode | DecodeNode) -> None:
        """Reclaim every evictable page now and then, while copies of new pages may still run."""
        if self._rng.random() < PRESSED:
            node.pool.pages.reclaim(node.pool.pages.available_pages)

    async def _fetch(self, mine: NodeCache, prompt: list[int], most_tokens: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOAD_S):
                await mine.cache.fetch(np.array(prompt), most_tokens)

    async def _load(self, mine: NodeCache, prompt: list[int], most_tokens: int) -> Prefix:
        """Load pages of a prompt for at most `LOAD_S`, then lock and return its cached prefix."""
        tokens = np.array(prompt)
        try:
            async with asyncio.timeout(LOAD_S):
                return await mine.cache.load(tokens, most_tokens)
        except TimeoutError:
            self._counts["loads that took too long"] += 1
        return mine.cache.match(tokens, most_tokens)

    @asynccontextmanager
    async def _found(
        self, mine: NodeCache, prompt: list[int], most_tokens: int
    ) -> AsyncIterator[Prefix]:
        self._texts.add(prompt)
        prefix = await self._load(mine, prompt, most_tokens)
        try:
            await asyncio.sleep(self._rng.uniform(0, MOST_TURN_S))
            mine.cache.count(len(prompt), prefix)
            self._counts["prompts"] += 1
            self._counts["cached pages used"] += int(prefix.pages.size)
            mine.check(prefix, prompt, "when found")
            yield prefix
        finally:
            prefix.release()

    @contextmanager
    def _promise(self, node: DecodeNode, job: Job, prefix: Prefix) -> Iterator[None]:
        """Count the pages that a job needs, so that `_make_room` frees enough for all jobs."""
        wanted = -(-len(job.prompt) // PAGE_SIZE) - int(prefix.pages.size)
        self._promised[id(node)] += wanted
        try:
            yield
        finally:
            self._promised[id(node)] -= wanted

    async def _make_room(self, node: DecodeNode) -> None:
        """Reclaim pages until enough are free for all open jobs of the node.

        With write_back, evicted pages become free only after they are copied.
        """
        pages, cache = node.pool.pages, self._caches[id(node)].cache
        for _ in range(MAKE_ROOM_TURNS):
            wanted = min(self._promised[id(node)], pages.available_pages)
            if pages.reclaim(wanted) >= wanted or not cache.busy:
                return
            await asyncio.sleep(MAKE_ROOM_S / MAKE_ROOM_TURNS)

    @staticmethod
    def _chunks(job: Job, total: int) -> list[int]:
        counts = list(job.chunks)
        if sum(counts) != total:
            text = f"room {job.room}: chunks of {counts} pages for a prompt of {total}"
            raise AssertionError(text)
        return counts

    def _model_step(
        self, node: PrefillNode, job: Job, pages: PageIndices, first: int, end: int
    ) -> Callable[[], None]:
        """Return a function that computes pages `first` to `end` (exclusive). Call it in a thread.

        All pages before `end` count as in use from now until the function returns.
        """
        books, digests = books_of(node.pages), self._texts.add(job.prompt)
        for page in pages[:end].tolist():
            books.readers[page] += 1

        def compute() -> None:
            for index in range(first, end):
                books.bytes.fill(int(pages[index]), digests[index], 0)
            for page in pages[:end].tolist():
                books.readers[page] -= 1

        return compute
