"""Loading cached pages for a request before it begins, and limiting how long the request waits for
them.

Pages in storage are fetched to the host while the request waits for something else anyway. Pages on
the host are copied to the device when it is the request's turn, and are locked from then on. If
they were copied earlier, they could be evicted for requests whose turn comes first. With the policy
best_effort, a request never waits for storage: when its turn comes, it uses the pages that were
fetched by then.
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
    """Return the limit on a request's wait for its pages, in seconds; None means no limit."""
    return None if policy == "wait_complete" else TIMEOUT_S + tokens * TIMEOUT_PER_TOKEN_S


async def bring(
    cache: PrefixCache,
    policy: PrefetchPolicy,
    tokens: Tokens,
    most_tokens: int | None,
    namespace: Namespace,
    **how: Any,
) -> Prefix:
    """Load a prompt's cached pages to the device, for as long as the policy allows.

    `how` are further arguments of `PrefixCache.load`. Returns the prefix that is on the device
    afterwards, locked.
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
    """Wait for `other`, and meanwhile fetch the prompt's pages from storage to the host.

    If `other` is done first, wait for the pages as long as the policy allows.

    Raises: what `other` or the fetch raises.
    """
    limit_s = 0.0 if policy == "best_effort" else patience_s(policy, len(tokens))
    return await beside(cache.fetch(tokens, most_tokens, namespace), other, limit_s)


def begin_fetch(
    cache: PrefixCache | None, policy: PrefetchPolicy, tokens: Tokens, namespace: Namespace
) -> asyncio.Task[None] | None:
    """Start fetching the prompt's pages from storage to the host, if the policy is best_effort.

    Returns the task, or None for other policies or without a host cache. Pass the result to
    `stopped` when the fetch is no longer needed.
    """
    if cache is None or not cache.has_host or policy != "best_effort":
        return None
    return asyncio.create_task(cache.fetch(tokens, namespace=namespace))


async def stopped(task: asyncio.Task[None] | None) -> None:
    """Cancel a task whose result is not needed, and wait for its end (I12)."""
    if task is not None:
        task.cancel()
        await run_to_end(asyncio.gather(task, return_exceptions=True))


async def beside(
    loading: Coroutine[Any, Any, None], other: Awaitable[T], limit_s: float | None
) -> T:
    """Wait for `other`, and then at most `limit_s` seconds for `loading`.

    `loading` has ended when this returns or raises. If it takes too long, it is cancelled and
    drained.

    Raises: what `other` or `loading` raises.
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
