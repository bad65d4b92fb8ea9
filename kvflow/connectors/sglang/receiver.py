"""Decode's half of a request: SGLang's receiver over a room of the decode node."""

from __future__ import annotations

import logging
import time
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, KVTransferError

from kvflow.connectors.sglang.memory import places_of
from kvflow.node.threads.rooms import DecodeThreadRoom
from kvflow.protocols.arguments import CheckedPrompt
from kvflow.protocols.errors import Cause, Code, KvflowError

log = logging.getLogger("sglang.kvflow")
_REPLACED = (Code.PEER_LOST, Code.PROTOCOL_ERROR, Code.REFUSED)


class KvflowReceiver(CommonKVReceiver):  # type: ignore[misc]
    """One request at decode. SGLang polls it until it concludes.

    Success means that every page and the metadata have landed, and that no write can reach the
    pages any more. After a failure SGLang holds the pages until the manager's
    `is_abort_release_safe`.
    """

    def __init__(self, mgr: Any, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        """SGLang's constructor is not called: it enters the room into tables of SGLang's link."""
        self.kv_mgr, self.bootstrap_addr = mgr, bootstrap_addr
        self.bootstrap_room = bootstrap_room
        self.conclude_state: int | None = None
        self.require_staging = False
        self.abort_notified = False
        # SGLang counts the ranks here whose acknowledgement it waits for. kvflow has a proof.
        self.bootstrap_infos: list[dict[str, Any]] = []
        self._lent_at_s: float | None = None
        self._slot = -1
        self._cause: Cause | None = None
        self._room: DecodeThreadRoom | None = None
        self._prompt: CheckedPrompt | None = None
        try:
            self._prompt = mgr.prompts.take()
        except KvflowError as error:
            self._fail(error.cause())

    def init(self, prefill_dp_rank: int) -> None:
        """Announce the room to prefill, which then waits for decode's pages."""
        if self.conclude_state is not None:
            return
        try:
            self._room = self.kv_mgr.thread.announce(
                self.bootstrap_room, prefill=self.bootstrap_addr, prompt=self._prompt
            )
        except KvflowError as error:
            self._fail(error.cause())

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
        device_kv_indices: Any = None,
    ) -> None:
        """Lend pages, int32 [n], for the prompt after its first `decode_prefix_len` tokens, and the
        places in `state_indices`, those of each kind of state.

        `aux_index` is the slot that receives prefill's metadata. Raises: NotImplementedError for
        pages in host memory beside a device.
        """
        if destination != KVTransferDestination.DEVICE or device_kv_indices is not None:
            raise NotImplementedError("kvflow's backend has no host destinations")
        if self.conclude_state is not None:
            return
        assert self._room is not None and aux_index is not None
        self._slot, self._lent_at_s = aux_index, time.monotonic()
        try:
            places = places_of(self.kv_mgr.thread.pool.layout, kv_indices, state_indices)
            self.kv_mgr.await_steps()
            self._room.offer(places, prefix_tokens=decode_prefix_len or 0)
        except KvflowError as error:
            self._fail(error.cause())

    def poll(self) -> int:
        """Return the state of the room, in SGLang's words (KVPoll)."""
        if self.conclude_state is None:
            self.kv_mgr.drop_events()
            if self._room is not None:
                self._look(self._room)
        return self._state()

    def _look(self, room: DecodeThreadRoom) -> None:
        """Conclude if the room has ended, or if its time is over."""
        if room.error is not None:
            self._fail(room.error.cause())
        elif room.landed and room.released:
            self._land(room)
        elif self._is_overdue:
            text = f"its pages have not come within {self.kv_mgr.waiting_timeout:g} s"
            self._fail(Cause(Code.DEADLINE, f"{text} (SGLANG_DISAGGREGATION_WAITING_TIMEOUT)"))

    def _state(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        if self._room is None:
            return int(KVPoll.Bootstrapping)
        return int(KVPoll.Transferring if self._room.offered else KVPoll.WaitingForInput)

    @property
    def _is_overdue(self) -> bool:
        began_at_s = self._lent_at_s
        return (
            began_at_s is not None and time.monotonic() - began_at_s >= self.kv_mgr.waiting_timeout
        )

    def _land(self, room: DecodeThreadRoom) -> None:
        assert room.handoff is not None
        try:
            self.kv_mgr.metadata.write(self._slot, room.handoff)
        except KvflowError as error:
            self._fail(error.cause())
        else:
            self.conclude_state = KVPoll.Success

    def failure_exception(self) -> None:
        """Raise the reason of the failure, as SGLang's KVTransferError."""
        elsewhere = Cause(Code.ABORTED, "the request failed at another rank of decode")
        self._fail(elsewhere)
        self.conclude_state = KVPoll.Failed
        # A failed recomputation of a retracted request records its own reason, from another thread.
        recorded = self.kv_mgr.failure_records.pop(self.bootstrap_room, None)
        raise KVTransferError(self.bootstrap_room, recorded or str(self._cause or elsewhere))

    def abort(self) -> None:
        mismatch = self.kv_mgr.mismatches.get(self.bootstrap_addr)
        if mismatch is not None:
            cause = Cause(Code.REFUSED, mismatch)
        else:
            cause = Cause(Code.CLIENT_GONE, "the request was aborted at decode")
        if self._room is None and self.conclude_state is None:
            self._refuse(cause)
        self._fail(cause)

    def _refuse(self, cause: Cause) -> None:
        """Send prefill the cause of a request that was not yet announced to it."""
        try:
            self.kv_mgr.thread.refuse(self.bootstrap_room, prefill=self.bootstrap_addr, cause=cause)
        except KvflowError as error:
            log.warning("room %s: prefill cannot be told: %s", self.bootstrap_room, error)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """End the room, so that SGLang holds its pages until there is proof."""
        self._fail(Cause(Code.ABORTED, "decode dropped the request"))
        self._hold()

    def clear(self) -> None:
        """End the room, unless it has ended."""
        self._fail(Cause(Code.ABORTED, "decode dropped the request"))

    def _fail(self, cause: Cause) -> None:
        """End the room with `cause`, unless the request has concluded."""
        if self.conclude_state is not None:
            return
        self._cause, self.conclude_state = cause, KVPoll.Failed
        if self._room is not None:
            self._room.close(cause)
            self._hold()
        if cause.code in _REPLACED:
            self.kv_mgr.forget_prefill(self.bootstrap_addr)

    def _hold(self) -> None:
        """Make SGLang hold the pages that were lent, until the room is released."""
        self.abort_notified = True
        if self._room is not None and self._room.offered and not self._room.released:
            self.kv_mgr.owe(self._room)
