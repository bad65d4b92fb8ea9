"""The data plane that uses Mooncake's Ascend transport, between the host memories of machines with
Huawei NPUs, over HCCS or the NPUs' RDMA.

**Never run on hardware.** The calls were checked against kvcache-ai/Mooncake at 3b5a594
(2026-08-22), its Python binding (`transfer_engine_py.cpp`) and `ascend_direct_transport`, and are
tested against a stub of them. The engine and the plane are mooncake's, with these differences:

    initialize(local_hostname, "P2PHANDSHAKE", "ascend", "")
                                  after torch.npu.set_device, in the same thread
    register_memory(buffer_addr, capacity), unregister_memory(..)
                                  also in a thread with that device
    transfer_submit_write(target_hostname, buffer, peer_buffer_address, length),
    transfer_check_status(id)     as on TCP, but no transfer ends within the call that submits it,
                                  so another call probes a peer:
    transfer_sync_read(target_hostname, buffer, peer_buffer_address, length)
                                  returns 0 on success

What status means landed?       Only status 1 from `transfer_check_status`, for each handle: the
                                engine returns it after ADXL's TransferSync succeeded. Whether the
                                bytes are in the target's memory by then is up to CANN, and was not
                                tested.
Can a write outlive its error?  Unknown. A handle ends with -1 after ASCEND_TRANSFER_TIMEOUT (3 s),
                                perhaps after the engine repeated the block; there is no sign that
                                the NPU stopped. So any status but 1 makes the whole write UNPROVEN,
                                and its pages stay in quarantine.
What fences a peer?             Nothing that can be observed from here: HCCS and the NPU's queues
                                are not connections of the host. A lost writer's loans stay in
                                quarantine until the operator declares the writer dead.

The plane needs CANN, an IPv4 address as its host, and the following, which `kvflow doctor` checks:

- a Mooncake built with USE_ASCEND_DIRECT (`pip install mooncake-transfer-engine-npu`), because any
  other build silently uses TCP
- torch_npu
- /etc/hccn.conf
- no MC_FORCE_TCP in the environment, because it would also make Mooncake use TCP
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvflow.protocols.errors import MisuseError
from kvflow.transports.data.mooncake.plane import MooncakePlane, engine_class

WHEEL = "mooncake-transfer-engine-npu"
_HCCN = Path("/etc/hccn.conf")
# The name of the transport's class, which every build with the transport contains.
_MARK = b"AscendDirectTransport"
_PROBE_BYTES = 8


class AscendPlane(MooncakePlane):
    """Implements `protocols.ports.DataPlane`."""

    name = "ascend"
    protocol = "ascend"

    def __init__(
        self,
        host: str = "127.0.0.1",
        rate_limit_bytes_per_s: float | None = None,
        device: str = "",
        *,
        make_engine: Callable[[], Any] | None = None,
        set_device: Callable[[int], None] | None = None,
    ) -> None:
        """Start the engine. `device` is the number of an NPU; empty means 0.

        `make_engine` replaces mooncake's engine class, and `set_device` replaces
        `torch.npu.set_device`.

        Raises: MisuseError naming what this machine lacks, TransferError when the engine does not
        start.
        """
        self._make_engine = make_engine
        self._npu = npu_number(device)
        self._set_device = set_device or _set_npu
        # Probes read into this memory, which is not part of the pool.
        self._scratch = mmap.mmap(-1, mmap.PAGESIZE)
        super().__init__(host, rate_limit_bytes_per_s, device)

    def _load(self) -> Callable[[], Any]:
        if self._make_engine is not None:
            return self._make_engine
        check_ascend(self._host)
        engine: Callable[[], Any] = engine_class(self._host, force_tcp=False)
        return engine

    def _start_engine(self) -> Any:
        self._set_device(self._npu)
        engine = super()._start_engine()
        engine.register_memory(self._scratch_address, mmap.PAGESIZE)
        return engine

    @property
    def _scratch_address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._scratch))

    def _probe(self, engine: Any, session: str, ours: int, theirs: int) -> bool:
        return bool(
            engine.transfer_sync_read(session, self._scratch_address, theirs, _PROBE_BYTES) == 0
        )

    def _unprovable(self) -> str:
        return "HCCS and an NPU's RDMA"

    def _stop(self) -> None:
        # The engine unregisters memory only in a thread that has set the device.
        self._set_device(self._npu)
        super()._stop()
        for engine in self._engines:
            engine.unregister_memory(self._scratch_address)


def npu_number(device: str) -> int:
    """Return the NPU number in `device`; 0 if it is empty. Raises: MisuseError."""
    if device and not (device.isascii() and device.isdigit() and len(device) < 4):
        raise MisuseError(
            f"device {device!r}: the ascend data plane takes the number of an NPU, 0 by default"
        )
    return int(device or 0)


def check_ascend(host: str = "") -> None:
    """Check that this machine has what the plane needs.

    Raises: MisuseError naming what is missing.
    """
    if missing := missing_for_ascend():
        raise MisuseError(f"the ascend data plane cannot be used here: {'; '.join(missing)}")
    if ":" in host:
        raise MisuseError(f"host {host}: Mooncake's Ascend transport speaks IPv4 only")


def missing_for_ascend() -> list[str]:
    """Return what this machine lacks for the plane, as phrases."""
    found = importlib.util.find_spec("mooncake")
    missing = []
    if found is None:
        missing.append(f"mooncake is not installed (pip install {WHEEL})")
    elif not _is_built_for_ascend(Path(next(iter(found.submodule_search_locations or [""])))):
        missing.append(
            f"this mooncake was built without USE_ASCEND_DIRECT (pip install {WHEEL}, in place of "
            "it)"
        )
    if importlib.util.find_spec("torch_npu") is None:
        missing.append("torch_npu is not installed")
    if not _HCCN.exists():
        missing.append(f"{_HCCN} is not there (in a container, mount the host's)")
    if "MC_FORCE_TCP" in os.environ:
        missing.append("MC_FORCE_TCP is set, with which mooncake takes TCP")
    return missing


def _is_built_for_ascend(folder: Path) -> bool:
    return any(
        _MARK in (folder / name).read_bytes() for name in os.listdir(folder) if ".so" in name
    )


def _set_npu(number: int) -> None:
    importlib.import_module("torch_npu")
    importlib.import_module("torch").npu.set_device(number)
