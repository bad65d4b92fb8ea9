"""The manager of one rank of a SGLang server: its node, and the pages that failed requests owe."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode
from sglang.srt.utils.network import NetworkAddress

from kvflow.connectors.sglang import nodes, queues
from kvflow.connectors.sglang.counterpart import FIELD, SIZES, listed
from kvflow.connectors.sglang.metadata import MetadataSlots
from kvflow.connectors.sglang.prompts import PromptSlot
from kvflow.connectors.sglang.settings import Settings
from kvflow.connectors.sglang.version import check_version
from kvflow.connectors.staging import close_staging
from kvflow.node.threads.decode import DecodeThread
from kvflow.node.threads.prefill import PrefillThread
from kvflow.node.threads.rooms import DecodeThreadRoom
from kvflow.protocols.errors import Cause, Code, KvflowError, PeerError
from kvflow.protocols.ports import UnprovenLoan
from kvflow.protocols.wire.ranks import rank_to_json

log = logging.getLogger("sglang.kvflow")
SWITCH_INTERVAL_S = 0.0005
"""The time after which the node's thread makes SGLang's scheduler hand over Python's lock.

The scheduler computes or polls without a pause, and each step of a request waits for the lock. With
Python's own 5 ms the first token of a request alone came a tenth later.
"""
REST_S = 0.001
"""The longest pause between two polls of a scheduler that has nothing to compute. A new request
waits for as long.
"""


class KvflowManager(CommonKVManager):  # type: ignore[misc]
    """One rank. `thread` is its node: a PrefillThread or a DecodeThread.

    Only the scheduler's thread calls the methods, unless they say otherwise.
    """

    supports_deferred_decode_kv_release = True
    supports_role_switch = True
    reports_transfer_latency = True

    def __init__(
        self,
        args: Any,
        disaggregation_mode: Any,
        server_args: Any,
        is_mla_backend: bool | None = False,
    ) -> None:
        """Start the node over the KV cache in `args`, and register a prefill's node.

        Raises: MisuseError for a version, a setting, a model or a command line that is not
        supported.
        """
        check_version()
        self.prompts = PromptSlot()
        self.mismatches: dict[str, str] = {}
        """Why the prefill at an address does not fit, by "host:port"."""
        self._owed: dict[int, list[DecodeThreadRoom]] = {}
        settings = Settings.read(os.environ)
        is_prefill = disaggregation_mode == DisaggregationMode.PREFILL
        self.place = place = nodes.place_of(args, server_args, is_prefill=is_prefill)
        self.metadata = MetadataSlots(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens)
        pool = nodes.pool_for(args, server_args, settings, place, is_mla=bool(is_mla_backend))
        self._staging = staging = nodes.staging_for(pool, settings, place, is_prefill=is_prefill)
        self.thread: PrefillThread | DecodeThread
        with ExitStack() as failed:
            if staging is not None:
                failed.callback(staging.close)
            if is_prefill:
                model = str(server_args.served_model_name or server_args.model_path)
                self.thread = nodes.prefill_node(pool, staging, args, settings, place, model)
            else:
                self.thread = nodes.decode_node(pool, staging, args, settings, place)
            queues.install()
            if sys.getswitchinterval() > SWITCH_INTERVAL_S:
                sys.setswitchinterval(SWITCH_INTERVAL_S)
            self.thread.start()
            # From now on the memory is freed only if the node closes with every proof.
            failed.pop_all()
            failed.callback(self._close)
            # SGLang's constructor calls `register_to_bootstrap`, which needs the node.
            super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
            failed.pop_all()
        # SGLang's own control link is not used, and nothing may fill a socket that nobody reads.
        self.server_socket.close(linger=0)
        log.info(
            "kvflow: %r, over %s, %s", pool, settings.transfer_backend, disaggregation_mode.value
        )

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        assert isinstance(self.thread, PrefillThread)
        info = listed(self.thread.info, self.place.number, self.place.total)
        super()._register_topology_row(url, {**payload, FIELD: rank_to_json(info)})

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Return True if the prefill's sizes are known and fit.

        SGLang raises an error for a prefill that does not fit, which would end the server. Here it
        fails only the requests to that prefill.
        """
        try:
            if not super().try_ensure_parallel_info(bootstrap_addr):
                return False
            self._check_ranks(self.prefill_info_table[bootstrap_addr].attn_tp_size)
        except (RuntimeError, AssertionError, PeerError) as error:
            self.mismatches[bootstrap_addr] = str(error)
            self.forget_prefill(bootstrap_addr)
            log.error("prefill %s does not fit: %s", bootstrap_addr, error)
            return False
        self.mismatches.pop(bootstrap_addr, None)
        return True

    def _check_ranks(self, theirs: int) -> None:
        ours = self.place.ranks
        if theirs != ours and (theirs % ours or not nodes.is_by_head(self.thread.pool)):
            raise PeerError(
                f"prefill has {theirs} tensor-parallel ranks, and this decode {ours}: {SIZES}"
            )

    def forget_prefill(self, bootstrap_addr: str) -> None:
        """Forget the sizes of a prefill that may have been replaced. SGLang then asks again."""
        self.prefill_info_table.pop(bootstrap_addr, None)

    def refuse(self, request: Any) -> None:
        """Send the other side the reason of a request that SGLang refuses here, before it has made
        a sender or a receiver.
        """
        if request.output_ids or request.bootstrap_host == FAKE_BOOTSTRAP_HOST:
            # A retracted request, whose prefill has ended, or one of SGLang's own health checks.
            return
        reason = request.finished_reason or request.to_finish
        text = str(getattr(reason, "message", None) or "it gave no reason")
        cause = Cause(Code.BAD_REQUEST, f"SGLang refuses it at {self._role}: {text}")
        try:
            if isinstance(self.thread, PrefillThread):
                self.thread.refuse(request.bootstrap_room, cause)
            else:
                address = NetworkAddress(request.bootstrap_host, request.bootstrap_port)
                prefill = address.to_host_port_str()
                self.thread.refuse(request.bootstrap_room, prefill=prefill, cause=cause)
        except KvflowError as error:
            log.warning("room %s: the other side cannot be told: %s", request.bootstrap_room, error)

    @property
    def _role(self) -> str:
        return "prefill" if isinstance(self.thread, PrefillThread) else "decode"

    # --- stages of a prefill

    def publish(self, bootstrap_room: int, state: int | None) -> None:
        """Tell the first stage the state of a room at this stage; None once it is over."""
        if self.place.stages == 1:
            return
        if state is None:
            self.request_status.pop(bootstrap_room, None)
        elif self.request_status.get(bootstrap_room) != state:
            self.request_status[bootstrap_room] = state

    def least_state(self, bootstrap_room: int) -> int:
        """Return the least of the states at all stages. Only the first stage asks for it."""
        states = self.request_status.collect(bootstrap_room)
        return int(KVPoll.Bootstrapping if None in states else min(states))

    # --- pages of failed requests

    def owe(self, room: DecodeThreadRoom) -> None:
        """Remember that a failed room may still be written to."""
        rooms = self._owed.setdefault(room.room, [])
        if room not in rooms:
            rooms.append(room)

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Return True if no write can reach the pages of the failed requests of a room.

        kvflow has a proof for each room, so SGLang's count of acknowledgements is not used.
        """
        return all(room.released for room in self._owed.get(bootstrap_room, ()))

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        self._owed.pop(bootstrap_room, None)

    # --- the node

    def await_steps(self) -> None:
        """Wait until no step that was launched before can still write into the KV cache.

        SGLang lends pages of a request that has ended while the next step, which still computes a
        token for it, may be running. Copies between the cache and the staging have a stream of
        their own, which the steps do not wait for. This also waits for such copies of other
        requests.
        """
        if not self.thread.pool.on_host:
            # A server on a device has loaded torch.
            import torch

            torch.accelerator.synchronize(self.thread.pool.device)

    def _close(self) -> Sequence[UnprovenLoan]:
        """Close the node, then its staging. Returns the loans without proof."""
        is_proven = False
        try:
            unproven = self.thread.close()
            is_proven = not unproven
        finally:
            if self._staging is not None:
                close_staging(self._staging, is_proven=is_proven)
        return unproven

    def drop_events(self) -> None:
        """Discard the node's events. Rooms have the same news in their fields."""
        self.thread.poll()

    def rest(self) -> None:
        """Wait up to `REST_S` for news of the node, if it has a room that may have news."""
        if self.thread.open_rooms:
            self.thread.poll(REST_S)

    def settle(self) -> None:
        """Wait until the node has processed what was posted to it, such as the close of a room."""
        try:
            self.thread.ask(lambda _: None)
        except KvflowError as error:
            # Every room of a closed thread has ended.
            log.debug("the node is closed: %s", error)

    def teardown(self) -> None:
        """End the node, for SGLang's change of roles.

        Raises: RuntimeError if a peer may still write into the KV cache or its staging. SGLang then
        marks the server as unhealthy, and it must be restarted.
        """
        unproven = self._close()
        self._zmq_ctx.destroy(linger=0)
        if unproven:
            what = "the staging of this KV cache" if self._staging else "this KV cache"
            raise RuntimeError(
                f"{len(unproven)} loans of pages are without proof: a prefill may still write into "
                f"{what}, so the process must end before it is used"
            )
