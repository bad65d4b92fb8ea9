"""Waiting until a rank is ready: decode's half has arrived, and the fetch from storage is over."""

from __future__ import annotations

from kvflow.handlers.rooms import PrefillRoom
from kvflow.protocols.cache.choices import PrefetchPolicy
from kvflow.serve.cache.prefix import PrefixCache
from kvflow.serve.engine.ranks import wire
from kvflow.serve.engine.scheduler.prefetch import fetch_beside
from kvflow.serve.engine.scheduler.prefill_steps import most_cached


async def ready(
    cache: PrefixCache | None, prefetch: PrefetchPolicy, room: PrefillRoom, request: bytes
) -> None:
    """Wait until this rank is ready for `request`, an encoded `GroupPrompt`.

    Raises: the room's error.
    """
    if cache is None or not cache.has_host:
        await room.matched()
        return
    asked = wire.parse_prompt(request)
    most_tokens = most_cached(len(asked.tokens), asked.params)
    await fetch_beside(room.matched(), cache, prefetch, asked.tokens, most_tokens, asked.namespace)
