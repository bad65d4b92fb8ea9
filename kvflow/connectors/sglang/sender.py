"""Prefill's half of a request: SGLang's sender over a room of the prefill node."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferMetric
from sglang.srt.disaggregation.common.conn import CommonKVSender, KVTransferError

from kvflow.connectors.sglang.memory import places_of
from kvflow.node.threads.rooms import PrefillThreadRoom
from kvflow.protocols.errors import Cause, Code, KvflowError
from kvflow.protocols.pages.layout import PageIndices


class _Chunk(NamedTuple):
    """Pages that wait for `event`: a device still computes them."""

    pages: PageIndices
    is_last: bool
    handoff: bytes
    event: Any


class KvflowSender(CommonKVSender):  # type: ignore[misc]
    """One request at prefill. SGLang polls it until it concludes.

    SGLang frees the request's pages when `poll` returns Success or Failed. Success means that no
    write reads them any more. After a failure a write may still read them, but it reaches only
    pages that decode has lent and does not use.
    """

    def __init__(
        self,
        mgr: Any,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        """Open the room. If that is refused, `poll` returns Failed.

        SGLang's constructor is not called: it enters the room into tables of SGLang's own link.
        """
        self.kv_mgr, self.bootstrap_room = mgr, bootstrap_room
        self.bootstrap_server_url = bootstrap_addr
        self.conclude_state: int | None = None
        self.aux_index: int | None = None
        self.curr_idx = 0
        # SGLang sets it before it sends pages that a step of the model may still write.
        self._early_send_wait_event: Any = None
        self._chunks: deque[_Chunk] = deque()
        self._cause: Cause | None = None
        self._began_at_s = self._took_s = 0.0
        self._room: PrefillThreadRoom | None = None
        try:
            self._room = mgr.thread.open(bootstrap_room, prompt=mgr.prompts.take())
        except KvflowError as error:
            self._fail(error.cause())

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Set the slot with the metadata. The room knows the number of pages."""
        self.aux_index = aux_index

    def pop_decode_prefix_len(self) -> int:
        """Return the number of leading tokens that decode has."""
        return 0 if self._room is None else self._room.prefix_tokens or 0

    def mark_prefill_complete(self) -> None:
        """Do nothing: decode lends its pages before prefill has computed the prompt."""

    def get_max_transfer_tokens(self) -> int | None:
        return None

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(
        self,
        kv_indices: Any,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
    ) -> None:
        """Send the next pages, int32 [n]. With the last ones, SGLang gives `state_indices`, the
        places of each kind of state.
        """
        if self.conclude_state is not None:
            return
        is_last = state_indices is not None
        pages = places_of(self.kv_mgr.thread.pool.layout, kv_indices, state_indices)
        event, self._early_send_wait_event = self._early_send_wait_event, None
        if event is None:
            # A stage of a pipeline sends while the step that computes the pages may be running, and
            # names no event. Copies of the pages have a stream of their own.
            self.kv_mgr.await_steps()
        self._began_at_s = self._began_at_s or time.monotonic()
        self.curr_idx += len(kv_indices)
        try:
            handoff = b""
            # Every stage has the same metadata, and decode needs them once.
            if is_last and self.kv_mgr.place.is_last_stage:
                # SGLang may give the slot to another request once this one has failed.
                handoff = self.kv_mgr.metadata.read(self.aux_index)
            self._chunks.append(_Chunk(pages, is_last, handoff, event))
            self._send_computed(wait=is_last)
        except KvflowError as error:
            self._fail(error.cause())

    def poll(self) -> int:
        """Return the state of the room, in SGLang's words (KVPoll)."""
        if self.conclude_state is None:
            self.kv_mgr.drop_events()
            assert self._room is not None
            self._look(self._room)
            self.kv_mgr.publish(self.bootstrap_room, self._state())
        return self._state()

    def _look(self, room: PrefillThreadRoom) -> None:
        """Conclude if the room has ended, and send what has been computed."""
        if room.error is not None:
            self._fail(room.error.cause())
        elif room.done and room.released:
            self._took_s = time.monotonic() - self._began_at_s
            self.conclude_state = KVPoll.Success
        else:
            try:
                self._send_computed(wait=False)
            except KvflowError as error:
                self._fail(error.cause())

    def _state(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        assert self._room is not None
        if not self._room.matched:
            return int(KVPoll.Bootstrapping)
        return int(KVPoll.Transferring if self.curr_idx else KVPoll.WaitingForInput)

    def poll_pp_consensus(self) -> int:
        """Return the least of the states at all stages of a pipeline."""
        state = self.poll()
        return (
            state if state == KVPoll.Failed else int(self.kv_mgr.least_state(self.bootstrap_room))
        )

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric(
            transfer_latency_s=self._took_s or None,
            transfer_total_bytes=self.curr_idx * self.kv_mgr.thread.pool.layout.page_bytes,
        )

    def failure_exception(self) -> None:
        """Raise the reason of the failure, as SGLang's KVTransferError."""
        elsewhere = Cause(Code.ABORTED, "the request failed at another rank of prefill")
        self._fail(elsewhere)
        self.conclude_state = KVPoll.Failed
        self.kv_mgr.publish(self.bootstrap_room, None)
        raise KVTransferError(self.bootstrap_room, str(self._cause or elsewhere))

    def abort(self) -> None:
        self._fail(Cause(Code.CLIENT_GONE, "the request was aborted at prefill"))
        # SGLang may never ask for this sender again.
        self.kv_mgr.publish(self.bootstrap_room, None)

    def clear(self) -> None:
        """End the room, unless it has ended."""
        self._fail(Cause(Code.ABORTED, "prefill dropped the request"))
        self.kv_mgr.publish(self.bootstrap_room, None)

    def _send_computed(self, *, wait: bool) -> None:
        """Send the chunks whose pages are computed. With `wait`, wait for all others.

        Raises: KvflowError.
        """
        while self._chunks:
            chunk = self._chunks[0]
            if chunk.event is not None and not chunk.event.query():
                if not wait:
                    return
                chunk.event.synchronize()
            self._chunks.popleft()
            assert self._room is not None
            self._room.send(chunk.pages, last=chunk.is_last, handoff=chunk.handoff)

    def _fail(self, cause: Cause) -> None:
        """End the room with `cause`, unless the request has concluded."""
        if self.conclude_state is not None:
            return
        self._cause, self.conclude_state = cause, KVPoll.Failed
        self.kv_mgr.publish(self.bootstrap_room, KVPoll.Failed)
        self._chunks.clear()
        if self._room is None or self._room.error is not None:
            return
        self._room.close(cause)
        if self.curr_idx:
            # SGLang now reuses the pages. Once the node knows that the room is closed, a write
            # that still reads them cannot make decode's half succeed.
            self.kv_mgr.settle()
