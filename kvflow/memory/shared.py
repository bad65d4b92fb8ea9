"""Shared memory that processes of the same user can open through /proc. It has no name in a file
system, so it cannot outlive its processes.

A shared segment is a sealed memfd. It can neither shrink nor grow, so a process that maps it
never receives SIGBUS. Children do not inherit its mappings (MADV_DONTFORK), and exec closes its
descriptor. So only the process that mapped a segment can write through the mapping: the death of
that process is the fence of the local data plane.

The last page of a segment is not mapped. The owner writes claims to this page: the incarnations of
the nodes whose pool is in the segment. If a peer passes another node's descriptor off as its own,
its claim is missing there, so `open_peer` refuses the descriptor.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import struct
import weakref

from kvflow.memory.available import available_memory
from kvflow.protocols.errors import LayoutError, TransferError

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW
# Available since Linux 5.14, but missing in the mmap module of Python 3.11.
_MADV_POPULATE_WRITE = 23
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_PIECE_BYTES = 16 << 20
_CLAIMS_BYTES = mmap.PAGESIZE
_CLAIM = struct.Struct("<Q")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p


def prefault(address: int, size_bytes: int) -> bool:
    """Fault in `size_bytes` of memory at `address`, piece by piece, with the GIL released.

    Returns False if the kernel cannot do it.
    """
    return _advise(address, size_bytes, _MADV_POPULATE_WRITE)


def _advise(address: int, size_bytes: int, advice: int) -> bool:
    """Call madvise piece by piece, so that no call keeps others from mapping memory for long.

    Returns False if the kernel refuses it.
    """
    return not any(
        _libc.madvise(address + offset, min(_PIECE_BYTES, size_bytes - offset), advice)
        for offset in range(0, size_bytes, _PIECE_BYTES)
    )


class SharedSegment:
    """A mapping of our own memory (`create`, `private`), or of a peer's (`open_peer`).

    `close` closes the descriptor at once. The memory is unmapped when its last view is gone.
    Garbage collection of a segment closes it too.
    """

    def __init__(self, mapping: mmap.mmap, fd: int) -> None:
        """The segment takes over `fd`, which is -1 for memory without a descriptor."""
        self._mapping: mmap.mmap | None = mapping
        self._claims: list[int] = []
        self.fd = fd
        self.size_bytes = len(mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        # An open descriptor keeps the memory allocated, so garbage collection must close it.
        self._close_fd = weakref.finalize(self, os.close, fd) if fd >= 0 else None

    @classmethod
    def create(cls, size_bytes: int) -> SharedSegment:
        """Allocate zeroed, pre-faulted memory that peers can open.

        Raises: LayoutError if there is not enough memory.
        """
        size_bytes = _affordable(_whole_pages(size_bytes))
        fd = os.memfd_create("kvflow-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes + _CLAIMS_BYTES)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
            segment = cls(_map(fd, size_bytes, mmap.MAP_SHARED), fd)
        except (OSError, OverflowError, ValueError) as error:
            os.close(fd)
            raise LayoutError(f"no memory for a pool of {size_bytes} bytes: {error}") from error
        return _own(segment)

    @classmethod
    def private(cls, size_bytes: int) -> SharedSegment:
        """Allocate zeroed, pre-faulted memory that no other process can open (`fd` is -1).

        Raises: LayoutError if there is not enough memory.
        """
        size_bytes = _affordable(_whole_pages(size_bytes))
        try:
            return _own(cls(_map(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), -1))
        except (OSError, OverflowError, ValueError) as error:
            raise LayoutError(f"no memory for a pool of {size_bytes} bytes: {error}") from error

    @classmethod
    def open_peer(
        cls, pid: int, fd: int, owner: int = 0, *, size_bytes: int | None = None
    ) -> SharedSegment:
        """Map the first `size_bytes` of descriptor `fd` of process `pid`, or all of it. This does
        not block; `prefault` does.

        The caller must check before and after the call that `pid` is still the same process.
        `owner` is the incarnation whose claim the segment must carry; 0 skips this check. Raises:
        TransferError if the descriptor cannot be opened, is not a sealed segment, or lacks the
        claim; LayoutError if the segment is smaller.
        """
        try:
            ours = _open_memory(f"/proc/{pid}/fd/{fd}")
        except OSError as error:
            raise TransferError(
                f"cannot open the pool of process {pid}: {error.strerror}"
            ) from error
        if ours < 0:
            raise TransferError(f"descriptor {fd} of process {pid} is not a sealed segment")
        try:
            if fcntl.fcntl(ours, _F_GET_SEALS) & _SEALS != _SEALS:
                raise TransferError(f"descriptor {fd} of process {pid} is not a sealed segment")
            whole = os.fstat(ours).st_size - _CLAIMS_BYTES
            if whole < 1:
                raise TransferError(f"descriptor {fd} of process {pid} has no bytes of a pool")
            if owner and owner not in _read_claims(ours, whole):
                raise TransferError(
                    f"descriptor {fd} of process {pid} is not the pool of {owner:016x}, which "
                    "named it"
                )
            if size_bytes is not None and size_bytes > whole:
                raise LayoutError(f"the pool ends at {size_bytes}, the peer's segment at {whole}")
            return cls(_map_peer(ours, _whole_pages(size_bytes or whole)), -1)
        except OSError as error:
            raise TransferError(f"cannot map the pool of process {pid}: {error}") from error
        finally:
            os.close(ours)

    def __repr__(self) -> str:
        kind = (
            "closed"
            if self._mapping is None
            else "private"
            if self.fd < 0
            else f"descriptor {self.fd}"
        )
        return f"<SharedSegment of {self.size_bytes} bytes at {self.address:#x}, {kind}>"

    @property
    def memory(self) -> mmap.mmap:
        """The mapping as a buffer.

        `np.frombuffer` and `torch.frombuffer` create arrays in it, for
        `PagedPool.wrap(..., segment=)`. Raises: LayoutError after `close`.
        """
        if self._mapping is None:
            raise LayoutError(f"the segment of {self.size_bytes} bytes is closed")
        return self._mapping

    def prefault(self) -> None:
        """Fault in a peer's segment, so that writes need not. 1 GiB takes some 0.15 s. If the
        kernel cannot do it, the first writes fault pages in.
        """
        prefault(self.address, self.size_bytes)

    def close_peer(self) -> None:
        """Close a large segment of a peer. Call it in a thread: 1 GiB takes some 20 ms. Idempotent.

        `close` alone would keep other threads from mapping memory for that time, so this method
        first drops the pages from the mapping, piece by piece. The peer keeps them.
        """
        if self._mapping is None:
            return
        _advise(self.address, self.size_bytes, mmap.MADV_DONTNEED)
        self.close()

    def claim(self, owner: int) -> None:
        """Claim the segment for the node with incarnation `owner`, so that peers can check it.

        Raises: LayoutError if the page of claims is full.
        """
        if len(self._claims) == _CLAIMS_BYTES // _CLAIM.size:
            raise LayoutError(
                f"{len(self._claims)} nodes have claimed this segment, and no more can"
            )
        self._claims.append(owner)
        self._write_claims()

    def disclaim(self, owner: int) -> None:
        """Remove the claim of the node with incarnation `owner`. Idempotent."""
        if owner in self._claims:
            self._claims.remove(owner)
            self._write_claims()

    def _write_claims(self) -> None:
        if self.fd >= 0:
            page = b"".join(map(_CLAIM.pack, self._claims)).ljust(_CLAIMS_BYTES, b"\0")
            os.pwrite(self.fd, page, self.size_bytes)

    def close(self) -> None:
        """Release the descriptor and the mapping. Idempotent."""
        # `mmap.close` would unmap memory that a torch tensor still uses.
        self._mapping = None
        self.fd = -1
        if self._close_fd is not None:
            # A finalizer runs only once, so a second `close` has no effect.
            self._close_fd()


def _open_memory(path: str) -> int:
    """Open another process's memfd, and return our descriptor of it; -1 for any other file.

    This function opens no other file, because the file's server may not answer. The name alone
    proves nothing: any file system can have a file with the name of a memfd. But all memfds are on
    one mount, which the kernel made. Raises: OSError, also if the process holds a lease on the
    memfd.
    """
    if not os.readlink(path).startswith("/memfd:"):
        return -1
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if _mount(place) != _memfd_mount():
            return -1
        return os.open(f"/proc/self/fd/{place}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    finally:
        os.close(place)


def _mount(fd: int) -> bytes:
    """Return the line that numbers the mount of an open file. This asks no file system."""
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        for line in file:
            if line.startswith(b"mnt_id:"):
                return line
    raise OSError(errno.ENOTSUP, "the kernel does not say on which mount a file is")


@functools.cache
def _memfd_mount() -> bytes:
    fd = os.memfd_create("kvflow-mount", os.MFD_CLOEXEC)
    try:
        return _mount(fd)
    finally:
        os.close(fd)


def _read_claims(fd: int, offset: int) -> set[int]:
    return {owner for (owner,) in _CLAIM.iter_unpack(os.pread(fd, _CLAIMS_BYTES, offset)) if owner}


def _whole_pages(size_bytes: int) -> int:
    if size_bytes < 1:
        raise LayoutError(f"a segment of {size_bytes} bytes: at least 1 is needed")
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _affordable(size_bytes: int) -> int:
    """Return `size_bytes` if that much memory is available.

    Memory is pre-faulted, so without this check the kernel would kill a process that asks for too
    much. Raises: LayoutError.
    """
    available = available_memory()
    if available is not None and size_bytes > available.size_bytes:
        raise LayoutError(f"no memory for a pool of {size_bytes} bytes: {available}")
    return size_bytes


def _map(fd: int, size_bytes: int, flags: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, size_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def _map_peer(fd: int, size_bytes: int) -> mmap.mmap:
    """Map a peer's memory, and keep no descriptor of it: a child would inherit the descriptor."""
    # An mmap object of a file duplicates the descriptor. So the file is mapped over the memory of
    # an object that has none.
    mapping = _map(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    prot, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(address, size_bytes, prot, flags, fd, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def _own(segment: SharedSegment) -> SharedSegment:
    if not prefault(segment.address, segment.size_bytes):
        # Older kernels cannot pre-fault. The memory is new and zero, so writing zeros is safe.
        ctypes.memset(segment.address, 0, segment.size_bytes)
    return segment
