"""The calls of `mori.io` that the plane makes, with the signatures it publishes (ROCm/mori
624002c), on host memory.

Transfers are carried out by a thread of the engine, and end where theirs do: in the TransferStatus
that a call has returned, which the caller has to keep. A wrong argument raises, or ends the thread,
as does a status that was dropped.
"""

from __future__ import annotations

import enum
import itertools
import os
import queue
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Self

import msgspec

from tests.transports import host_memory

_Item = tuple[
    Callable[[int, int, int, int], None],
    int,
    list[tuple[int, int, int]],
    "weakref.ref[TransferStatus]",
]


class BackendType(enum.Enum):
    XGMI, RDMA, TCP, FABRIC = 1, 2, 3, 4


class MemoryLocationType(enum.Enum):
    CPU, GPU = 1, 2


class StatusCode(enum.IntEnum):
    SUCCESS, INIT, IN_PROGRESS = 0, 1, 2
    ERR_INVALID_ARGS, ERR_NOT_FOUND, ERR_RDMA_OP, ERR_BAD_STATE = 11, 12, 13, 14


class TransferStatus:
    def __init__(self) -> None:
        self._code, self._message = StatusCode.INIT, ""

    def Code(self) -> StatusCode:  # noqa: N802 - as published, here and below
        return self._code

    def Message(self) -> str:  # noqa: N802
        return self._message

    def InProgress(self) -> bool:  # noqa: N802
        return self._code is StatusCode.IN_PROGRESS

    def Succeeded(self) -> bool:  # noqa: N802
        return self._code is StatusCode.SUCCESS

    def Failed(self) -> bool:  # noqa: N802
        return self._code > 10

    def update(self, code: StatusCode, message: str = "") -> None:
        self._code, self._message = code, message


class IOEngineConfig:
    def __init__(self, host: str = "", port: int = 0) -> None:
        self.host, self.port = host, port


class RdmaBackendConfig:
    def __init__(
        self,
        qp_per_transfer: int = 1,
        post_batch_size: int = -1,
        num_worker_threads: int = -1,
        poll_cq_mode: int = 0,
        enable_notification: bool = True,
        notif_per_qp: int = 1024,
        enable_transfer_chunking: bool = False,
        chunk_bytes: int = 65536,
        max_chunks_per_transfer: int = 64,
        num_nics_per_transfer: int = 1,
    ) -> None:
        self.enable_notification = enable_notification


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        return msgspec.msgpack.decode(packed, type=cls)


class EngineDesc(_Packed, frozen=True):
    key: str
    host: str
    port: int
    pid: int


class MemoryDesc(_Packed, frozen=True):
    engine_key: str
    id: int
    device_id: int
    data: int
    size: int
    loc: int


class IOEngineSession:
    def __init__(self, engine: IOEngine, local: MemoryDesc, remote: MemoryDesc, pid: int) -> None:
        self._engine, self._local, self._remote, self._pid = engine, local, remote, pid

    def allocate_transfer_uid(self) -> int:
        return next(self._engine.uids)

    def read(
        self, local_offset: int, remote_offset: int, size: int, transfer_uid: int
    ) -> TransferStatus:
        return self._start(host_memory.read, [local_offset], [remote_offset], [size], transfer_uid)

    def batch_write(
        self,
        local_offsets: list[int],
        remote_offsets: list[int],
        sizes: list[int],
        transfer_uid: int,
    ) -> TransferStatus:
        return self._start(host_memory.write, local_offsets, remote_offsets, sizes, transfer_uid)

    def _start(
        self,
        copy: Callable[[int, int, int, int], None],
        ours: list[int],
        theirs: list[int],
        sizes: list[int],
        uid: int,
    ) -> TransferStatus:
        assert len(ours) == len(theirs) == len(sizes) > 0 and isinstance(uid, int)
        status = TransferStatus()
        status.update(StatusCode.IN_PROGRESS)
        for here, there, size in zip(ours, theirs, sizes, strict=True):
            if (
                here + size > self._local.size
                or there + size > self._remote.size
                or min(here, there) < 0
            ):
                status.update(StatusCode.ERR_INVALID_ARGS, "length out of range")
                return status
        blocks = [
            (self._local.data + a, self._remote.data + b, size)
            for a, b, size in zip(ours, theirs, sizes, strict=True)
        ]
        self._engine.work.put((copy, self._pid, blocks, weakref.ref(status)))
        return status


class IOEngine:
    def __init__(self, key: str, config: IOEngineConfig) -> None:
        self._key, self._config = key, config
        self._memory: dict[int, MemoryDesc] = {}
        self._remote: dict[str, EngineDesc] = {}
        self._ids, self.uids = itertools.count(1), itertools.count(1)
        self.work: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._listening: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def create_backend(self, type: BackendType, config: RdmaBackendConfig | None = None) -> None:
        assert type is BackendType.RDMA and config is not None
        assert not config.enable_notification, "nobody takes them"
        self._listening = socket.create_server((self._config.host, self._config.port))
        self._thread = threading.Thread(
            target=_carry_out, args=(self.work,), name="stub-mori", daemon=True
        )
        self._thread.start()

    def remove_backend(self, type: BackendType) -> None:
        if self._thread is not None and self._listening is not None:
            self.work.put(None)
            self._thread.join()
            self._listening.close()
            self._thread = self._listening = None

    def get_engine_desc(self) -> EngineDesc:
        assert self._listening is not None
        return EngineDesc(
            self._key, self._config.host, self._listening.getsockname()[1], os.getpid()
        )

    def register_memory(
        self, ptr: int, size: int, device_id: int, mem_loc: MemoryLocationType
    ) -> MemoryDesc:
        assert mem_loc is MemoryLocationType.CPU and device_id == -1, "host memory has no device"
        made = MemoryDesc(self._key, next(self._ids), device_id, ptr, size, mem_loc.value)
        self._memory[made.id] = made
        return made

    def deregister_memory(self, mem_desc: MemoryDesc) -> None:
        del self._memory[mem_desc.id]

    def register_remote_engine(self, engine_desc: EngineDesc) -> None:
        self._remote[engine_desc.key] = engine_desc

    def deregister_remote_engine(self, engine_desc: EngineDesc) -> None:
        self._remote.pop(engine_desc.key, None)

    def create_session(
        self, local_mem: MemoryDesc, remote_mem: MemoryDesc
    ) -> IOEngineSession | None:
        remote = self._remote.get(remote_mem.engine_key)
        if remote is None:
            return None
        assert local_mem.id in self._memory
        socket.create_connection((remote.host, remote.port), timeout=5).close()
        return IOEngineSession(self, local_mem, remote_mem, remote.pid)


go_on = threading.Event()  # cleared by a test: transfers stay under way
go_on.set()


def _carry_out(work: queue.SimpleQueue[_Item | None]) -> None:
    while (item := work.get()) is not None:
        go_on.wait()
        copy, pid, blocks, kept = item
        try:
            for ours, theirs, size in blocks:
                copy(pid, ours, theirs, size)
            code, message = StatusCode.SUCCESS, ""
        except OSError as error:
            code, message = StatusCode.ERR_RDMA_OP, str(error)
        status = kept()
        assert status is not None, "the plane has dropped a status that the engine writes"
        status.update(code, message)
        del status
