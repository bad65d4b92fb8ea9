"""A prefill and a decode of SGLang as the backend sees them: managers over real nodes, and requests
that are stepped as SGLang's queues step them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvflow.memory.shared import SharedSegment
from kvflow.transports.data import select
from tests.connectors.vllm.worker_pair import Gate, GatedPlane
from tests.fakes import sglang

PAGES, PAGE_SIZE, LAYER_BYTES, LAYERS = 32, 4, 64, 3
PATIENCE_S = 20.0
ROOM = 7
PROMPT = list(range(100, 110))  # 2.5 pages
SLOT_BYTES = (64, 8)
WINDOW_PAGES, ROWS = 6, 3


class Cache:
    """One server's buffers: in every layer, page p holds `first` + p, or 0 without `first`.

    With `states`, page p of the sliding window holds 100 + p, and row r of Mamba 200 + r.
    """

    def __init__(self, first: int = 0, *, states: bool = False) -> None:
        size_bytes = PAGES * LAYER_BYTES * LAYERS
        self.segment = SharedSegment.create(size_bytes + WINDOW_PAGES * 32 + ROWS * 48)
        flat = np.frombuffer(self.segment.memory, np.uint8)
        self.layers = flat[:size_bytes].reshape(LAYERS, PAGES, LAYER_BYTES)
        self.window = flat[size_bytes : size_bytes + WINDOW_PAGES * 32].reshape(WINDOW_PAGES, 32)
        self.rows = flat[-ROWS * 48 :].reshape(ROWS, 48)
        if first:
            self.layers[:] = np.arange(first, first + PAGES, dtype=np.uint8)[None, :, None]
            self.window[:] = np.arange(100, 100 + WINDOW_PAGES, dtype=np.uint8)[:, None]
            self.rows[:] = np.arange(200, 200 + ROWS, dtype=np.uint8)[:, None]
        kept = {"swa": self.window, "mamba": self.rows} if states else {}
        self.slots = [np.zeros((8, size), np.uint8) for size in SLOT_BYTES]
        self.args = SimpleNamespace(
            kv_data_ptrs=[layer.ctypes.data for layer in self.layers],
            kv_data_lens=[layer.nbytes for layer in self.layers],
            kv_item_lens=[LAYER_BYTES] * LAYERS,
            kv_cache_dtype_str="bfloat16",
            kv_layout=None,
            page_size=PAGE_SIZE,
            state_types=[SimpleNamespace(value=kind) for kind in kept],
            state_data_ptrs=[[array.ctypes.data] for array in kept.values()],
            state_data_lens=[[array.nbytes] for array in kept.values()],
            state_item_lens=[[array.shape[1]] for array in kept.values()],
            aux_data_ptrs=[slot.ctypes.data for slot in self.slots],
            aux_data_lens=[slot.nbytes for slot in self.slots],
            aux_item_lens=list(SLOT_BYTES),
            ib_device=None,
            gpu_id=0,
            pp_rank=0,
        )


class Request:
    """One request at both servers."""

    def __init__(self, pair: Pair, room: int, prompt: list[int], other: list[int] | None) -> None:
        self.pair, self.prompt = pair, prompt
        self._prefill = SimpleNamespace(origin_input_ids=prompt, multimodal_inputs=None)
        asked = other or prompt
        self._decode = SimpleNamespace(origin_input_ids=asked, multimodal_inputs=None)
        self._room = room
        self.sender: Any = None
        self.receiver: Any = None

    def at_prefill(self) -> None:
        with self.pair.prefill.prompts.holding(self._prefill):
            self.sender = self.pair.sender_class(
                self.pair.prefill, self.pair.address, bootstrap_room=self._room
            )

    def at_decode(self, *, init: bool = True) -> None:
        with self.pair.decode.prompts.holding(self._decode):
            self.receiver = self.pair.receiver_class(
                self.pair.decode, self.pair.address, self._room
            )
        if init:
            self.receiver.init(0)

    def lend(self, *pages: int, slot: int = 5, prefix: int = 0, states: Any = ()) -> None:
        self.receiver.send_metadata(
            np.array(pages, np.int32), slot, list(states), decode_prefix_len=prefix
        )

    def match(self, *pages: int, slot: int = 2, prefix: int = 0, states: Any = ()) -> None:
        """Both halves are there, and prefill may send."""
        self.at_prefill()
        self.at_decode()
        self.lend(*pages, prefix=prefix, states=states)
        self.pair.until(lambda: self.sender.poll() == sglang.KVPoll.WaitingForInput)
        assert self.sender.pop_decode_prefix_len() == prefix
        self.sender.init(len(pages), slot)

    def send(self, *pages: int, last: bool = True, states: Any = ()) -> None:
        given = list(states) if last else None
        self.sender.send(np.array(pages, np.int64), given, num_kv_tokens=1)

    def ends(self, side: Any, state: int) -> None:
        self.pair.until(lambda: side.poll() in (sglang.KVPoll.Failed, sglang.KVPoll.Success))
        assert side.poll() == state

    def reason(self, side: Any) -> str:
        """Why it failed, as SGLang is told."""
        self.ends(side, sglang.KVPoll.Failed)
        with pytest.raises(sglang.KVTransferError) as raised:
            side.failure_exception()
        assert raised.value.bootstrap_room == self._room
        return str(raised.value)


class Pair:
    def __init__(
        self, modules: Any, prefill: Any, decode: Any, server: Any, gate: Gate, *caches: Cache
    ) -> None:
        from kvflow.connectors.sglang.receiver import KvflowReceiver
        from kvflow.connectors.sglang.sender import KvflowSender

        self.sender_class: Any = KvflowSender
        self.receiver_class: Any = KvflowReceiver
        self.modules, self.prefill, self.decode, self.server = modules, prefill, decode, server
        self.gate, (self.source, self.target) = gate, caches
        self.address = server.url.removeprefix("http://")

    def request(
        self, room: int = ROOM, prompt: list[int] | None = None, other: list[int] | None = None
    ) -> Request:
        return Request(self, room, prompt or PROMPT, other)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = monotonic() + PATIENCE_S
        while not condition():
            assert monotonic() < deadline, f"it did not happen within {PATIENCE_S:g} s"
            sleep(0.002)

    def until_rest(self) -> None:
        threads = self.prefill.thread, self.decode.thread
        self.until(lambda: all(thread.pages.at_rest() for thread in threads))

    def until_abort_arrives(self) -> None:
        """Prefill knows that decode gave a room up, while a write of it still runs."""

        def phases(node: Any) -> set[str]:
            return set(node.rooms_by_phase())

        self.until(lambda: "transferring" not in self.prefill.thread.ask(phases))

    @property
    def lent(self) -> list[int]:
        return sorted(self.decode.thread.pages.busy(range(PAGES)))

    def landed(self, *pages: int) -> list[int]:
        """What all bytes of each of decode's pages hold, or -1 for a page whose bytes differ, as
        they do while it is written.
        """
        found = [self.target.layers[:, page].flatten() for page in pages]
        return [int(page[0]) if (page == page[0]).all() else -1 for page in found]


@contextmanager
def pair(
    monkeypatch: pytest.MonkeyPatch,
    *,
    first: int = 1,
    states: bool = False,
    radix: bool = False,
    **environment: object,
) -> Iterator[Pair]:
    """Prefill's page p holds p + 1. At the end both are at rest, and nothing is owed.

    With `radix`, decode keeps prefixes.
    """
    modules = sglang.install(monkeypatch)
    disagg: Any = modules["sglang.srt.runtime_context"]
    disagg.get_disagg().disaggregation_decode_enable_radix_cache = radix
    values = {"TRANSFER_BACKEND": "local", "FINGERPRINT": "m", "LOST_AFTER_S": 60, **environment}
    for name, value in values.items():
        monkeypatch.setenv(f"KVFLOW_SGLANG_{name}", str(value))
    from kvflow.connectors.sglang import nodes, queues, shared_pools
    from kvflow.connectors.sglang.bootstrap import KvflowBootstrapServer
    from kvflow.connectors.sglang.manager import KvflowManager

    gate, (source, target) = Gate(), (Cache(first, states=states), Cache(states=states))
    monkeypatch.setattr(shared_pools, "_segments", [target.segment])

    def open_plane(name: str, segment: Any, *rest: Any) -> Any:
        return GatedPlane(gate) if segment is None else select.open_plane(name, segment, *rest)

    monkeypatch.setattr(nodes, "open_plane", open_plane)
    server: Any = KvflowBootstrapServer("127.0.0.1", 0)
    base: Any = vars(modules["sglang.srt.disaggregation.common.conn"])["CommonKVManager"]
    base.bootstrap_url = server.url
    served = SimpleNamespace(served_model_name="tiny", model_path="nowhere", enable_hisparse=False)
    mode, interval_s = sglang.DisaggregationMode, sys.getswitchinterval()
    # As long as a prompt of 1.5 pages, so that a prompt may have pages outside it.
    monkeypatch.setattr(queues.MODEL, "window_tokens", 6)
    prefill: Any = KvflowManager(source.args, mode.PREFILL, served, True)
    decode: Any = KvflowManager(target.args, mode.DECODE, served, True)
    found = Pair(modules, prefill, decode, server, gate, source, target)
    try:
        yield found
        gate.open.set()
        found.until_rest()
        found.until(lambda: not prefill.thread._rooms and not decode.thread._rooms)
        assert decode.is_abort_release_safe(ROOM, 1)
    finally:
        gate.open.set()
        for manager in (decode, prefill):
            manager.teardown()
        server.close()
        sys.setswitchinterval(interval_s)
        alive = [each.name for each in threading.enumerate()]
        assert not [
            name for name in alive if name.startswith(("kvflow-prefill", "kvflow-decode"))
        ], alive
