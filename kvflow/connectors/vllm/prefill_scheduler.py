"""Prefill's side in vLLM's scheduler. It decides when a request begins, and reports to the workers
which blocks are computed for a decode.

A request keeps its blocks until decode has them, and decode may have to wait for free blocks. Two
requests could therefore wait for each other, each holding on one side the blocks that the other
needs there. To prevent this, a request begins only when the whole cache has space for its prompt
and for the prompts of all requests that have already begun. Each of these then gets all of its
blocks, whatever decode does, and decode takes blocks only for requests that have begun.
"""

from __future__ import annotations

import logging
from typing import Any

from kvflow.connectors.vllm.messages import Computed, OpenSource, StepMeta
from kvflow.connectors.vllm.params import ROOM, ToDecode, draw_room
from kvflow.connectors.vllm.prompts import prompt_of

log = logging.getLogger("vllm.kvflow")
# The names in vLLM's RequestStatus that mean that the prompt has been computed.
_COMPUTED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")


class PrefillScheduler:
    """Requests with `do_remote_decode`, from their arrival until vLLM ends them."""

    def __init__(self, block_size: int, answer: dict[str, Any]) -> None:
        """`answer` is what all of prefill's answers share (see `params.prefill_answer`)."""
        self._block_size, self._answer = block_size, answer
        # Requests whose room the proxy chose. Their blocks are sent while the prompt is computed.
        self._streaming: dict[str, Any] = {}
        self._rooms: dict[str, int] = {}
        self._places: dict[str, int] = {}  # blocks reserved for each request that began
        self._taken = 0  # sum of the values of `_places`
        # True after a request could not begin in the step that vLLM is planning. Later requests
        # then do not begin either, so that they cannot overtake a large one forever.
        self._is_held_up = False
        self.num_blocks = 0  # usable blocks in vLLM's cache
        self._next = StepMeta()  # message to the workers for the next step
        self.block_ids_of: Any = None  # vLLM's function from a request's id to its blocks, by group

    def new_request(self, request: Any, params: ToDecode) -> None:
        name = request.request_id
        if request.prompt_token_ids is None:
            log.warning(
                "request %s has embeddings for a prompt: kvflow cannot hand it to a decode", name
            )
            return
        self._rooms[name] = params.room or draw_room()
        if params.room is not None:
            self._streaming[name] = request
            self._open(request, params.room)

    def may_begin(self, request: Any) -> bool:
        """Return True and reserve space if the prompt fits. vLLM asks in the order of its queue."""
        name = request.request_id
        if name not in self._rooms or name in self._places:
            return True
        wanted = self._blocks_of(request)
        # A request that would be alone begins, because its prompt may be as large as the cache.
        if self._is_held_up or (self._places and self._taken + wanted > self.num_blocks):
            self._is_held_up = True
            return False
        self._take_place(name, wanted)
        return True

    def allocated(self, request: Any) -> None:
        """Note that the request has its first blocks.

        vLLM does not call `may_begin` for a request that skips the prefix cache, so this method
        reserves its space.
        """
        name = request.request_id
        if name not in self._places:
            if name in self._rooms:
                self._take_place(name, self._blocks_of(request))
        elif name in self._streaming:
            self._next.begun.append(name)

    def sent(self, names: set[str]) -> None:
        """Release the reserved space of requests whose blocks were returned to vLLM."""
        for name in names:
            self._leave_place(name)

    def build_meta(self, meta: StepMeta, output: Any) -> None:
        """Add what the workers must know about the step that vLLM has just planned."""
        meta.sources = self._next.sources
        meta.computed = self._next.computed
        meta.finished = self._next.finished
        meta.begun = self._next.begun
        self._next, self._is_held_up = StepMeta(), False
        # Include requests that just ended, because vLLM may have given their blocks to others.
        mine = self._streaming.keys() | meta.finished.keys()
        meta.preempted = [name for name in output.preempted_req_ids or () if name in mine]
        for name, count in output.num_scheduled_tokens.items():
            request = self._streaming.get(name)
            if request is None:
                continue
            computed = request.num_computed_tokens + count  # at the end of this step
            is_all = computed >= request.num_prompt_tokens
            full = self._blocks_of(request) if is_all else computed // self._block_size
            meta.computed[name] = Computed(self.block_ids_of(name)[0][:full], is_all)

    def finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether vLLM keeps the blocks until they are sent, and our part of its answer."""
        name = request.request_id
        room, streams = self._rooms.pop(name, None), self._streaming.pop(name, None) is not None
        was_computed = request.status.name in _COMPUTED
        if room is None or not (streams or was_computed):
            self._leave_place(name)
            return False, None
        if streams:
            self._next.begun.append(name)
        else:
            self._open(request, room)
            self._next.computed[name] = Computed(
                block_ids[0][: self._blocks_of(request)], is_all=True
            )
        self._next.finished[name] = not was_computed
        return True, self._answer | {ROOM: room} if was_computed else None

    def _take_place(self, name: str, blocks: int) -> None:
        self._places[name] = blocks
        self._taken += blocks

    def _leave_place(self, name: str) -> None:
        self._taken -= self._places.pop(name, 0)

    def _open(self, request: Any, room: int) -> None:
        self._next.sources.append(OpenSource(request.request_id, room, prompt_of(request)))

    def _blocks_of(self, request: Any) -> int:
        return int(-(-request.num_prompt_tokens // self._block_size))
