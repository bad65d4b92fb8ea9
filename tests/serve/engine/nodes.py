"""A prefill and a decode engine in one process, over real nodes and the local plane."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from kvflow.aio import Threads
from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.limits import Timing
from kvflow.protocols.pages.layout import build_layout
from kvflow.protocols.wire.ranks import RankInfo
from kvflow.serve.cache.prefix import PrefixCache
from kvflow.serve.engine.model.load import LoadedModel
from kvflow.serve.engine.scheduler.decode import DecodeEngine
from kvflow.serve.engine.scheduler.prefill import PrefillEngine
from tests.serve.engine.pair import until

PAGE_SIZE, PAGES = 4, 64


class Nodes(NamedTuple):
    prefill: PrefillNode
    decode: DecodeNode
    sending: PrefillEngine
    landing: DecodeEngine


def locks_nothing(cache: PrefixCache) -> bool:
    return cache.stats().pages == cache.evictable_pages


@asynccontextmanager
async def nodes(
    model: LoadedModel,
    *,
    caches: bool = False,
    rendezvous_s: float = Timing().rendezvous_s,
    **options: Any,
) -> AsyncIterator[Nodes]:
    """Both nodes and engines; `options` are the prefill engine's. In the end nothing is left.

    Decode computes prompts without a room, too.
    """
    layout = build_layout(
        model.streams, page_size=PAGE_SIZE, num_pages=PAGES, fingerprint=model.fingerprint
    )
    async with AsyncExitStack() as stack:
        pools = [PagedPool.allocate(layout, shared=True) for _ in range(2)]
        threads = [stack.enter_context(Threads("model")) for _ in range(2)]
        found = [PrefixCache(pool.pages, PAGE_SIZE) if caches else None for pool in pools]
        for pool, cache in zip(pools, found, strict=True):
            stack.callback(pool.close)
            if cache is not None:
                stack.push_async_callback(cache.close)

        async def resolve(_: str) -> Sequence[RankInfo]:
            return [prefill.info]

        timing = Timing(rendezvous_s=rendezvous_s)
        prefill = PrefillNode(pools[0], "local", timing=timing)
        decode = DecodeNode(pools[1], "local", resolve=resolve)
        given = zip(pools, threads, found, strict=True)
        (source, first, before), (target, second, after) = given
        sending = PrefillEngine(model, source, source.pages, first, cache=before, **options)
        landing = DecodeEngine(
            model, target, target.pages, second, cache=after, local_prefill_chunk=PAGE_SIZE
        )
        for part in (prefill, decode, sending, landing):
            await part.start()
            stack.push_async_callback(part.close)
        yield Nodes(prefill, decode, sending, landing)
        await until(lambda: not (prefill.shell.endpoint.rooms or decode.shell.endpoint.rooms))
        for pool, cache in zip(pools, found, strict=True):
            if cache is not None:
                await until(functools.partial(locks_nothing, cache))
                cache.flush()
            await until(pool.pages.at_rest)
        assert not prefill.counts.handler_errors and not decode.counts.handler_errors
