"""A worker's prefix cache, created from its settings: tiers behind the pool, and a publisher."""

from __future__ import annotations

import errno
import functools
import logging
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from kvflow.http.listening import reachable
from kvflow.memory.available import available_memory
from kvflow.protocols.cache.addresses import is_loopback
from kvflow.protocols.cache.stream import StreamLimits
from kvflow.protocols.errors import LayoutError, MisuseError
from kvflow.protocols.pages.layout import PoolLayout
from kvflow.protocols.wire.kv_events import media_of
from kvflow.serve.cache.host import HostTier
from kvflow.serve.cache.prefix import PrefixCache
from kvflow.serve.cache.publisher import EventPublisher
from kvflow.serve.cache.states import StateStore
from kvflow.serve.cache.storage.file import FileBackend
from kvflow.serve.cache.storage.guarded import GuardedStorage
from kvflow.serve.cache.storage.identity import identity_of
from kvflow.serve.cache.storage.mooncake import MooncakeBackend
from kvflow.serve.cache.storage.port import Backend
from kvflow.serve.cache.stored import StorageTier
from kvflow.serve.config.catalog import FIELDS, flag_of
from kvflow.serve.config.kv_events import KvEvents
from kvflow.serve.config.settings import Settings
from kvflow.serve.launch.parts import Parts
from kvflow.transports.control.curve import read_key

_log = logging.getLogger("kvflow.serve")
T = TypeVar("T")


def check_cache(settings: Settings) -> None:
    """Check the cache settings that can be checked before a model is loaded.

    Raises: MisuseError for too little memory, a port in use, or a key file without a key.
    """
    available = available_memory()
    if available is not None and settings.cache_host_bytes > available.size_bytes:
        raise MisuseError(f"--cache-host-bytes {settings.cache_host_bytes}: {available}")
    read_key(settings.kv_events_key_file)
    config = KvEvents.parse(settings.kv_events_config) if settings.kv_events_config else None
    for address in () if config is None else (config.endpoint, config.replay_endpoint or ""):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if port.isdecimal() and _is_taken(
            "0.0.0.0" if host == "*" else host.strip("[]"), int(port)
        ):
            raise MisuseError(f"--kv-events-config: {address} is in use")


def _is_taken(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            # ZeroMQ also accepts the name of an interface, which this bind does not.
            return error.errno == errno.EADDRINUSE
    return False


@asynccontextmanager
async def prefix_cache(
    settings: Settings, parts: Parts, *, computes: bool = False, ranks: int = 1
) -> AsyncGenerator[PrefixCache | None, None]:
    """Yield the prefix cache of a worker's pool. After the block, all pages of the cache are free.

    Yield None if the settings turn the cache off, or if the worker cannot have one and no setting
    asks for it. The latter case is logged. `computes` is True for a worker that computes prompts,
    which may have to continue from a state. `ranks` is the number of the worker's ranks, each of
    which has its own cache.

    Raises: MisuseError if a setting asks for a cache that the worker cannot have, there is not
    enough host memory, or a port is in use.
    """
    has_states = computes and parts.pool.layout.num_rows > 0
    if settings.prefix_cache == "off" or not _can_cache(
        settings, parts, of_states=has_states and ranks > 1
    ):
        yield None
        return
    if (
        computes
        and not has_states
        and settings.cache_state_bytes != FIELDS["cache_state_bytes"].default
    ):
        given = settings.cache_state_bytes
        _log.warning(
            "--cache-state-bytes %d: %s keeps no states, it has no effect",
            given,
            settings.model_name,
        )
    config = KvEvents.parse(settings.kv_events_config) if settings.kv_events_config else None
    host, states, storage = await _tiers(settings, parts, has_states=has_states)
    if has_states and states is None:
        yield None
        return
    policy = "lru" if settings.prefix_cache == "auto" else settings.prefix_cache
    cache = PrefixCache(
        parts.pool.pages,
        parts.pool.layout.page_size,
        policy,
        host=host,
        write_policy=settings.cache_write_policy,
        events=config is not None,
        storage=storage,
        states=states,
    )
    try:
        if config is not None:
            cache.publisher = _publisher(config, settings, cache)
        yield cache
    finally:
        try:
            await cache.close()
        finally:
            if cache.publisher is not None:
                # The publisher closes last: it must still publish that the cache is empty.
                await cache.publisher.close()


async def _tiers(
    settings: Settings, parts: Parts, *, has_states: bool
) -> tuple[HostTier | None, StateStore | None, StorageTier | None]:
    host = await _host_tier(settings, parts)
    states: StateStore | None = None
    try:
        if has_states:
            most = parts.pool.layout.num_pages + (0 if host is None else host.pages.capacity)
            states = await _states(settings, parts, most)
        storage = await _storage_tier(settings, host, has_states=has_states)
    except BaseException:
        for memory in (host, states):
            if memory is not None:
                memory.close()
        raise
    return host, states, storage


def _can_cache(settings: Settings, parts: Parts, *, of_states: bool) -> bool:
    obstacle = ""
    if parts.model.whole_prompts:
        obstacle = "computes every prompt as a whole"
    elif of_states:
        obstacle = (
            "keeps a state for each request, which the ranks of a prefill (--pp, --tp) do not cache"
        )
    if not obstacle:
        return True
    model = f"{settings.model_name} ({parts.model.model_type}) {obstacle}"
    if asked := _asked_for(settings):
        raise MisuseError(f"{asked}: {model}; leave it out")
    _log.info("prefixes are not cached: %s", model)
    return False


def _asked_for(settings: Settings) -> str:
    if settings.prefix_cache != "auto":
        return f"--prefix-cache {settings.prefix_cache}"
    for name in ("cache_host_bytes", "cache_state_bytes", "kv_events_config"):
        if (value := getattr(settings, name)) != FIELDS[name].default:
            return f"{flag_of(name)} {value}"
    return ""


async def _allocated(parts: Parts, allocate: Callable[[], T], setting: str) -> T:
    try:
        return await parts.executor.run(allocate)
    except (LayoutError, MisuseError) as error:
        raise MisuseError(f"{setting}: {error}") from None


async def _host_tier(settings: Settings, parts: Parts) -> HostTier | None:
    if not (size := settings.cache_host_bytes):
        return None
    return await _allocated(
        parts, functools.partial(HostTier, parts.pool, size), f"--cache-host-bytes {size}"
    )


async def _states(settings: Settings, parts: Parts, most: int) -> StateStore | None:
    size = settings.cache_state_bytes
    allocate = functools.partial(StateStore, parts.pool, size, most)
    try:
        return await _allocated(parts, allocate, f"--cache-state-bytes {size}")
    except MisuseError as error:
        if _asked_for(settings):
            raise
        _log.warning("prefixes are not cached: %s", error)
        return None


async def _storage_tier(
    settings: Settings, host: HostTier | None, *, has_states: bool
) -> StorageTier | None:
    if settings.l3 == "off" or host is None:
        return None
    if has_states:
        _log.warning(
            "--l3 %s: this prefill leaves it out: prompts of %s go on from states, and states are "
            "not stored",
            settings.l3,
            settings.model_name,
        )
        return None
    if settings.l3 == "file":
        where = f"--l3-dir {settings.l3_dir}"
    else:
        where = f"--mooncake-master {settings.mooncake_master}"
    try:
        return StorageTier(await GuardedStorage.open(_backend(settings, host.memory.layout)), host)
    except (MisuseError, OSError) as error:
        raise MisuseError(f"--l3 {settings.l3} {where}: {error}") from None


def _backend(settings: Settings, layout: PoolLayout) -> Backend:
    identity = identity_of(layout)
    if settings.l3 == "file":
        return FileBackend(settings.l3_dir, identity, layout.page_bytes, settings.l3_bytes)
    return MooncakeBackend(
        settings.mooncake_master,
        identity,
        layout.page_bytes,
        host=reachable(settings.host),
        lent_bytes=settings.mooncake_global_segment_size,
        metadata_server=settings.mooncake_metadata_server,
        local_bytes=settings.mooncake_local_buffer_size,
    )


def _publisher(config: KvEvents, settings: Settings, cache: PrefixCache) -> EventPublisher:
    key = read_key(settings.kv_events_key_file)
    media = media_of(config.dialect, shared_storage=settings.l3 == "mooncake")
    try:
        publisher = EventPublisher(
            cache,
            cache.page_size,
            address=config.endpoint,
            replay_address=config.replay_endpoint,
            topic=config.topic,
            positional=config.positional,
            media=media,
            key=key,
            limits=StreamLimits(kept_batches=config.buffer_steps),
            # Numbers grow across restarts, so that subscribers notice a gap and request a replay.
            first_seq=time.time_ns() // 1_000_000 << 16,
        )
    except MisuseError as error:
        raise MisuseError(f"--kv-events-config: {error}") from None
    _log.info("events of the prefix cache at %s", publisher.address)
    bound = [
        address for address in (publisher.address, publisher.replay_address) if address is not None
    ]
    if key is None and not all(map(is_loopback, bound)):
        _log.warning(
            "cache events hold prompts, and other machines can read them without a key at %s; give "
            "--kv-events-key-file, or bind them to the loopback",
            " and ".join(bound),
        )
    return publisher
