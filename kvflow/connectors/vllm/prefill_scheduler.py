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
from typing import Any, NamedTuple

from kvflow.connectors.vllm.groups import Groups
from kvflow.connectors.vllm.messages import Computed, OpenSource, StepMeta
from kvflow.connectors.vllm.params import ROOM, ToDecode, draw_room
from kvflow.connectors.vllm.prompts import prompt_of

log = logging.getLogger("vllm.kvflow")
# The names in vLLM's RequestStatus that mean that the prompt has been computed.
_COMPUTED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")


class _Room(NamedTuple):
    """The room of a request, and how many tokens of its prompt the room moves."""

    number: int
    tokens: int


class PrefillScheduler:
    """Requests with `do_remote_decode`, from their arrival until vLLM ends them."""

    def __init__(self, groups: Groups, answer: dict[str, Any]) -> None:
        """`answer` is what all of prefill's answers share (see `params.prefill_answer`)."""
        self._groups, self._answer = groups, answer
        # Requests whose room the proxy chose. Their blocks are sent while the prompt is computed.
        self._streaming: dict[str, Any] = {}
        self._rooms: dict[str, _Room] = {}
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
        tokens = self._groups.tokens_moved(request.num_prompt_tokens)
        # Decode counts in the same way, and opens no room either.
        if not tokens:
            return
        if not self._groups.moves_last_token:
            _end_before_last_token(request)
        room = self._rooms[name] = _Room(params.room or draw_room(), tokens)
        if params.room is not None:
            self._streaming[name] = request
            self._open(request, room)

    def may_begin(self, request: Any) -> bool:
        """Return True and reserve space if the prompt fits. vLLM asks in the order of its queue."""
        name = request.request_id
        if name not in self._rooms or name in self._places:
            return True
        wanted = self._groups.most_blocks(request.num_prompt_tokens)
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
                self._take_place(name, self._groups.most_blocks(request.num_prompt_tokens))
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
            meta.computed[name] = self._computed(name, computed)

    def _computed(self, name: str, computed: int) -> Computed:
        """Return what is final of a request once `computed` tokens are."""
        tokens = self._rooms[name].tokens
        blocks, is_all = (
            self._groups.filled(self.block_ids_of(name), tokens, computed),
            computed >= tokens,
        )
        if is_all and (space := self._groups.missing(blocks, tokens)):
            log.warning("request %s: vLLM has not kept the blocks of %r", name, space)
            # The room refuses a last chunk without blocks, and fails.
            blocks = [[] for _ in blocks]
        return Computed(blocks, is_all)

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
        elif not self._hand_over(request, room, block_ids):
            self._leave_place(name)
            return False, None
        self._next.finished[name] = not was_computed
        return True, self._answer | {ROOM: room.number} if was_computed else None

    def _hand_over(self, request: Any, room: _Room, block_ids: tuple[list[int], ...]) -> bool:
        """Open the room of a request that has ended. Return False if vLLM has not kept all blocks
        that travel; decode then computes the prompt.
        """
        name = request.request_id
        blocks = self._groups.filled(block_ids, room.tokens, room.tokens)
        if space := self._groups.missing(blocks, room.tokens):
            log.warning(
                "request %s: vLLM has not kept the blocks of %r: decode computes its prompt",
                name,
                space,
            )
            return False
        self._open(request, room)
        self._next.computed[name] = Computed(blocks, is_all=True)
        return True

    def _take_place(self, name: str, blocks: int) -> None:
        self._places[name] = blocks
        self._taken += blocks

    def _leave_place(self, name: str) -> None:
        self._taken -= self._places.pop(name, 0)

    def _open(self, request: Any, room: _Room) -> None:
        prompt = prompt_of(request)[: room.tokens]
        self._next.sources.append(OpenSource(request.request_id, room.number, prompt))


def _end_before_last_token(request: Any) -> None:
    """Let vLLM compute the prompt without its last token, and nothing after it.

    Decode computes the last token. Here it would change the states, and move the windows: vLLM
    would free the block of the earliest token that it reads.
    """
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    request._all_token_ids.pop()
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    if request.sampling_params is not None:
        request.sampling_params.min_tokens = 0
