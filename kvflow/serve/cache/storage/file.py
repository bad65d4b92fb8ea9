"""Pages as files of a local directory.

    DIRECTORY/<identity>/lock                       held by the process that uses it
    DIRECTORY/<identity>/writing/<number>           not whole yet
    DIRECTORY/<identity>/3f/<key>.<number>          a page: the header of `record`, then its bytes

**A torn write is never read back.** A file is written under `writing/` and renamed when it is
whole, so that a process killed at any moment leaves a whole page or none. What is left under
`writing/` is removed at the next start. What a crash of the machine, or the medium, makes of a file
is found when it is read: header, key, identity, length and checksum must be right, or the file is
removed and the page is not there.

**fsync.** Not by default: the bytes survive the process anyway, a page that a crash of the machine
tears is found by its checksum, and a cache may lose pages. The price: an error of the medium that
the kernel meets when it writes its buffers out is seen by who reads, not by who wrote. With `sync`
each file is synced before its rename, and its folder after it: what was reported as stored survives
a crash of the machine. That costs 1 to 7 ms a page on a virtual disk, and 0.1 ms without.

**One process.** Which files there are, their order of use and their total are in the memory of one
process. A second one would evict what the first believes to have, and neither would keep to the
capacity; so it is refused, by a lock that ends with the process. Ranks and roles of one machine
that hold different parts of a model have different identities, and may share DIRECTORY; each keeps
to a capacity of its own.

Files of pages that were never read in this process have the order of their last change: reading one
sets it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence

from kvflow.protocols.errors import MisuseError
from kvflow.serve.cache.storage.disk import Disk
from kvflow.serve.cache.storage.file_index import Entry, FileIndex
from kvflow.serve.cache.storage.port import Result
from kvflow.serve.cache.storage.record import HEADER_BYTES, flaw_in, header_of

BLOCK_BYTES = 4096  # of a file system: files are counted in whole ones
PAGES_AT_ONCE, SYNCED_AT_ONCE = 64, 4  # some 10 ms, or 30 ms
_FILE = re.compile(r"([0-9a-f]{64})\.([1-9][0-9]{0,17})")
_WRITING = re.compile(r"[1-9][0-9]{0,17}")
log = logging.getLogger("kvflow.storage")


class FileBackend:
    """Implements `port.Backend`."""

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
        """`identity` as `identity.identity_of` gives it, of pages of `value_bytes`; files take no
        more than `capacity_bytes`, those that were not used for longest go first. Raises:
        MisuseError."""
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
        """Of files, those being written included."""
        return self._index.used_bytes

    def open(self) -> None:
        """Takes the lock, removes what was not finished, and finds what is there: some 10 us a
        file.

        Raises: MisuseError for a directory that cannot be used, or that another process uses.
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
        """As it is known here: a file that is gone, or damaged, is found when it is read."""
        return [Result.DONE if there else Result.ABSENT for there in self._index.has(keys)]

    def probe_reads(self) -> None:
        """Reads a page, whatever it holds."""
        if (entry := self._index.last_used()) is None:
            os.stat(self._folder)
        elif self._get_one(entry.key, memoryview(bytearray(self.value_bytes))) is Result.FAILED:
            raise OSError(f"page {entry.key.hex()} cannot be read")

    def probe_writes(self) -> None:
        """Writes a page, and removes it."""
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
        except FileNotFoundError:  # evicted meanwhile, or removed by hand
            self._index.drop(entry)
            return Result.ABSENT
        expected = HEADER_BYTES + self.value_bytes
        flaw = (
            f"{size} bytes"
            if size != expected
            else flaw_in(bytes(header), self.identity, key, value)
        )
        if not flaw:
            return Result.DONE
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
        """Files that are found no more. False when one cannot be removed: it goes on to count."""
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
        """Raises: MisuseError when another process, or another store of this one, has the lock."""
        lock = os.open(os.path.join(self._folder, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            raise MisuseError(
                f"storage directory {self._folder} is in use by process {owner or 'unknown'}: give "
                "each process a directory of its own"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        return lock

    def _clean(self) -> None:
        for unfinished in os.scandir(self._writing):
            if _WRITING.fullmatch(unfinished.name):
                self._disk.remove(unfinished.path)
        found = sorted(self._found())
        self._remove(self._index.rebuild(entry for _, entry in found))

    def _found(self) -> Iterator[tuple[int, Entry]]:
        """Every page, with when it was used last.

        Files of another size are removed, what is no page is left alone.
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
