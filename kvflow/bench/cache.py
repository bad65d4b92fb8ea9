"""`kvflow bench cache`: CPU time and hit rate of the prefix index on a trace of prompts.

For each prompt, the benchmark takes the usual steps of a radix tree: it matches the prompt, locks
the path that was found, evicts as much as the rest needs, inserts the rest, and releases the lock.
With events, it then takes the index's events and encodes them for subscribers. Only the index runs,
without a pool or a model, and the clock is the CPU time of its thread. Tokens are prepared before
the clock starts. The peer is SGLang's compiled tree.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvflow.bench.cache_trace import Prompt
from kvflow.bench.figures import Say, quartiles
from kvflow.bench.peer import open_radix_peer
from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.hashes import token_bytes
from kvflow.protocols.cache.index import PrefixIndex
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.wire.kv_events import BatchEncoder

PARTS = ("match", "lock", "evict", "insert", "events")
# `radix_driver.py` repeats these sizes, because it cannot import kvflow.
SHAPE_PAGE_SIZE = 16
LEAVES, LEAF_TOKENS, EVICTIONS = 50_000, 32, 20
DEEP_TOKENS, DEPTH, MATCHES = 131_072, 1_024, 10
VOCABULARY = 1 << 17

Figures = dict[str, Any]
COMPARED = ("us_per_request", "evict_us", "deep_match_us")


class CachePlan(NamedTuple):
    """Parameters of `bench_cache`.

    `page_size` and `capacity_tokens` are in tokens. With `events`, KV events are encoded after
    every request. `peer` is the folder of the radix harness.
    """

    page_size: int = 64
    capacity_tokens: int = 3_000_000
    events: bool = False
    rounds: int = 3
    peer: str | None = None


async def bench_cache(prompts: Sequence[Prompt], plan: CachePlan, say: Say) -> Figures:
    """Measure the index, and the peer if the plan names one, in interleaved rounds.

    Returns medians over all rounds, and quartiles of the ratios within each round.

    Raises: MisuseError for a capacity below one page, or a peer that is not installed.
    """
    if plan.page_size < 1:
        raise MisuseError(f"--page-size {plan.page_size}: at least 1 token is needed")
    if plan.capacity_tokens < plan.page_size:
        raise MisuseError(
            f"--capacity-tokens {plan.capacity_tokens} is less than one page of {plan.page_size} "
            "tokens (--page-size)"
        )
    capacity = plan.capacity_tokens // plan.page_size
    asked: Figures = {"page_size": plan.page_size, "capacity": capacity, "events": plan.events}
    seen: dict[str, list[Figures]] = {"kvflow": [], "sglang": []}

    async def ours(**asked: Any) -> Figures:
        return await asyncio.to_thread(measure, prompts, **asked)

    sides: dict[str, Callable[..., Awaitable[Figures]]] = {"kvflow": ours}
    async with AsyncExitStack() as stack:
        if plan.peer:
            peer = await stack.enter_async_context(await open_radix_peer(plan.peer))
            await peer.ask("prompts", prompts=prompts)
            sides["sglang"] = partial(peer.ask, "measure")
        for turn in range(plan.rounds):
            # The order alternates, so that neither side always runs first.
            for side in list(sides)[:: 1 if turn % 2 else -1]:
                seen[side].append(summary(await sides[side](**asked)))
                told = ", ".join(f"{name} {seen[side][-1][name]:.1f}" for name in COMPARED)
                say(f"round {turn + 1}, {side}: {told}")
    report = {"plan": {**plan._asdict(), "requests": len(prompts)}, **middle(seen["kvflow"])}
    if plan.peer:
        rounds = list(zip(seen["kvflow"], seen["sglang"], strict=True))
        ratios = {name: [ours[name] / theirs[name] for ours, theirs in rounds] for name in COMPARED}
        report["ratio"] = {name: quartiles(ratio) for name, ratio in ratios.items()}
        report["sglang"] = middle(seen["sglang"])
    return report


def measure(prompts: Sequence[Prompt], page_size: int, capacity: int, events: bool) -> Figures:
    """Measure kvflow's index, and return figures with the same names as the peer's driver."""
    # Frozen, the millions of objects in `prompts` do not lengthen collections during the replay.
    gc.collect()
    gc.freeze()
    try:
        replayed = replay(prompts, page_size, capacity, events)
    finally:
        gc.unfreeze()
    return {**replayed, "evict_us": evict_us(), "deep_match_us": deep_match_us()}


def replay(
    prompts: Sequence[Prompt], page_size: int, capacity: int, events: bool = False
) -> Figures:
    """Replay `prompts` in a cache of `capacity` pages. A longer prompt is cached only in part.

    Returns the CPU seconds of every call, by part, and the share of tokens found in the cache.
    """
    index, encoder = PrefixIndex(page_size, events=events), BatchEncoder(page_size)
    match_s, lock_s, evict_s, insert_s, events_s = seconds = [list[float]() for _ in PARTS]
    clock = time.thread_time
    hits = total = held = 0
    for now_s, prompt in enumerate(prompts):
        ids = prompt.tokens()[: capacity * page_size]
        tokens, count = token_bytes(ids), len(ids) // page_size
        # The same page numbers serve for every prompt: the index does not interpret them.
        numbers = np.arange(count, dtype=np.int32)
        began_s = clock()
        found = index.match(tokens, now_s)
        matched_s = clock()
        have, end = len(found.device_pages), found.device_end
        if end is not None:
            index.lock(end)
        locked_s = clock()
        if (excess := held + count - have - capacity) > 0:
            evicting_s = clock()
            held -= len(index.evict(Tier.DEVICE, excess).device)
            evict_s.append(clock() - evicting_s)
        inserting_s = clock()
        index.insert(tokens, numbers[have:], now_s, shared=have)
        inserted_s = clock()
        if end is not None:
            index.unlock(end)
        lock_s.append(clock() - inserted_s + locked_s - matched_s)
        match_s.append(matched_s - began_s)
        insert_s.append(inserted_s - inserting_s)
        if events:
            taking_s = clock()
            if taken := index.take_events():
                encoder.encode(taken, now_s)
            events_s.append(clock() - taking_s)
        held += count - have
        hits += have
        total += prompt.num_tokens
    return {"seconds": dict(zip(PARTS, seconds, strict=True)), "hit_rate": hits * page_size / total}


def evict_us() -> float:
    """Return the CPU us per eviction of 32 tokens, from an index of 50,000 prompts of 32 tokens."""
    gc.collect()
    index, draw = PrefixIndex(SHAPE_PAGE_SIZE), random.Random(1)
    numbers = np.arange(LEAF_TOKENS // SHAPE_PAGE_SIZE, dtype=np.int32)
    for leaf in range(LEAVES):
        ids = [leaf] * SHAPE_PAGE_SIZE + [
            draw.randrange(VOCABULARY) for _ in range(LEAF_TOKENS - SHAPE_PAGE_SIZE)
        ]
        index.insert(token_bytes(ids), numbers, leaf)
    began_s = time.thread_time()
    for _ in range(EVICTIONS):
        index.evict(Tier.DEVICE, len(numbers))
    return (time.thread_time() - began_s) / EVICTIONS * 1e6


def deep_match_us() -> float:
    """Return the CPU us per match of 131,072 tokens that 1,024 growing prompts inserted."""
    gc.collect()
    index, draw = PrefixIndex(SHAPE_PAGE_SIZE), random.Random(1)
    tokens = token_bytes([draw.randrange(VOCABULARY) for _ in range(DEEP_TOKENS)])
    numbers = np.arange(DEEP_TOKENS // SHAPE_PAGE_SIZE, dtype=np.int32)
    step = len(numbers) // DEPTH
    for have in range(0, len(numbers), step):
        prefix = tokens[: (have + step) * len(tokens) // len(numbers)]
        index.insert(prefix, numbers[have : have + step], have, shared=have)
    assert index.match(tokens, len(numbers)).num_pages == len(numbers)
    began_s = time.thread_time()
    for turn in range(1, MATCHES + 1):
        index.match(tokens, len(numbers) + turn)
    return (time.thread_time() - began_s) / MATCHES * 1e6


def summary(figures: Figures) -> Figures:
    """Return `figures` with us per request and each part's spread in us, instead of seconds."""
    seconds: dict[str, list[float]] = figures["seconds"]
    parts = {
        part: spread([call_s * 1e6 for call_s in calls]) for part, calls in seconds.items() if calls
    }
    us = sum(map(sum, seconds.values())) / len(seconds["match"]) * 1e6
    rest = {name: value for name, value in figures.items() if name != "seconds"}
    return {"us_per_request": us, **rest, "parts_us": parts}


def spread(values: list[float]) -> Figures:
    p50, p99 = map(float, np.percentile(values, (50, 99)))
    return {"mean": sum(values) / len(values), "p50": p50, "p99": p99, "calls": len(values)}


def middle(rounds: list[Figures]) -> Figures:
    """Return the median of every figure over `rounds`, rounded to 4 decimals."""
    first = rounds[0]
    return {
        name: middle([figures[name] for figures in rounds])
        if isinstance(first[name], dict)
        else round(statistics.median(figures[name] for figures in rounds), 4)
        for name in first
    }
