"""A role over a worker's parts, without its HTTP server: node, engine and their memory."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from kvflow.http.listening import reachable
from kvflow.memory.staging import prefill_bytes
from kvflow.node import DecodeNode, PrefillNode
from kvflow.protocols.limits import Bounds, Timing
from kvflow.serve.config.settings import Settings
from kvflow.serve.http.engine_services import DecodeService, PrefillService
from kvflow.serve.http.group_service import ShardedDecodeService
from kvflow.serve.launch.caching import prefix_cache
from kvflow.serve.launch.parts import Parts, card_of, plane_of, staged
from kvflow.serve.launch.pool import check_host_memory, make_snapshots
from kvflow.serve.launch.tls import registry_tls
from kvflow.transports.control.curve import read_key
from kvflow.transports.control.registry import RegistryClient
from kvflow.transports.control.zmq import ZmqSocket, bind_router, connect_dealer

if TYPE_CHECKING:
    from kvflow.serve.cache.prefix import PrefixCache
    from kvflow.serve.engine.ranks.shard_leading import ShardLeader
    from kvflow.serve.engine.scheduler.decode import DecodeEngine
    from kvflow.serve.engine.scheduler.lockstep import Lockstep
    from kvflow.serve.engine.scheduler.prefill import PrefillEngine

Control = tuple[ZmqSocket, int]  # prefill's control socket and its port


def bind_control(settings: Settings) -> Control:
    """Bind prefill's control socket. Raises: MisuseError for a port in use or a bad key file."""
    key = read_key(settings.control_key_file)
    return bind_router(settings.host, settings.control_port, key, decodes=settings.max_decodes)


async def prefill_node(
    parts: Parts,
    settings: Settings,
    control: Control,
    stack: AsyncExitStack,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> PrefillNode:
    """Create a prefill's node, with staging if needed. `stack` closes it. Raises: MisuseError."""
    pool = parts.pool
    staging = await stack.enter_async_context(staged(settings, parts, prefill_bytes(pool.layout)))
    node = PrefillNode(
        pool,
        plane_of(settings, pool if staging is None else staging.host),
        host=settings.host,
        port=control[1],
        rank=rank,
        world_size=world_size,
        model=settings.model_name,
        timing=Timing(rendezvous_s=settings.rendezvous_s),
        bounds=Bounds(
            pinned_share=settings.max_pinned_share,
            targets=settings.max_decodes,
            decodes_per_address=settings.decodes_per_address,
        ),
        verify_transfers=settings.verify_transfers,
        staging=staging,
        advertise=reachable(settings.host),
        # The socket was bound before the model was loaded, to refuse a port in use early.
        bind=lambda _host, _port: control,
    )
    stack.push_async_callback(node.close)
    return node


def prefill_engine(
    parts: Parts,
    settings: Settings,
    cache: PrefixCache | None,
    *,
    lockstep: Lockstep | None = None,
    samples: bool = True,
) -> PrefillEngine:
    """Create a prefill's engine. `lockstep` and `samples` are for the first of several ranks."""
    from kvflow.serve.engine.scheduler.prefill import PrefillEngine

    model, pool, executor = parts
    return PrefillEngine(
        model,
        pool,
        pool.pages,
        executor,
        chunk_tokens=settings.chunked_prefill_size,
        max_batch_tokens=settings.max_batch_tokens,
        optimistic_tries=settings.optimistic_prefill,
        lockstep=lockstep,
        samples=samples,
        cache=cache,
        prefetch=settings.cache_prefetch_policy,
    )


@asynccontextmanager
async def prefill_over(
    parts: Parts, settings: Settings, control: Control
) -> AsyncGenerator[PrefillService, None]:
    """Yield the service of a prefill, which runs until the block ends. Raises: MisuseError."""
    card = card_of(settings, parts.model)
    async with AsyncExitStack() as stack:
        stack.callback(control[0].close)
        node = await prefill_node(parts, settings, control, stack)
        cache = await stack.enter_async_context(prefix_cache(settings, parts, computes=True))
        engine = prefill_engine(parts, settings, cache)
        await node.start()
        stack.push_async_callback(engine.close)
        await engine.start()
        yield PrefillService(card, node, engine, settings.request_timeout_s)


def check_decode(settings: Settings) -> None:
    """Check a decode's host memory and key before a model is loaded. Raises: MisuseError."""
    check_host_memory(settings)
    read_key(settings.control_key_file)


@asynccontextmanager
async def decode_over(parts: Parts, settings: Settings) -> AsyncGenerator[DecodeService, None]:
    """Yield the service of a decode, which runs until the block ends. Raises: MisuseError."""
    card = card_of(settings, parts.model)
    async with _decode_engine(parts, settings) as (node, engine):
        yield DecodeService(card, node, engine, settings.request_timeout_s)


@asynccontextmanager
async def sharded_decode_over(
    parts: Parts, settings: Settings, shards: ShardLeader
) -> AsyncGenerator[ShardedDecodeService, None]:
    """Do the same as `decode_over` for a decode whose steps also run on the other `shards`."""
    card = card_of(settings, parts.model)
    async with _decode_engine(parts, settings) as (node, engine):
        yield ShardedDecodeService(card, node, engine, settings.request_timeout_s, shards=shards)


@asynccontextmanager
async def _decode_engine(
    parts: Parts, settings: Settings
) -> AsyncGenerator[tuple[DecodeNode, DecodeEngine], None]:
    from kvflow.serve.engine.scheduler.decode import DecodeEngine

    model, pool, executor = parts
    key = read_key(settings.control_key_file)
    async with AsyncExitStack() as stack:
        staging = await stack.enter_async_context(staged(settings, parts, 0))
        snapshots = await executor.run(functools.partial(make_snapshots, settings, pool))
        if snapshots is not None:
            stack.push_async_callback(snapshots.close)
        node = DecodeNode(
            pool,
            plane_of(settings, pool if staging is None else staging.host),
            resolve=RegistryClient(settings.api_key, tls=registry_tls(settings)).resolve,
            connect=functools.partial(connect_dealer, key=key),
            bounds=Bounds(quarantine_share=settings.max_quarantine_share),
            verify_transfers=settings.verify_transfers,
            staging=staging,
        )
        stack.push_async_callback(node.close)
        cache = await stack.enter_async_context(prefix_cache(settings, parts))
        engine = DecodeEngine(
            model,
            pool,
            pool.pages,
            executor,
            max_batch=settings.max_running_requests,
            new_token_ratio=settings.new_token_ratio,
            snapshots=snapshots,
            recompute=settings.host_memory_full == "recompute",
            cache=cache,
            prefetch=settings.cache_prefetch_policy,
            local_prefill_chunk=settings.local_prefill_chunk,
        )
        await node.start()
        stack.push_async_callback(engine.close)
        await engine.start()
        yield node, engine
