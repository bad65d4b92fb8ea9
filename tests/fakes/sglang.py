"""The parts of SGLang 0.5.23 from which kvflow's backend derives, and no model behind them.

What they do was compared with sglang/srt/disaggregation/{common/conn,base/conn,utils}.py and
sglang/srt/plugins/hook_registry.py of that release. tests/sglang runs the same backend in SGLang.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import urllib.request
from collections.abc import Callable
from enum import Enum, StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from aiohttp import web

import kvflow.connectors.sglang

VERSION = "0.5.23"
_LATE = ("bootstrap", "manager", "nodes", "receiver", "sender")


class KVPoll:
    Failed, Bootstrapping, WaitingForInput, Transferring, Success = range(5)


class KVTransferDestination(StrEnum):
    DEVICE = "device"
    HOST = "host"


class DisaggregationMode(Enum):
    NULL = "null"
    PREFILL = "prefill"
    DECODE = "decode"


class KVTransferError(Exception):
    def __init__(self, bootstrap_room: int, failure_reason: str) -> None:
        super().__init__(failure_reason)
        self.bootstrap_room, self.failure_reason = bootstrap_room, failure_reason


class NetworkAddress(NamedTuple):
    host: str
    port: int

    def to_host_port_str(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Socket:
    """SGLang's own control link, which the backend is to close."""

    def __init__(self) -> None:
        self.closed = False

    def close(self, linger: int | None = None) -> None:
        self.closed = True

    def destroy(self, linger: int | None = None) -> None:
        self.closed = True


class CommonKVManager:
    """Its constructor registers a prefill, as SGLang's does, at `bootstrap_url`."""

    bootstrap_url = ""

    def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: Any) -> None:
        self.kv_args, self.server_socket, self._zmq_ctx = args, Socket(), Socket()
        self.failure_records: dict[int, str] = {}
        self.prefill_info_table: dict[str, Any] = {}
        self.waiting_timeout: float = 300
        self.mismatch = ""
        self.attn_tp_size = 1
        self.request_status: Any = {}
        if mode is DisaggregationMode.PREFILL:
            self._register_topology_row(f"{self.bootstrap_url}/route", {"page_size": 1})

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        request = urllib.request.Request(url, json.dumps(payload).encode(), method="PUT")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        if self.mismatch:
            raise RuntimeError(self.mismatch)
        self.prefill_info_table[bootstrap_addr] = SimpleNamespace(attn_tp_size=self.attn_tp_size)
        return True


class CommonKVSender:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("SGLang's own constructor would use SGLang's control link")


class CommonKVReceiver(CommonKVSender):
    pass


class CommonKVBootstrapServer:
    """It serves from its constructor on, in a thread, and answers PUT /route."""

    def __init__(self, host: str, port: int) -> None:
        self.app = web.Application()
        self.rows: list[dict[str, Any]] = []
        self._setup_routes()
        self._loop, ready = asyncio.new_event_loop(), threading.Event()
        self.url = ""

        async def serve() -> None:
            self._runner = web.AppRunner(self.app)
            await self._runner.setup()
            site = web.TCPSite(self._runner, host, port)
            await site.start()
            self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
            ready.set()

        def run() -> None:
            self._loop.run_until_complete(serve())
            self._loop.run_forever()
            self._loop.run_until_complete(self._runner.cleanup())
            self._loop.close()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        assert ready.wait(10)

    def _setup_routes(self) -> None:
        self.app.router.add_route("PUT", "/route", self._put)

    async def _put(self, request: web.Request) -> Any:
        return await self._handle_route_put(request)

    async def _handle_route_put(self, request: web.Request) -> Any:
        self.rows.append(await request.json())
        return web.Response(text="OK")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.thread.join(10)


class HookType(Enum):
    AROUND = "around"


class Queue:
    """One of SGLang's queues: it makes a sender or a receiver of `kv_manager`."""

    def __init__(self, kv_manager: Any, make: Callable[[], Any]) -> None:
        self.kv_manager, self._make = kv_manager, make
        self.deferred_kv_release_timeout = 30.0
        self.deferred: list[Any] = []
        self.queue: list[Any] = []

    def _made(self, request: Any, *args: Any) -> Any:
        return self._make()

    def _added(self, request: Any, *args: Any) -> None:
        """It refuses a request that has a reason to end already."""
        if request.to_finish is None:
            self.queue.append(request)

    def _popped(self) -> list[Any]:
        return list(self.queue)

    def _defer_release(self, request: Any) -> None:
        self.deferred.append((request, self.deferred_kv_release_timeout))


class Scheduler:
    """The scheduler of one server, of which only one queue exists."""

    def __init__(self, *, prefill: Queue | None = None, decode: Queue | None = None) -> None:
        self.disagg_prefill_bootstrap_queue = prefill
        self.disagg_decode_prealloc_queue = decode
        self.idled = 0

    def on_idle(self) -> None:
        self.idled += 1


def new_modules(version: str) -> dict[str, ModuleType]:
    """Return SGLang's modules that the backend imports, by name."""
    utils = {
        "FAKE_BOOTSTRAP_HOST": "2.2.2.2",
        "DisaggregationMode": DisaggregationMode,
        "TransferBackend": Enum("TransferBackend", {"MOONCAKE": "mooncake", "FAKE": "fake"}),
        "KVClassType": Enum(
            "KVClassType",
            {n: n.lower() for n in ("KVARGS", "MANAGER", "SENDER", "RECEIVER", "BOOTSTRAP_SERVER")},
        ),
    }
    base = {
        "KVPoll": KVPoll,
        "KVTransferDestination": KVTransferDestination,
        "KVTransferMetric": SimpleNamespace,
    }
    common = {
        "CommonKVManager": type("CommonKVManager", (CommonKVManager,), {}),
        "CommonKVSender": CommonKVSender,
        "CommonKVReceiver": CommonKVReceiver,
        "CommonKVBootstrapServer": CommonKVBootstrapServer,
        "KVTransferError": KVTransferError,
    }
    hooks: list[tuple[str, Any, Any]] = []
    registry = SimpleNamespace(hooks=hooks, register=lambda *hook: hooks.append(hook))
    choices: list[str] = ["mooncake"]
    parallel = {"attn_tp_rank": 0, "attn_tp_size": 1, "pp_size": 1, "dp_size": 1}
    parallel |= {"attn_dp_size": 1, "attn_cp_size": 1, "attn_dcp_size": 1}
    context = {
        "get_parallel": _returns(**parallel, enable_kv_cache_sharding=False),
        "get_serving": _returns(host="127.0.0.1"),
        "get_device": _returns(device="cpu"),
        "get_disagg": _returns(
            disaggregation_transfer_backend="kvflow",
            disaggregation_mode="decode",
            disaggregation_decode_enable_radix_cache=False,
        ),
    }
    queues = {
        "DecodePreallocQueue": type(
            "DecodePreallocQueue",
            (Queue,),
            {"_create_receiver_and_enqueue": Queue._made, "add": Queue._added},
        ),
        "DecodeTransferQueue": type(
            "DecodeTransferQueue", (Queue,), {"_defer_release": Queue._defer_release}
        ),
    }
    prefill = {
        "PrefillBootstrapQueue": type(
            "PrefillBootstrapQueue",
            (Queue,),
            {
                "add": Queue._added,
                "create_sender": Queue._made,
                "pop_bootstrapped": Queue._popped,
            },
        )
    }
    variables = {
        "SGLANG_RUST_SERVER": False,
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE": True,
        "SGLANG_MOONCAKE_CUSTOM_MEM_POOL": None,
    }
    contents: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.version": {"__version__": version},
        "sglang.srt": {},
        "sglang.srt.arg_groups": {},
        "sglang.srt.arg_groups.choices": {
            "DISAGG_TRANSFER_BACKEND_CHOICES": choices,
            "add_disagg_transfer_backend_choices": choices.extend,
        },
        "sglang.srt.disaggregation": {},
        "sglang.srt.disaggregation.base": {},
        "sglang.srt.disaggregation.base.conn": base,
        "sglang.srt.disaggregation.common": {},
        "sglang.srt.disaggregation.common.conn": common,
        "sglang.srt.disaggregation.decode": queues,
        "sglang.srt.disaggregation.prefill": prefill,
        "sglang.srt.disaggregation.utils": utils,
        "sglang.srt.environ": {
            "envs": SimpleNamespace(
                **{name: SimpleNamespace(get=lambda v=v: v) for name, v in variables.items()}
            )
        },
        "sglang.srt.managers": {},
        "sglang.srt.managers.scheduler": {"Scheduler": type("Scheduler", (Scheduler,), {})},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": HookType},
        "sglang.srt.runtime_context": context,
        "sglang.srt.utils": {},
        "sglang.srt.utils.network": {
            "NetworkAddress": NetworkAddress,
            "get_local_ip_auto": lambda: "10.9.8.7",
        },
    }
    found = {name: ModuleType(name) for name in contents}
    for name, attributes in contents.items():
        vars(found[name]).update(attributes)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(found[parent], own, found[name])
    return found


def _returns(**fields: Any) -> Callable[[], Any]:
    """A function that returns the same object each time, so that a test can change it."""
    found = SimpleNamespace(**fields)
    return lambda: found


def install(monkeypatch: pytest.MonkeyPatch, version: str = VERSION) -> dict[str, ModuleType]:
    """Put the modules in the place of SGLang, and load the backend's modules anew."""
    found = new_modules(version)
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in _LATE:
        monkeypatch.delitem(sys.modules, f"kvflow.connectors.sglang.{name}", raising=False)
        monkeypatch.delattr(kvflow.connectors.sglang, name, raising=False)
    return found
