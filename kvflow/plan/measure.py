"""Measures a profile on a fleet of one prefill and one decode."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial

import numpy as np

from kvflow.memory.pool import PagedPool
from kvflow.node import DecodeNode, PrefillNode
from kvflow.plan.fleet import Played, Started, prompt_of, warm_up
from kvflow.plan.profile import Profile, Prompted, Sizes, Stepped
from kvflow.plan.trace import Request
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.layout import opaque_layout

BATCHES = (1, 2, 4, 8, 16, 32)
_SHORT_TOKENS = 32
_NEW_TOKENS, _FEW_TOKENS = 96, 3
_TURNS, _MOST_TURNS = 3, 5
_CLOSE = 1.05
_PAUSE_S = 0.3
_BURST = 24
_STREAMS = 4
_TRANSFER_BYTES = 64 << 20
_MOST_PAGES = 1 << 14
Say = Callable[[str], None]


async def measure(fleet: Started, plane: str, say: Say) -> Profile:
    """Measure times to first tokens, decode steps and transfers.

    Raises: KvflowError if the fleet does not answer, MisuseError if its pools are too small.
    """
    sizes, asker = fleet.sizes, _Asker(fleet)
    batches = batches_of(sizes)
    await warm_up(fleet)
    prompts = []
    for tokens in lengths_of(sizes):
        prompts.append(await _prompted(asker, tokens, 1))
        say(f"prompt of {tokens} tokens: {prompts[-1].seconds * 1e3:.1f} ms")
    for tokens, requests in groups_of(sizes):
        prompts.append(await _prompted(asker, tokens, requests))
        say(f"{requests} prompts of {tokens} at once: {prompts[-1].seconds * 1e3:.1f} ms")
    steps = [await _steps(asker, batch, _SHORT_TOKENS, sizes) for batch in batches]
    long = min(sizes.max_model_len // 2, sizes.decode_pool // 8 - _NEW_TOKENS)
    if long > 4 * (_SHORT_TOKENS + _NEW_TOKENS):
        steps.append(await _steps(asker, 4, long, sizes))
    for step in steps:
        say(f"decode step of {step.batch}, context {step.context:g}: {step.seconds * 1e3:.2f} ms")
    answer_s = await _answer_s(asker, steps[0].seconds)
    say(f"an answer beside its steps: {answer_s * 1e3:.1f} ms")
    beside = await _beside(asker, sizes)
    say(f"on one machine, prefill takes {beside[0]:.2f} times, and decode {beside[1]:.2f} times")
    bytes_s = await transfer_bytes_s(sizes, plane)
    say(f"transfer over {plane}: {bytes_s / 1e9:.2f} GB/s")
    about = fleet.about
    return Profile(
        model=about["model_path"],
        device=about["pool"]["device"],
        dtype=about["dtype"],
        sizes=sizes,
        prompts=prompts,
        steps=steps,
        answer_s=answer_s,
        transfer_bytes_s=bytes_s,
        beside_decode=beside[0],
        beside_prefill=beside[1],
    )


def batches_of(sizes: Sizes) -> list[int]:
    """Return the batches that decode runs at once. Raises: MisuseError if there are none."""
    each = _SHORT_TOKENS + _NEW_TOKENS
    most = min(sizes.max_running, sizes.decode_pool // each)
    if sizes.max_model_len < each or most < 1:
        raise MisuseError(
            f"plan measures with requests of {each} tokens: the decode pool holds "
            f"{sizes.decode_pool} tokens, and requests have {sizes.max_model_len} at most"
        )
    return [batch for batch in BATCHES if batch <= most]


def lengths_of(sizes: Sizes) -> list[int]:
    """Return prompts of a part of a chunk, of one, and of several."""
    chunk, most = sizes.chunk_tokens, min(sizes.max_model_len, sizes.prefill_pool) - 2
    wanted = (chunk // 16, chunk // 8, chunk // 4, chunk // 2, chunk, 2 * chunk, 4 * chunk, most)
    return sorted({tokens for tokens in wanted if 1 <= tokens <= min(most, 8 * chunk)})


def groups_of(sizes: Sizes) -> list[tuple[int, int]]:
    """Return the tokens and the number of prompts that are sent at once.

    They are short ones, and as many whole chunks as a step computes, if the pools hold them.
    """
    chunk = sizes.chunk_tokens
    chunks = min(max(2, sizes.batch_tokens // chunk), _BURST)
    found = [(_SHORT_TOKENS, _BURST)]
    if chunk < sizes.max_model_len and chunks * chunk < min(sizes.prefill_pool, sizes.decode_pool):
        found.append((chunk, chunks))
    return found


async def fastest_s(turn: Callable[[], Awaitable[float]]) -> float:
    """Return the shortest time of some turns: other processes disturbed that one least.

    More turns follow until the two shortest are close to each other.
    """
    found: list[float] = []
    while len(found) < _MOST_TURNS:
        found = sorted([*found, await turn()])
        if len(found) >= _TURNS and found[1] <= _CLOSE * found[0]:
            break
    return found[0]


class _Asker:
    """Sends prompts that no cache has."""

    def __init__(self, fleet: Started) -> None:
        self._fleet, self._numbers = fleet, itertools.count(1)

    async def at_once(self, lengths: list[int], new_tokens: int) -> list[Played]:
        found = [
            prompt_of(Request(0, tokens, new_tokens, (0,)), tokens, next(self._numbers))
            for tokens in lengths
        ]
        return await asyncio.gather(*(self._fleet.ask(ids, new_tokens) for ids in found))


async def _prompted(asker: _Asker, tokens: int, requests: int) -> Prompted:
    async def turn() -> float:
        # Requests of a trace find workers that rested, which compute their first step slower.
        await asyncio.sleep(_PAUSE_S)
        return max(one.first_s for one in await asker.at_once([tokens] * requests, 1))

    return Prompted(tokens, requests, await fastest_s(turn))


async def _steps(asker: _Asker, batch: int, tokens: int, sizes: Sizes) -> Stepped:
    """Return the time of a step while `batch` requests run at once."""
    new_tokens = min(_NEW_TOKENS, sizes.max_model_len - tokens)

    async def turn() -> float:
        answers = await asker.at_once([tokens] * batch, new_tokens)
        return statistics.median(_gap_s(one, new_tokens) for one in answers)

    return Stepped(batch, tokens + new_tokens / 2, await fastest_s(turn))


async def _answer_s(asker: _Asker, step_s: float) -> float:
    """Return what an answer takes from its first token to its end, beside its steps."""

    # Times from the beginning: a first token that comes late shortens what follows it.
    async def end_s(new_tokens: int) -> float:
        await asyncio.sleep(_PAUSE_S)
        return (await asker.at_once([_SHORT_TOKENS], new_tokens))[0].end_s

    single_s = await fastest_s(partial(end_s, 1))
    few_s = await fastest_s(partial(end_s, _FEW_TOKENS))
    return max(0.0, few_s - single_s - (_FEW_TOKENS - 1) * step_s)


def _gap_s(played: Played, new_tokens: int) -> float:
    return (played.end_s - played.first_s) / (new_tokens - 1)


async def _beside(asker: _Asker, sizes: Sizes) -> tuple[float, float]:
    """Return how much longer prefill and decode take while the other one is busy, as factors."""
    # Whole steps need more of what the roles share than a single chunk does.
    tokens, requests = groups_of(sizes)[-1]
    streamed = min(4 * _NEW_TOKENS, sizes.max_model_len - _SHORT_TOKENS)

    async def group() -> float:
        return max(one.first_s for one in await asker.at_once([tokens] * requests, 1))

    async def groups_until(over: asyncio.Event) -> list[float]:
        found = []
        while not over.is_set():
            found.append(await group())
        return found

    async def streams() -> float:
        answers = await asker.at_once([_SHORT_TOKENS] * _STREAMS, streamed)
        return statistics.median(_gap_s(one, streamed) for one in answers)

    ratios = []
    # Each turn compares what follows each other, for other processes come and go.
    for _ in range(_TURNS):
        alone_s, step_s = await group(), await streams()
        over = asyncio.Event()
        prompting = asyncio.create_task(groups_until(over))
        try:
            both_s = await streams()
        finally:
            over.set()
        firsts = await prompting
        # The last group ended beside nothing.
        ratios.append((statistics.median(firsts[:-1] or firsts) / alone_s, both_s / step_s))
    prefill, decode = map(statistics.median, zip(*ratios, strict=True))
    return max(1.0, prefill), max(1.0, decode)


async def transfer_bytes_s(sizes: Sizes, plane: str) -> float:
    """Return the bytes per second of one large room over a data plane, in one process."""
    page_bytes = sizes.token_bytes * sizes.page_size
    pages = max(1, min(_TRANSFER_BYTES // page_bytes, _MOST_PAGES))
    layout = opaque_layout(
        {"kv": page_bytes}, page_size=sizes.page_size, num_pages=pages, tag="plan"
    )
    prompt = np.zeros(pages * sizes.page_size, np.uint32)
    found = []
    with (
        closing(PagedPool.allocate(layout)) as source,
        closing(PagedPool.allocate(layout)) as target,
    ):
        async with (
            PrefillNode(source, plane=plane) as prefill,
            DecodeNode(target, plane=plane) as decode,
        ):
            for room in range(1, _TURNS + 2):
                async with (
                    prefill.room(room, prompt) as sending,
                    decode.room(room, [prefill.info], prompt) as receiving,
                ):
                    await sending.matched()
                    own = prefill.pages.take(pages, "plan")
                    begun_s = time.perf_counter()
                    sending.send(own, last=True)
                    await receiving.landed()
                    found.append(time.perf_counter() - begun_s)
                    await sending.done()
                    prefill.pages.give_back(own, "plan")
    # The first room touches new memory.
    return pages * page_bytes / min(found[1:])
