"""Pages in a Mooncake Store: memory that the processes of a cluster lend to each other.

A master knows the location of each page. Every call blocks, for a long time if the store has
trouble, so all of this runs in the threads of `guarded`. Measured with 0.3.13 (TCP, loopback):

- If the master was killed, each call fails after up to 4.3 s. If the master is frozen, calls wait
  until it resumes. The GIL is released in both cases. Once a killed master is back, the client
  reconnects within half a second, but the stored pages are gone, and there is no room until
  clients lend their memory again (after about 1 s).

- `setup` without a master waits for 90 s and **holds the GIL**, which stops the whole process. So a
  child process tries it first. This takes 50 to 100 ms, once. `close` holds the GIL for 2 s.

- A second put of a key has no effect and reports success. So damaged pages are removed when they
  are found.

- A put also reports success for a page that another client is still putting. So after a put, the
  page is looked up before it counts as stored.

**Mooncake's engine never accesses the caller's buffers.** After an error, a transfer may continue
even though its call has returned, and the engine does not report when it ends. So records pass
through memory that this backend never frees. A page is first copied from this memory to the
caller's buffer, and then verified (`record`). So late bytes cannot reach a verified page. The
checksum also protects against an expired lease, against memory that the store has since given to
another page, and against a process that died during its put.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.errors import MisuseError
from kvflow.serve.cache.storage.port import Result
from kvflow.serve.cache.storage.record import HEADER_BYTES, flaw_in, header_of

BATCH_BYTES = 8 << 20  # memory for the pages of one batch; a larger page is a batch by itself
LOCAL_BYTES = 16 << 20
PEER_TO_PEER = "P2PHANDSHAKE"  # clients find each other without a metadata server
CONNECT_S, ASK_S = 0.5, 10.0
MORE_LOOKS, LOOK_S = 5, 0.01
NO_ROOM, NOT_READY, NOT_FOUND = -200, -703, -704
# A get with one of these statuses would fail again, so the record counts as damaged.
OTHER_SIZE, UNREADABLE = -600, -800
# The engine reads these environment variables when it is loaded.
_ENVIRONMENT = {
    "MC_FORCE_TCP": "1",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_LOG_LEVEL": "ERROR",
}
# A late transfer may still access this memory, so it is kept until the process ends.
_KEPT: list[NDArray[np.uint8]] = []
_NOT_INSTALLED = "mooncake is not installed: pip install 'kvflow[mooncake]'"
_ASK = """
import os, sys
from mooncake.store import MooncakeDistributedStore
master, host, metadata, size = sys.argv[1:]
os._exit(bool(MooncakeDistributedStore().setup(host, metadata, 0, int(size), "tcp", "", master)))
"""
log = logging.getLogger("kvflow.storage")


class MooncakeBackend:
    """A `port.Backend` that reaches a Mooncake Store over TCP."""

    name = "mooncake"
    pages_at_once = 256

    def __init__(
        self,
        master: str,
        identity: bytes,
        value_bytes: int,
        *,
        host: str = "127.0.0.1",
        lent_bytes: int = 0,
        metadata_server: str = PEER_TO_PEER,
        local_bytes: int = LOCAL_BYTES,
    ) -> None:
        """Make a store for pages of `value_bytes`. `open` connects it to the master.

        `master` is host:port. Other clients reach this process at `host`. `identity` comes from
        `identity.identity_of`. This process lends `lent_bytes` of memory to the store, for pages of
        any process. These pages are lost when this process exits. All clients must have the same
        `metadata_server`. The client allocates `local_bytes` for its own work. Raises: MisuseError.
        """
        self._address = _parsed(master)
        if value_bytes < 1 or lent_bytes < 0:
            raise MisuseError(
                f"value_bytes {value_bytes} is below 1, or lent_bytes {lent_bytes} below 0"
            )
        self.value_bytes, self.identity = value_bytes, identity
        self._master, self._host, self._lent_bytes = master, host, lent_bytes
        self._metadata_server, self._local_bytes = metadata_server, local_bytes
        self._prefix = f"kvflow/{identity.hex()[:32]}/"
        self._record_bytes = HEADER_BYTES + value_bytes
        self._batch = max(1, min(self.pages_at_once, BATCH_BYTES // value_bytes))
        self._free: SimpleQueue[NDArray[np.uint8]] = SimpleQueue()
        self._connecting, self._numbers = threading.Lock(), itertools.count(1)
        self._client: Any = None

    def __repr__(self) -> str:
        return (
            "<MooncakeBackend of the master "
            f"{self._master}{'' if self._client else ', not connected'}>"
        )

    def open(self) -> None:
        """Load the package, and connect if possible. Raises: MisuseError without the package."""
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            importlib.import_module("mooncake.store")
        except ModuleNotFoundError as error:
            raise MisuseError(_NOT_INSTALLED) from error
        except ImportError as error:
            raise MisuseError(
                f"mooncake cannot be loaded ({error}): apt install libibverbs1 libnuma1 libcurl4"
            ) from error
        try:
            self._connected()
        except OSError as error:
            log.warning("storage mooncake: %s", error)

    def close(self) -> None:
        """Close the client. This holds the GIL for some 2 s."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        return self._in_batches(self._put, keys, buffers)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        return self._in_batches(self._get, keys, buffers)

    def exists(self, keys: Sequence[bytes]) -> list[Result]:
        codes = self._ready().batch_is_exist(self._names(keys))
        return [{1: Result.DONE, 0: Result.ABSENT}.get(code, Result.FAILED) for code in codes]

    def probe_reads(self) -> None:
        if (code := self._connected().batch_is_exist([f"{self._prefix}probe"])[0]) not in (0, 1):
            raise OSError(f"the master does not answer (status {code})")

    def probe_writes(self) -> None:
        client, name = self._connected(), f"{self._prefix}probe-{os.getpid()}-{next(self._numbers)}"
        with self._memory(client) as memory:
            code = client.batch_put_from([name], [memory.ctypes.data], [self._record_bytes])[0]
        if code not in (0, NO_ROOM):
            raise OSError(f"a page cannot be put (status {code})")
        client.remove(name, True)

    def _put(
        self, client: Any, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[Result]:
        names = self._names(keys)
        with self._memory(client) as memory:
            for record, key, buffer in zip(self._records(memory), keys, buffers, strict=False):
                record[:HEADER_BYTES] = np.frombuffer(
                    header_of(self.identity, key, buffer), dtype=np.uint8
                )
                record[HEADER_BYTES:] = np.frombuffer(buffer, dtype=np.uint8)
            codes = client.batch_put_from(names, *self._places(memory, len(keys)))
        # NOT_READY means that another client is putting the page. Neither this status nor success
        # proves that the page is there.
        put = [code in (0, NOT_READY) for code in codes]
        there = iter(_found(client, list(compress(names, put))))
        found = {1: Result.DONE, 0: Result.ABSENT}
        return [
            found.get(next(there), Result.FAILED)
            if is_put
            else Result.ABSENT
            if code == NO_ROOM
            else Result.FAILED
            for code, is_put in zip(codes, put, strict=True)
        ]

    def _get(
        self, client: Any, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> list[Result]:
        names, results = self._names(keys), [Result.FAILED] * len(keys)
        with self._memory(client) as memory:
            codes = client.batch_get_into(names, *self._places(memory, len(keys)))
            for n, record in enumerate(self._records(memory)[: len(keys)]):
                if codes[n] in (NOT_FOUND, NOT_READY):
                    results[n] = Result.ABSENT
                elif codes[n] == self._record_bytes:
                    header = record[:HEADER_BYTES].tobytes()
                    # A late transfer could change `memory` after a check, so the copy is checked.
                    np.frombuffer(buffers[n], dtype=np.uint8)[:] = record[HEADER_BYTES:]
                    flaw = flaw_in(header, self.identity, keys[n], buffers[n])
                    results[n] = Result.DAMAGED if flaw else Result.DONE
                elif codes[n] >= 0 or codes[n] in (OTHER_SIZE, UNREADABLE):
                    results[n] = Result.DAMAGED
        for n, result in enumerate(results):
            if result is Result.DAMAGED:
                log.warning(
                    "storage mooncake: %s is damaged (status %d), and removed", names[n], codes[n]
                )
                client.remove(names[n], True)
        return results

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]

    def _in_batches(
        self,
        call: Callable[[Any, Sequence[bytes], Sequence[memoryview]], list[Result]],
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
    ) -> list[Result]:
        client, results = self._ready(), list[Result]()
        for start in range(0, len(keys), self._batch):
            batch = slice(start, start + self._batch)
            results += call(client, keys[batch], buffers[batch])
        return results

    def _places(self, memory: NDArray[np.uint8], count: int) -> tuple[list[int], list[int]]:
        size = self._record_bytes
        return [memory.ctypes.data + n * size for n in range(count)], [size] * count

    def _records(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return memory.reshape(self._batch, self._record_bytes)

    @contextmanager
    def _memory(self, client: Any) -> Iterator[NDArray[np.uint8]]:
        """Yield registered memory for one batch. It is reused by later batches, and never freed."""
        try:
            memory = self._free.get_nowait()
        except Empty:
            memory = np.zeros(self._batch * self._record_bytes, dtype=np.uint8)
            if status := client.register_buffer(memory.ctypes.data, memory.nbytes):
                raise OSError(
                    f"the engine refuses {memory.nbytes} bytes of memory (status {status})"
                ) from None
            _KEPT.append(memory)
        try:
            yield memory
        finally:
            self._free.put(memory)

    def _ready(self) -> Any:
        # Only `open` and probes connect, since connecting can take longer than a request may wait.
        if self._client is None:
            raise OSError(f"not connected to the master {self._master}")
        return self._client

    def _connected(self) -> Any:
        with self._connecting:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _connect(self) -> Any:
        try:
            # A plain connection reveals an absent master within `CONNECT_S`.
            socket.create_connection(self._address, CONNECT_S).close()
            where = (self._master, self._host, self._metadata_server, str(self._local_bytes))
            arguments = [sys.executable, "-P", "-c", _ASK, *where]
            status = subprocess.run(
                arguments, timeout=ASK_S, capture_output=True, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
        except OSError as error:
            raise OSError(f"the master {self._master} does not answer: {error}") from None
        if status != 0:
            if status is None:
                ended = f"has not ended within {ASK_S:g} s"
            else:
                ended = f"ended with status {status}"
            raise OSError(
                f"nobody can be a client of the master {self._master} with the metadata server "
                f"{self._metadata_server}: a child that tried to {ended}"
            )
        client = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        status = client.setup(
            self._host,
            self._metadata_server,
            self._lent_bytes,
            self._local_bytes,
            "tcp",
            "",
            self._master,
        )
        if status:
            raise OSError(f"the master {self._master} refuses us (status {status})")
        return client


def check_usable(master: str) -> None:
    """Check the address and the package before memory is allocated. Raises: MisuseError."""
    _parsed(master)
    if importlib.util.find_spec("mooncake") is None:
        raise MisuseError(_NOT_INSTALLED)


def _parsed(master: str) -> tuple[str, int]:
    host, _, port = master.rpartition(":")
    if (
        not host
        or "/" in host
        or not port.isascii()
        or not port.isdigit()
        or not 0 < int(port) < 1 << 16
    ):
        raise MisuseError(f"master {master!r} is not host:port with a port in 1..65535")
    return host.strip("[]"), int(port)


def _found(client: Any, names: list[str]) -> list[int]:
    """Return a status per name: 1 if it is in the store, 0 if not, negative for an error."""
    # Another client may be writing the same page. A few more lookups avoid a second put.
    found: list[int] = client.batch_is_exist(names)
    for _ in range(MORE_LOOKS):
        if 0 not in found:
            break
        time.sleep(LOOK_S)
        found = client.batch_is_exist(names)
    return found
