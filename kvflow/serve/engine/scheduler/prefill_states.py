"""Saving the states of prompts in prefill's prefix cache, and restoring them.

A state is useful only at the end of a page. So a prompt is divided such that one chunk ends with
the last full page, and another chunk ends where the prompt diverges from the cached prompts. Other
chunks end at page boundaries if the limits of a step permit that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kvflow.protocols.pages.layout import PageIndices
from kvflow.serve.cache.prefix import Prefix, PrefixCache
from kvflow.serve.cache.states import StateStore
from kvflow.serve.engine.model import sequence
from kvflow.serve.engine.model.device import wait_for
from kvflow.serve.engine.model.step import Row

# One prompt may use at most 1/_SHARE of the slots, so that it cannot fill the store.
_SHARE = 4


class CachedRequest(Protocol):
    """The attributes of an engine's request that this module uses."""

    sequence: sequence.Sequence
    prefix: Prefix | None
    states: dict[int, int]


class _Copy(NamedTuple):
    row: PageIndices
    slot: int


class StepCopies(NamedTuple):
    """Copies of states that the model thread makes: into rows before a step, out of rows after."""

    store: StateStore
    restored: list[_Copy]
    saved: list[_Copy]
    device: torch.device

    def before(self) -> None:
        for row, slot in self.restored:
            self.store.restore(slot, row)

    def after(self) -> None:
        if self.saved:
            # The step may still run on the device: it must end before its rows are copied.
            wait_for(self.device)
        for row, slot in self.saved:
            self.store.save(row, slot)


class PromptStates:
    """Manages the states of one prefill's prompts. Only the event loop uses it."""

    def __init__(
        self, cache: PrefixCache, store: StateStore, fewest: int, device: torch.device
    ) -> None:
        """`fewest` is `LoadedModel.fewest_tokens`."""
        self._cache, self._store, self._fewest, self._device = cache, store, fewest, device
        self._page_size = cache.page_size

    def chunk(self, request: CachedRequest, most: int, chunk: Callable[[int, int], int]) -> int:
        """Return how many tokens to compute next, about `most`; `chunk` is `LoadedModel.chunk`."""
        s, size = request.sequence, self._page_size
        at = s.computed
        end = self._next_end(request)
        count = chunk(end - at, most)
        if at + count == end:
            return count
        in_pages = (at + count) // size * size
        if in_pages - at >= self._fewest and end - in_pages >= self._fewest:
            return in_pages - at
        return count

    def _next_end(self, request: CachedRequest) -> int:
        s = request.sequence
        last = self._last(request)
        branch = 0 if request.prefix is None else request.prefix.branch_pages * self._page_size
        for end in (branch, last):
            if end - s.computed >= self._fewest and (end == last or last - end >= self._fewest):
                return end
        return s.prompt_length

    def _last(self, request: CachedRequest) -> int:
        """Return the end of the last full page that leaves enough tokens for one more chunk."""
        return (request.sequence.prompt_length - self._fewest) // self._page_size * self._page_size

    @contextmanager
    def step(self, rows: list[Row], requests: Sequence[CachedRequest]) -> Iterator[StepCopies]:
        """Yield the copies for a step of `rows`, which has one row for each of `requests`.

        The slots are held until this context ends (I13), since a request may be dropped meanwhile.
        """
        copies = StepCopies(self._store, [], [], self._device)
        begun = []
        for row, request in zip(rows, requests, strict=True):
            if request.prefix is None:
                continue
            if request.prefix.state is not None:
                begun.append(request.prefix)
                copies.restored.append(_Copy(row.sequence.rows, request.prefix.state))
            if (slot := self._slot_for(request, row.end)) is not None:
                copies.saved.append(_Copy(row.sequence.rows, slot))
        held = np.array([slot for _, slot in (*copies.restored, *copies.saved)], np.int32)
        self._store.slots.hold(held)
        try:
            yield copies
        finally:
            self._store.slots.unhold(held)
        for prefix in begun:
            prefix.release_state()

    def _slot_for(self, request: CachedRequest, end: int) -> int | None:
        """Return a slot for the state before token `end`; None if no page ends there or no slot is
        free.

        If slots are short, the request reuses the slot of its earliest state.
        """
        s, states = request.sequence, request.states
        if end % self._page_size:
            return None
        slot = None
        if len(states) < max(1, self._store.slots.capacity // _SHARE):
            slot = self._cache.take_state(s.owner)
        if slot is None and states:
            slot = states.pop(min(states))
        if slot is not None:
            states[end] = slot
        return slot

    def keep(self, request: CachedRequest) -> None:
        """Hand over a request's states to the cache, which must already have its pages."""
        s, prefix = request.sequence, request.prefix
        states, request.states = request.states, {}
        assert prefix is not None
        self._cache.keep_states(s.tokens[: s.prompt_length], states, s.owner, prefix)

    def give_back(self, request: CachedRequest) -> None:
        """Free the slots of a request that ended or starts again. Idempotent."""
        states, request.states = request.states, {}
        self._store.free(tuple(states.values()), request.sequence.owner)
