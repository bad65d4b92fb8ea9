"""Pages as files in a local directory.

    DIRECTORY/<identity>/lock                       locked by the process that uses the folder
    DIRECTORY/<identity>/writing/<number>           a file that is still being written
    DIRECTORY/<identity>/3f/<key>.<number>          a page: the header of `record`, then its bytes

**A torn write is never read back.** A file is written under `writing/` and renamed when it is
complete. So a process that is killed leaves whole pages, and files under `writing/` that the next
start removes. Damage from a machine crash or a faulty disk is found when a file is read: if its
header or checksum is wrong, the file is removed and the page counts as absent.

**fsync** is off by default: the bytes survive the process anyway, and a cache may lose pages. A
disk error during the kernel's write-back is then noticed only at the next read. With `sync`,
each file is synced before its rename, and its folder after it, so that a stored page survives a
crash of the machine. That costs 1 to 7 ms per page on a virtual disk, instead of 0.1 ms.

**One process** has the list of files, their order of use and their total size in its memory. A
second process would evict files that the first one lists, so a lock keeps it out. The kernel
releases the lock when its owner exits. Ranks and roles that hold different parts of a model have
different identities, so they can share DIRECTORY. Each has its own capacity.

The order of use survives a restart: a read sets the modification time of the file.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from kvflow.protocols.errors import MisuseError
from kvflow.serve.cache.storage.disk import Disk
from kvflow.serve.cache.storage.file_index import Entry, FileIndex
from kvflow.serve.cache.storage.port import Result
from kvflow.serve.cache.storage.record import HEADER_BYTES, flaw_in, header_of

# A file occupies whole blocks of the file system, so the capacity is counted in blocks.
BLOCK_BYTES = 4096
# Pages in one call of the backend. The call cannot be stopped. It takes some 10 ms, or 30 ms with
# `sync`.
PAGES_AT_ONCE, SYNCED_AT_ONCE = 64, 4
_FILE = re.compile(r"([0-9a-f]{64})\.([1-9][0-9]{0,17})")
_WRITING = re.compile(r"[1-9][0-9]{0,17}")
log = logging.getLogger("kvflow.storage")


class FileBackend:
    """A `port.Backend` over a local directory."""

    name = "file"

    def __init__(
        self,
        directory: str,
        identity: bytes,
        value_bytes: int,
        capacity_bytes: int,
        *,
        sync: bool = False,
        disk: Disk | None = None,
    ) -> None:
        """Make a store for pages of `value_bytes`. The disk is not touched before `open`.

        `identity` comes from `identity.identity_of`. Pages occupy at most `capacity_bytes`. The
        least recently used ones are evicted first. Raises: MisuseError.
        """
        self.value_bytes, self.identity = value_bytes, identity
        self.pages_at_once = SYNCED_AT_ONCE if sync else PAGES_AT_ONCE
        file_bytes = -(-(HEADER_BYTES + value_bytes) // BLOCK_BYTES) * BLOCK_BYTES
        if value_bytes < 1 or capacity_bytes < file_bytes:
            raise MisuseError(
                f"capacity_bytes {capacity_bytes} does not hold one page, which takes {file_bytes} "
                "bytes"
            )
        self._root, self._sync, self._disk = directory, sync, disk or Disk()
        self._folder = os.path.join(directory, identity.hex()[:32])
        self._writing = os.path.join(self._folder, "writing")
        self._index = FileIndex(capacity_bytes, file_bytes)
        self._lock: int | None = None

    def __repr__(self) -> str:
        return f"<FileBackend in {self._folder}: {len(self._index)} pages, {self.used_bytes} bytes>"

    @property
    def used_bytes(self) -> int:
        return self._index.used_bytes

    def open(self) -> None:
        """Take the lock, remove incomplete files, and list the pages (some 10 us per file).

        Raises: MisuseError if the directory cannot be used, or another process uses it.
        """
        try:
            for folder in (self._folder, self._writing, *(self._shard(n) for n in range(256))):
                os.makedirs(folder, mode=0o700, exist_ok=True)
            self._lock = self._locked()
            self._clean()
        except OSError as error:
            self.close()
            raise MisuseError(
                f"storage directory {self._folder}: {error.strerror or error}"
            ) from None
        others = sum(entry.is_dir() for entry in os.scandir(self._root)) - 1
        if others:
            log.info(
                "storage directory %s also holds pages of %d other models or layouts",
                self._root,
                others,
            )

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        return self._until_failed(self._put_one, keys, buffers)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Result]:
        return self._until_failed(self._get_one, keys, buffers)

    def exists(self, keys: Sequence[bytes]) -> list[Result]:
        """Look the keys up in memory. A missing or damaged file is noticed only when it is read."""
        return [Result.DONE if there else Result.ABSENT for there in self._index.has(keys)]

    def probe_reads(self) -> None:
        """Read the most recently used page. A damaged page is a success: the disk can be read."""
        if (entry := self._index.last_used()) is None:
            os.stat(self._folder)
        elif self._get_one(entry.key, memoryview(bytearray(self.value_bytes))) is Result.FAILED:
            raise OSError(f"page {entry.key.hex()} cannot be read")

    def probe_writes(self) -> None:
        entry = self._index.probe()
        try:
            parts: list[bytes | memoryview] = [bytes(HEADER_BYTES), bytes(self.value_bytes)]
            self._disk.write_new(self._unfinished(entry), parts, sync=self._sync)
        finally:
            removed = self._remove([entry])
            self._index.abandon()
        if not removed:
            raise OSError("a file cannot be removed")

    def _put_one(self, key: bytes, value: memoryview) -> Result:
        if self._index.find(key) is not None:
            return Result.DONE
        entry, leaving = self._index.reserve(key)
        # Evicted files are removed before the new one is written, to stay within the capacity.
        if not self._remove(leaving):
            if entry is not None:
                self._index.abandon()
            return Result.FAILED
        if entry is None:
            return Result.ABSENT
        written = False
        try:
            parts: list[bytes | memoryview] = [header_of(self.identity, key, value), value]
            self._disk.write_new(self._unfinished(entry), parts, sync=self._sync)
            self._disk.rename(self._unfinished(entry), self._place(entry), sync=self._sync)
            written = self._index.commit(entry)
        finally:
            if not written:
                self._remove([entry])
                self._index.abandon()
        return Result.DONE

    def _get_one(self, key: bytes, value: memoryview) -> Result:
        if (entry := self._index.find(key)) is None:
            return Result.ABSENT
        header = bytearray(HEADER_BYTES)
        try:
            size = self._disk.read(self._place(entry), header, value)
        # Another thread evicted the file after the lookup, or an operator removed it.
        except FileNotFoundError:
            self._index.drop(entry)
            return Result.ABSENT
        expected = HEADER_BYTES + self.value_bytes
        if size != expected:
            flaw = f"{size} bytes"
        else:
            flaw = flaw_in(bytes(header), self.identity, key, value)
        if not flaw:
            return Result.DONE
        # Several threads may find the damage. Only the one that drops the entry removes the file.
        if self._index.drop(entry):
            log.warning("storage: %s is damaged, and removed: %s", self._place(entry), flaw)
            self._remove([entry])
        return Result.DAMAGED

    def _until_failed(
        self,
        one: Callable[[bytes, memoryview], Result],
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
    ) -> list[Result]:
        results = [Result.FAILED] * len(keys)
        for n, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            try:
                results[n] = one(key, buffer)
            except OSError as error:
                log.warning("storage directory %s: %s", self._folder, error.strerror or error)
            if results[n] is Result.FAILED:
                break
        return results

    def _remove(self, entries: Sequence[Entry]) -> bool:
        """Remove files that are no longer listed. Stop at the first failure, and return False.

        The files that could not be removed still count as used.
        """
        for n, entry in enumerate(entries):
            try:
                self._disk.remove(self._unfinished(entry))
                self._disk.remove(self._place(entry))
            except OSError as error:
                log.warning("storage directory %s: %s", self._folder, error.strerror or error)
                self._index.not_removed(entries[n:])
                return False
        return True

    def _shard(self, first: int) -> str:
        return os.path.join(self._folder, f"{first:02x}")

    def _place(self, entry: Entry) -> str:
        return os.path.join(self._shard(entry.key[0]), f"{entry.key.hex()}.{entry.number}")

    def _unfinished(self, entry: Entry) -> str:
        return os.path.join(self._writing, str(entry.number))

    def _locked(self) -> int:
        lock = os.open(os.path.join(self._folder, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        with ExitStack() as stack:
            # The folder must not stay locked if a write below fails, for example on a full disk.
            stack.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
                raise MisuseError(
                    f"storage directory {self._folder} is in use by process {owner or 'unknown'}: "
                    "give each process a directory of its own"
                ) from None
            # A process that cannot take the lock reads this id for its error message.
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            stack.pop_all()
        return lock

    def _clean(self) -> None:
        for unfinished in os.scandir(self._writing):
            if _WRITING.fullmatch(unfinished.name):
                self._disk.remove(unfinished.path)
        found = sorted(self._found())
        self._remove(self._index.rebuild(entry for _, entry in found))

    def _found(self) -> Iterator[tuple[int, Entry]]:
        """Yield every page with the time of its last use, in nanoseconds.

        Page files of a wrong size are removed, and files with other names are left alone.
        """
        for first in range(256):
            for file in os.scandir(self._shard(first)):
                match = _FILE.fullmatch(file.name)
                if match is None or int(match[1][:2], 16) != first:
                    continue
                stat = file.stat()
                if stat.st_size == HEADER_BYTES + self.value_bytes:
                    yield stat.st_mtime_ns, Entry(bytes.fromhex(match[1]), int(match[2]))
                else:
                    self._disk.remove(file.path)
