"""The shards of one stage: a gloo group on the loopback interface, over which transformers' layers
add up partial results.

If a shard dies, its connections close, which ends the waits of the others. If a shard merely does
not answer, the others wait until the group's timeout or until `abort`. gloo has no call that aborts
a wait, so `abort` shuts down the connections themselves.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kvflow.protocols.errors import LostError, MisuseError
from kvflow.serve.engine.model.parallel.agreement import Agreement
from kvflow.serve.engine.model.parallel.part import Meeting, ModelPart

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_LOOPBACK = "lo"
_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


class ShardGroup:
    """The gloo group of this process's stage.

    A process has at most one, since it is torch's default group.
    """

    def __init__(self, part: ModelPart, meeting: Meeting, agreement: Agreement) -> None:
        """Join the group, and block until all shards join.

        Raises: MisuseError if this process is in a group already, LostError if the shards do not
        find each other.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.distributed_c10d import PrefixStore

        if dist.is_initialized():
            raise MisuseError(
                "this process is in a group of torch.distributed already: it can run one shard only"
            )
        self.part, self._lock = part, threading.Lock()
        store = PrefixStore(f"shards/{part.stage}/{meeting.attempt}", agreement.store)
        before = _open_files()
        try:
            with _on_loopback():
                dist.init_process_group(
                    "gloo",
                    store=store,
                    rank=part.shard,
                    world_size=part.shards,
                    timeout=timedelta(seconds=meeting.collective_timeout_s),
                )
        except RuntimeError as error:
            raise LostError(
                f"the shards of stage {part.stage} do not find each other: {_first_line(error)}"
            ) from None
        self.mesh: DeviceMesh = init_device_mesh("cpu", (part.shards,), mesh_dim_names=("tp",))
        self._connections = _connections(before, store, part)

    def abort(self) -> None:
        """End every wait of a shard for another one, in all processes of the group.

        The group is unusable afterwards. Any thread may call this.
        """
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        import torch.distributed as dist

        # Shut the connections down first, because destroying the group waits for the other shards.
        self.abort()
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections = []
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Make gloo listen on the loopback interface.

    gloo uses the interface that the environment names, or else the interface of the host name.
    """
    before = os.environ.get(_INTERFACE_VARIABLE)
    os.environ[_INTERFACE_VARIABLE] = _LOOPBACK
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INTERFACE_VARIABLE]
        else:
            os.environ[_INTERFACE_VARIABLE] = before


def _open_files() -> set[int]:
    # Listing the directory opens a descriptor too, so count only those that still exist.
    return {
        number
        for number in map(int, os.listdir("/proc/self/fd"))
        if os.path.exists(f"/proc/self/fd/{number}")
    }


def _connections(before: set[int], store: Any, part: ModelPart) -> list[socket.socket]:
    """Return duplicates of the group's sockets to the other shards.

    Other threads may open connections meanwhile. So the shards exchange the addresses of their new
    connections, and keep a connection only if another shard lists its other end.
    """
    import msgspec

    opened: dict[tuple[str, str], socket.socket] = {}
    for number in _open_files() - before:
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            found = socket.socket(fileno=os.dup(number))
            try:
                opened[str(found.getsockname()), str(found.getpeername())] = found
            except OSError:
                found.close()
    store.set(f"connections/{part.shard}", msgspec.json.encode(list(opened)).decode())
    theirs: set[tuple[str, str]] = set()
    for shard in set(range(part.shards)) - {part.shard}:
        theirs.update(
            msgspec.json.decode(store.get(f"connections/{shard}"), type=list[tuple[str, str]])
        )
    kept = []
    for (here, there), found in opened.items():
        if (there, here) in theirs:
            kept.append(found)
        else:
            found.close()
    return kept


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
