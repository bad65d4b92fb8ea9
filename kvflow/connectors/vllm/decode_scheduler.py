"""Decode in vLLM's scheduler: what is to be loaded, into which blocks, and which blocks wait for
proof.

A request that was announced before its prefill has begun takes no blocks until it has: blocks that
wait for a prefill which in turn waits for blocks would hold up those that could go on.

A load that has failed is over for vLLM at once: the request fails, or computes its prompt in other
blocks. Until every worker says that nothing can write into the old ones any more, one more
reference keeps them out of the pool. It is taken before vLLM is told: a worker that has told us of
a failure waits for our word (`StepMeta.held`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvflow.connectors.vllm.frontend import REASON, encode_reason
from kvflow.connectors.vllm.messages import Offer, OpenTarget, StepMeta, StepNews
from kvflow.connectors.vllm.params import FromPrefill
from kvflow.connectors.vllm.prompts import prompt_of
from kvflow.protocols.errors import Cause, Code

USED_ROOMS = 4096  # remembered: a room has one life
log = logging.getLogger("vllm.kvflow")


class _Load:
    """One request, from its arrival until its blocks are there, or will never be."""

    def __init__(self, request: Any, waits_for: set[int]) -> None:
        """`waits_for`: the workers whose part of its prefill has not begun."""
        self.request, self.waits_for = request, waits_for
        self.is_offered = False
        self.blocks: Sequence[int] = ()  # what prefill may write


class _Quarantine:
    """Blocks of a load that has failed. `left`: workers whose part of them may still be written."""

    def __init__(self, blocks: Sequence[Any]) -> None:
        self.blocks = blocks
        self.left: set[int] = set()


class DecodeScheduler:
    """Requests with `do_remote_prefill`, from their arrival until their blocks are there, or proven
    free.
    """

    def __init__(self, block_size: int, workers: int) -> None:
        """`workers`: of this engine; of several, each loads its part from prefill's worker of the
        same number.
        """
        self._block_size, self._workers = block_size, workers
        self._loads: dict[str, _Load] = {}
        self._quarantine: dict[str, _Quarantine] = {}
        self._used: dict[int, None] = {}  # numbers of the latest rooms
        self._next = StepMeta()  # what the next step tells the workers
        self.block_pool: Any = None  # vLLM's

    @property
    def quarantined_blocks(self) -> int:
        return sum(len(found.blocks) for found in self._quarantine.values())

    def new_request(self, request: Any, params: FromPrefill) -> None:
        name = request.request_id
        if request.prompt_token_ids is None:
            log.warning("request %s has embeddings for a prompt: it is computed here", name)
            return
        # N > 1, several prompts of one request, or it is asked once more.
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
        self._loads[name] = _Load(request, set() if is_sure else set(range(self._workers)))
        prefill = [params.registry(rank) for rank in range(self._workers)]
        self._next.targets.append(
            OpenTarget(name, params.room, prefill, prompt_of(request), refusal)
        )

    def tokens_to_load(self, request: Any, num_computed_tokens: int) -> int | None:
        """How much of the prompt prefill has beyond what this engine's prefix cache has; None while
        it has not begun: vLLM asks again in its next step. Without side effects."""
        load = self._loads.get(request.request_id)
        if load is None or load.is_offered:
            return 0
        tokens, size = request.num_prompt_tokens, self._block_size
        # The last token is computed here in any case, and at most a block with it: then nothing
        # needs to travel.
        if num_computed_tokens and num_computed_tokens >= (tokens - 1) // size * size:
            return 0
        return None if load.waits_for else int(tokens - num_computed_tokens)

    def allocated(
        self, request: Any, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        name = request.request_id
        load = self._loads.get(name)
        if load is None or load.is_offered:
            return
        load.is_offered = True
        tokens = request.num_prompt_tokens
        if not num_external_tokens:  # prefill is told that it may forget the prompt
            self._next.offers[name] = Offer((), tokens)
            del self._loads[name]
            return
        prefix = tokens - num_external_tokens
        load.blocks = block_ids[0][prefix // self._block_size : -(-tokens // self._block_size)]
        self._next.offers[name] = Offer(load.blocks, prefix)

    def build_meta(self, meta: StepMeta) -> None:
        meta.targets, meta.offers, meta.held = (
            self._next.targets,
            self._next.offers,
            self._next.held,
        )
        meta.abandoned = self._next.abandoned
        self._next = StepMeta()

    def finished(self, request: Any) -> None:
        """It is over for vLLM, which keeps blocks that are being loaded until they are reported."""
        if self._loads.pop(request.request_id, None) is not None:
            self._next.abandoned.append(request.request_id)

    def update(self, news: StepNews, received: set[str]) -> None:
        """What the workers have told with a step:
        of `received` requests nothing more is to come.
        """
        for name, workers in news.ready.items():
            if (load := self._loads.get(name)) is not None:
                load.waits_for -= workers
        for name, workers in news.failures.items():
            load = self._loads.get(name)
            if load is not None:
                headers = load.request.trace_headers or {}
                load.request.trace_headers = {**headers, REASON: encode_reason(news.failed[name])}
                self._hold(name, load.blocks, workers)
        for name, workers in news.released.items():
            found = self._quarantine.get(name)
            if found is not None:
                found.left -= workers
                if not found.left:
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
