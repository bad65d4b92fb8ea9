"""Measures of completions as their clients see them: latencies, lengths and outcomes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvflow.http.families import REQUEST_SECONDS
from kvflow.serve.http.completion_service import GenerationRequest
from kvflow.telemetry.histogram import Histogram
from kvflow.telemetry.requests import CURRENT, NO_REQUEST, name_rooms

INTER_TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04),
    *(0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
TOKEN_COUNTS = (
    *(1, 10, 30, 100, 300, 500, 700, 1000, 1500, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000),
    *(10000, 12500, 15000, 17500, 20000, 22500, 25000, 27500, 30000, 35000, 40000, 60000, 80000),
    *(100000, 200000, 300000, 400000, 600000, 800000, 1000000, 1100000),
)
THROUGHPUT_WINDOW_S = 10


class Throughput:
    """Rate in tokens per second over the last `THROUGHPUT_WINDOW_S` whole seconds."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()  # (second, tokens in it)

    def add(self, tokens: int, now: float) -> None:
        second = int(now)
        if self._seconds and self._seconds[-1][0] == second:
            second, before = self._seconds.pop()
            tokens += before
        self._seconds.append((second, tokens))
        if len(self._seconds) > THROUGHPUT_WINDOW_S + 1:
            self._seconds.popleft()

    def per_second(self, now: float) -> float:
        this = int(now)
        # The current second is not over and would pull the rate down, so it is left out.
        return (
            sum(n for at, n in self._seconds if this - THROUGHPUT_WINDOW_S <= at < this)
            / THROUGHPUT_WINDOW_S
        )


class CompletionMeasures:
    """Measures of a role's completions. The key True is for streams, False for other answers."""

    def __init__(self) -> None:
        self.first_token_seconds = {stream: Histogram(REQUEST_SECONDS) for stream in (False, True)}
        self.request_seconds = {stream: Histogram(REQUEST_SECONDS) for stream in (False, True)}
        self.inter_token_seconds = Histogram(INTER_TOKEN_SECONDS)
        self.prompt_tokens = Histogram(TOKEN_COUNTS)
        self.generated_tokens = Histogram(TOKEN_COUNTS)
        # Keys are (outcome, streamed). Outcomes: "finished", "failed", "aborted" (by the client).
        self.outcomes: Counter[tuple[str, bool]] = Counter()
        self.prompt_tokens_total: Counter[bool] = Counter()
        self.tokens_sent: Counter[bool] = Counter()
        self.throughput = Throughput()
        # Prometheus sees no increase in the first sample of a series, so each series begins at 0.
        for outcome in ("finished", "failed", "aborted"):
            for stream in (False, True):
                self.outcomes[outcome, stream] = 0


class RequestMeter:
    """A meter for the completions of one HTTP request. Leaving its block records the outcome."""

    def __init__(self, measures: CompletionMeasures, arrived_at_s: float, *, stream: bool) -> None:
        self._measures, self._arrived_at_s, self._stream = measures, arrived_at_s, stream
        self._prompts: list[int] = []
        self._counts: list[int] = []
        self._last_at_s: list[float] = []
        self.failed = False  # the caller sets this for an error that it handles in the block
        self.aborted: set[int] = set()  # indices of completions that a client aborted

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._arrived_at_s

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Set the completions of the request. Call this once they are accepted."""
        self._prompts = [len(request.prompt) for request in requests]
        self._counts = [0] * len(requests)
        self._last_at_s = [self._arrived_at_s] * len(requests)
        name_rooms(request.room for request in requests if request.room is not None)
        if (trace := CURRENT.get()) is not NO_REQUEST:
            trace.prompt_tokens = sum(self._prompts)

    def add(self, index: int, tokens: int, now: float) -> None:
        """Record more tokens of completion `index`. They share the time since the previous ones."""
        # The deltas of a scored prompt and of an abort have no tokens.
        if not tokens:
            return
        measures, since_s = self._measures, now - self._last_at_s[index]
        if self._counts[index]:
            measures.inter_token_seconds.observe(since_s / tokens, tokens)
        else:
            measures.first_token_seconds[self._stream].observe(since_s)
            measures.inter_token_seconds.observe(0.0, tokens - 1)
        self._last_at_s[index] = now
        self._counts[index] += tokens
        measures.tokens_sent[self._stream] += tokens
        measures.throughput.add(tokens, now)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if (trace := CURRENT.get()) is not NO_REQUEST:
            trace.completion_tokens = sum(self._counts)
        measures, stream = self._measures, self._stream
        if error is not None or self.failed:
            # When the client disconnects, aiohttp cancels the handler, or a write fails.
            left = isinstance(error, asyncio.CancelledError | ConnectionError)
            measures.outcomes["aborted" if left else "failed", stream] += len(self._prompts)
            return
        seconds = self.elapsed_s
        measures.outcomes["aborted", stream] += len(self.aborted)
        for index, (prompt, generated) in enumerate(zip(self._prompts, self._counts, strict=True)):
            if index in self.aborted:
                continue
            measures.outcomes["finished", stream] += 1
            measures.request_seconds[stream].observe(seconds)
            measures.prompt_tokens.observe(prompt)
            measures.generated_tokens.observe(generated)
            measures.prompt_tokens_total[stream] += prompt
