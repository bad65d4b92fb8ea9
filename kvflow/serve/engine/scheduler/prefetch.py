"""The pages that the cache brings for one request before it begins, and how long the request waits.

Pages of a store come to the host while the request waits for something else anyway. Pages on the
host are copied to the device when it is the request's turn, and are locked from then on: copied
earlier, they would be evicted for requests whose turn comes first. With best_effort a request waits
for no store: it uses the pages that arrived from there by the time its turn comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from kvflow.aio import run_to_end
from kvflow.protocols.cache.choices import PrefetchPolicy
from kvflow.protocols.cache.hashes import Namespace
from kvflow.serve.cache.prefix import Prefix, PrefixCache, Tokens

T = TypeVar("T")
# These are the values of SGLang's hierarchical cache.
TIMEOUT_S, TIMEOUT_PER_TOKEN_S = 1.0, 0.00025


def patience_s(policy: PrefetchPolicy, tokens: int) -> float | None:
    """Return how long a request with a prompt of `tokens` waits for its pages alone, in seconds.

    None stands for as long as it takes.
    """
    return None if policy == "wait_complete" else TIMEOUT_S + tokens * TIMEOUT_PER_TOKEN_S


async def bring(
    cache: PrefixCache,
    policy: PrefetchPolicy,
    tokens: Tokens,
    most_tokens: int | None,
    namespace: Namespace,
    **how: Any,
) -> Prefix:
    """Run `PrefixCache.load`, with the options `how`, for as long as the policy waits.

    Returns the prefix that is there then, locked.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s(policy, len(tokens))):
            return await cache.load(tokens, most_tokens, namespace, **how)
    return cache.match(tokens, most_tokens, namespace)


async def fetch_beside(
    other: Awaitable[T],
    cache: PrefixCache,
    policy: PrefetchPolicy,
    tokens: Tokens,
    most_tokens: int | None,
    namespace: Namespace,
) -> T:
    """Wait for `other`, while the prompt's pages come from storage to the host.

    The wait for these pages alone is as long as the policy allows.

    Raises: what `other` raises.
    """
    limit_s = 0.0 if policy == "best_effort" else patience_s(policy, len(tokens))
    return await beside(cache.fetch(tokens, most_tokens, namespace), other, limit_s)


def begin_fetch(
    cache: PrefixCache | None, policy: PrefetchPolicy, tokens: Tokens, namespace: Namespace
) -> asyncio.Task[None] | None:
    """Start to fetch the prompt's pages from storage to the host, with best_effort.

    The task runs until it is cancelled or `stopped`; None where there is no such fetch.
    """
    if cache is None or not cache.has_host or policy != "best_effort":
        return None
    return asyncio.create_task(cache.fetch(tokens, namespace=namespace))


async def stopped(task: asyncio.Task[None] | None) -> None:
    """Cancel a task whose result is not needed, and drain it (I12)."""
    if task is not None:
        task.cancel()
        await run_to_end(asyncio.gather(task, return_exceptions=True))


async def beside(
    loading: Coroutine[Any, Any, None], other: Awaitable[T], limit_s: float | None
) -> T:
    """Wait for `other`, and at most `limit_s` longer for `loading`.

    `loading` ends before this returns or raises: if it is late, it is cancelled and drained.

    Raises: what `other` raises.
    """
    task = asyncio.create_task(loading)
    try:
        found = await other
        if not task.done():
            await asyncio.wait([task], timeout=limit_s)
    finally:
        await stopped(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error
    return found
