"""Decode's side in vLLM's scheduler. It decides which blocks are loaded for which request, and
keeps the blocks of failed loads out of use until no write can reach them.

A request that is announced before its prefill begins takes no blocks until prefill begins.
Otherwise its blocks could wait for a prefill that in turn waits for blocks, and hold up requests
that could continue.

For vLLM a failed load ends at once: the request fails, or computes its prompt in other blocks. This
side takes an extra reference on the old blocks, which keeps them out of the pool until every worker
reports that no write can reach them any more. This side takes the reference before vLLM learns of
the failure: a worker first reports a failure to this side, and to vLLM only after this side
confirms the report (`StepMeta.held`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvflow.connectors.vllm.frontend import REASON, encode_reason
from kvflow.connectors.vllm.groups import Blocks, Groups
from kvflow.connectors.vllm.messages import Offer, OpenTarget, StepMeta, StepNews
from kvflow.connectors.vllm.params import FromPrefill
from kvflow.connectors.vllm.prompts import prompt_of
from kvflow.protocols.errors import Cause, Code

USED_ROOMS = 4096  # number of remembered rooms, because a room may be used only once
log = logging.getLogger("vllm.kvflow")


class _Load:
    """The load of one request, from its arrival until the load ends."""

    def __init__(self, request: Any, tokens: int, waits_for: set[int]) -> None:
        """`tokens` of the prompt travel. `waits_for` holds the numbers of the workers at which
        prefill has not begun.
        """
        self.request, self.tokens, self.waits_for = request, tokens, waits_for
        self.is_offered = False
        self.blocks: Sequence[int] = ()  # blocks that prefill may write


class _Quarantine:
    """The blocks of a failed load. `left` holds the workers at which they may still be written."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        self.blocks = blocks
        self.left: set[int] = set()


class DecodeScheduler:
    """Requests with `do_remote_prefill` whose load runs, and the blocks that wait for proof."""

    def __init__(self, groups: Groups, workers: int, *, recompute_below: int = 0) -> None:
        """`workers` is the number of our workers. Worker n loads from prefill's worker n. This
        engine computes prompts of fewer than `recompute_below` tokens itself.
        """
        self._groups, self._workers, self._least = groups, workers, recompute_below
        self._loads: dict[str, _Load] = {}
        self._quarantine: dict[str, _Quarantine] = {}
        self._used: dict[int, None] = {}  # latest room numbers, oldest first
        self._next = StepMeta()  # message to the workers for the next step
        self.block_pool: Any = None  # vLLM's block pool, set after its start

    @property
    def quarantined_blocks(self) -> int:
        return sum(len(found.blocks) for found in self._quarantine.values())

    def new_request(self, request: Any, params: FromPrefill) -> None:
        name = request.request_id
        if request.prompt_token_ids is None:
            log.warning("request %s has embeddings for a prompt: it is computed here", name)
            return
        tokens = self._groups.tokens_moved(request.num_prompt_tokens)
        # Prefill counts in the same way, and opens no room either.
        if not tokens:
            return
        # A room serves one prompt once. A second request names the room if n > 1, or if a client
        # repeats its request.
        if params.room in self._used:
            log.info(
                "request %s: room %d has been used before: its prompt is computed here",
                name,
                params.room,
            )
            return
        self._used[params.room] = None
        while len(self._used) > USED_ROOMS:
            del self._used[next(iter(self._used))]
        refusal = None
        if params.workers not in (None, self._workers):
            text = (
                f"prefill is for decodes of {params.workers} workers (tensor times pipeline "
                "parallel)"
            )
            refusal = Cause(
                Code.REFUSED, f"{text}, and this one has {self._workers}: see its decode_workers"
            )
        is_sure = params.is_computed or refusal is not None
        self._loads[name] = _Load(request, tokens, set() if is_sure else set(range(self._workers)))
        prefill = [params.registry(rank) for rank in range(self._workers)]
        self._next.targets.append(
            OpenTarget(name, params.room, prefill, prompt_of(request)[:tokens], refusal)
        )

    def tokens_to_load(self, request: Any, num_computed_tokens: int) -> int | None:
        """Return how many tokens of the prompt come from prefill, after those in this engine's
        prefix cache.

        Return None while prefill has not begun; vLLM then asks again in its next step. The call has
        no side effects.
        """
        load = self._loads.get(request.request_id)
        if load is None or load.is_offered:
            return 0
        tokens, size = request.num_prompt_tokens, self._groups.page_size
        if tokens < self._least:
            return 0
        # vLLM always computes the last token here, and with it at most one block. If everything
        # before that block is in the cache, a transfer would bring only what is computed anyway.
        if num_computed_tokens and num_computed_tokens >= (tokens - 1) // size * size:
            return 0
        return None if load.waits_for else load.tokens - num_computed_tokens

    def allocated(
        self, request: Any, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        name = request.request_id
        load = self._loads.get(name)
        if load is None or load.is_offered:
            return
        load.is_offered = True
        # An empty offer ends the room, so that prefill can forget the prompt.
        if not num_external_tokens:
            self._next.offers[name] = Offer((), load.tokens)
            del self._loads[name]
            return
        prefix = load.tokens - num_external_tokens
        self._next.offers[name] = self._offer(load, block_ids, prefix)

    def _offer(self, load: _Load, block_ids: Blocks, prefix: int) -> Offer:
        filled = self._groups.filled(block_ids, load.tokens, load.tokens)
        blocks = self._groups.lent(block_ids, load.tokens, prefix)
        load.blocks = [block for own in blocks for block in own if block != self._groups.null_block]
        refusal = None
        if space := self._groups.missing(filled, load.tokens, prefix):
            refusal = Cause(Code.CAPACITY, f"vLLM lacks blocks of {space!r} for the prompt")
        return Offer(blocks, prefix, refusal)

    def build_meta(self, meta: StepMeta) -> None:
        meta.targets = self._next.targets
        meta.offers = self._next.offers
        meta.held = self._next.held
        meta.abandoned = self._next.abandoned
        self._next = StepMeta()

    def finished(self, request: Any) -> None:
        """Note that vLLM ended the request. vLLM keeps the blocks of a load that still runs."""
        if self._loads.pop(request.request_id, None) is not None:
            self._next.abandoned.append(request.request_id)

    def update(self, news: StepNews, received: set[str]) -> None:
        """Process the workers' news. `received` names requests whose load ended at all workers."""
        for name, workers in news.ready.items():
            if (load := self._loads.get(name)) is not None:
                load.waits_for -= workers
        for name, workers in news.failures.items():
            load = self._loads.get(name)
            if load is not None:
                # When a request fails, its trace headers are the only part that vLLM returns.
                headers = load.request.trace_headers or {}
                load.request.trace_headers = {**headers, REASON: encode_reason(news.failed[name])}
                self._hold(name, load.blocks, workers)
        for name, workers in news.released.items():
            found = self._quarantine.get(name)
            if found is not None:
                found.left -= workers
                if not found.left:
                    # As in vLLM, free the end of a prompt first, so that it is evicted first.
                    self.block_pool.free_blocks(reversed(self._quarantine.pop(name).blocks))
        for name in received:
            self._loads.pop(name, None)

    def _hold(self, name: str, block_ids: Sequence[int], workers: set[int]) -> None:
        if name not in self._quarantine:
            blocks = [self.block_pool.blocks[block] for block in block_ids]
            self.block_pool.touch(blocks)
            self._quarantine[name] = _Quarantine(blocks)
        self._quarantine[name].left |= workers
        self._next.held.setdefault(name, set()).update(workers)
