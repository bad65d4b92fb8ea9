"""How much copies of pages slow down a model's decode steps, and how much steps slow down copies.

Steps of the demo model run in a thread, as in a decode. In each round they run alone, and then
together with each of these: a busy core that uses no memory, one large memcpy, copy-outs, and
restores. The memcpy is the cheapest way to move the same number of bytes. Steps and the other work
are timed alone and together. A figure is the time together divided by the time alone, from the same
round. The cost of a busy core shows a lack of cores. What a memcpy costs beyond that shows a lack
of memory bandwidth. What copies cost beyond a memcpy is kvflow's own cost.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import torch

from kvflow.memory.pool import PagedPool
from kvflow.protocols.pages.layout import build_layout
from kvflow.serve.demo_model import DEMO_MODEL_DIR
from kvflow.serve.engine.model.ahead import MOST_STEPS
from kvflow.serve.engine.model.load import LoadedModel, load_model
from kvflow.serve.engine.model.sequence import Sequence
from kvflow.serve.engine.model.step import Row

PAGE_SIZE, PROMPT_TOKENS, NEW_TOKENS = 16, 64, 128
Times = dict[str, list[float]]


class DecodeBatch:
    """Sequences that decode in a thread. When they are full, they start over from their prompts."""

    def __init__(self, model: LoadedModel, batch: int) -> None:
        """Compute the prompts of `batch` sequences.

        Raises: LayoutError if there is not enough memory.
        """
        each = -(-(PROMPT_TOKENS + NEW_TOKENS) // PAGE_SIZE)
        layout = build_layout(
            model.streams,
            page_size=PAGE_SIZE,
            num_pages=batch * each,
            num_rows=batch if model.has_rows else 0,
            fingerprint=model.fingerprint,
        )
        on_device = None if model.device.type == "cpu" else model.device
        self.pool = PagedPool.allocate(layout, shared=False, device=on_device)
        self._runner = model.runner(self.pool)
        scattered = (
            np.random.default_rng(1).permutation(batch * each).astype(np.int32).reshape(batch, each)
        )
        prompt = np.arange(PROMPT_TOKENS) % model.vocab_size
        self._sequences = [Sequence(i, prompt, NEW_TOKENS, PAGE_SIZE) for i in range(batch)]
        for sequence, pages in zip(self._sequences, scattered, strict=True):
            sequence.add_pages(pages)
        for row in range(layout.num_rows):
            self._sequences[row].rows = np.array([row], dtype=np.int32)
        self._append(
            self._runner.forward([Row(s, PROMPT_TOKENS) for s in self._sequences]), PROMPT_TOKENS
        )

    def steps_until(self, stop: threading.Event) -> list[float]:
        """Run steps until `stop` is set, at least one, and return the seconds of each."""
        seconds: list[float] = []
        while not (seconds and stop.is_set()):
            # The runner may compute this many steps in one call, so there must be room for them.
            if self._sequences[0].tokens.size - self._sequences[0].length < MOST_STEPS:
                for sequence in self._sequences:
                    sequence.computed, sequence.length = PROMPT_TOKENS, PROMPT_TOKENS + 1
            began_s = time.perf_counter()
            self._append(self._runner.forward([Row(s, 1) for s in self._sequences]), 1)
            seconds.append(time.perf_counter() - began_s)
        return seconds

    def _append(self, logits: torch.Tensor, computed: int) -> None:
        for sequence, token in zip(self._sequences, logits.argmax(dim=-1).tolist(), strict=True):
            sequence.computed += computed
            sequence.append(token)


async def make_batch(batch: int, device: str) -> DecodeBatch:
    """Return a batch of the demo model. Torch gets one CPU thread, as it does in a role."""
    torch.set_num_threads(1)
    return await asyncio.to_thread(
        lambda: DecodeBatch(load_model(str(DEMO_MODEL_DIR), device=device), batch)
    )


def keep_busy() -> float:
    """Keep one core busy without memory traffic and without the GIL, and return the seconds."""
    # hashlib releases the GIL for a block of this size, which stays in the core's cache.
    block, began_s = bytes(1 << 16), time.perf_counter()
    for _ in range(1 << 9):
        hashlib.sha256(block)
    return time.perf_counter() - began_s


class BesideSteps:
    """Times of decode steps and of other work, each alone and together with the other."""

    def __init__(self, steps: DecodeBatch, at_least_s: float) -> None:
        self._steps, self._at_least_s = steps, at_least_s
        # Keys name the work that runs during the steps. Each list has one figure per round.
        self._step_s: Times = {}
        self._slowest_s: Times = {}
        self._work_s: Times = {}
        self._alone_s: Times = {}

    async def quiet(self) -> None:
        async def wait() -> float:
            await asyncio.sleep(self._at_least_s)
            return self._at_least_s

        await self._steps_beside("quiet", wait)

    async def work(self, name: str, work: Callable[[], Awaitable[float]]) -> None:
        """Measure `work`, which returns its seconds: once alone, then repeatedly during steps."""
        self._alone_s.setdefault(name, []).append(await work())
        await self._steps_beside(name, work)

    async def _steps_beside(self, name: str, work: Callable[[], Awaitable[float]]) -> None:
        stop = threading.Event()
        stepping = asyncio.ensure_future(asyncio.to_thread(self._steps.steps_until, stop))
        took: list[float] = []
        try:
            while sum(took) < self._at_least_s:
                took.append(await work())
        finally:
            stop.set()
            seconds = await stepping
        self._work_s.setdefault(name, []).append(statistics.median(took))
        self._step_s.setdefault(name, []).append(statistics.fmean(seconds))
        self._slowest_s.setdefault(name, []).append(float(np.percentile(seconds, 99)))

    def report(self) -> dict[str, Any]:
        """Return the medians of times and ratios over the rounds."""
        quiet, slowest = self._step_s["quiet"], self._slowest_s["quiet"]
        found: dict[str, Any] = {"step_ms": statistics.median(quiet) * 1e3}
        for name, alone_s in self._alone_s.items():
            found[f"step_beside_{name}"] = _ratio(self._step_s[name], quiet)
            found[f"step_p99_beside_{name}"] = _ratio(self._slowest_s[name], slowest)
            found[f"{name}_beside_steps"] = _ratio(self._work_s[name], alone_s)
        return found


def _ratio(times_s: list[float], base_s: list[float]) -> float:
    return statistics.median(time_s / base for time_s, base in zip(times_s, base_s, strict=True))
