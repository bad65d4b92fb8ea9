"""Shared memory that a process of the same user can open through /proc, and that has no name to
leak.

A segment is a sealed memfd: it can neither shrink nor grow, so a process that maps it is never hit
by SIGBUS. Children do not inherit mappings (MADV_DONTFORK) and exec closes the descriptor, so only
the process that opened a segment can write through its mapping: the death of that process is the
fence of the local data plane.

Behind the pool is one page that is not mapped, where the owner of the memory names the nodes whose
pool it is. A stranger can name the descriptor as his own, but cannot write there.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import weakref

from kvflow.memory.available import available_memory
from kvflow.protocols.errors import LayoutError, TransferError

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module of Python 3.11 does not name it
_PREFAULT_BYTES = 16 << 20
_CLAIMS_BYTES = mmap.PAGESIZE
_CLAIM = struct.Struct("<Q")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def prefault(address: int, size_bytes: int) -> bool:
    """Back `size_bytes` at `address` with pages, piece by piece and without the GIL.

    Returns False where the kernel cannot.
    """
    for offset in range(0, size_bytes, _PREFAULT_BYTES):
        if _libc.madvise(
            address + offset, min(_PREFAULT_BYTES, size_bytes - offset), _MADV_POPULATE_WRITE
        ):
            return False
    return True


class SharedSegment:
    """One mapping of memory: our own (`create`, `private`), or a peer's (`open_peer`).

    `close` releases the descriptor at once, and the mapping as soon as no view of it is left. A
    segment that is no longer referred to is closed.
    """

    def __init__(self, mapping: mmap.mmap, fd: int) -> None:
        """`fd` belongs to the segment from here on; -1 without one."""
        self._mapping: mmap.mmap | None = mapping
        self._claims: list[int] = []
        self.fd = fd
        self.size_bytes = len(mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        # The descriptor alone keeps all of the memory, even after the mapping is gone.
        self._close_fd = weakref.finalize(self, os.close, fd) if fd >= 0 else None

    @classmethod
    def create(cls, size_bytes: int) -> SharedSegment:
        """Allocate zeroed memory that peers can open, pre-faulted.

        Raises: LayoutError when there is not enough.
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
        """Allocate zeroed memory that no other process can open (`fd` is -1), pre-faulted.

        Raises: LayoutError.
        """
        size_bytes = _affordable(_whole_pages(size_bytes))
        try:
            return _own(cls(_map(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), -1))
        except (OSError, OverflowError, ValueError) as error:
            raise LayoutError(f"no memory for a pool of {size_bytes} bytes: {error}") from error

    @classmethod
    def open_peer(cls, pid: int, fd: int, owner: int = 0) -> SharedSegment:
        """Map descriptor `fd` of process `pid`; slow (it pre-faults), so call it in a thread.

        The caller checks before and after that `pid` is still the process it means. `owner`: the
        incarnation whose claim the segment must carry; 0 where the caller knows whose it is.
        Raises: TransferError when it cannot be opened, is not a sealed segment, or is another's.
        """
        try:
            ours = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TransferError(
                f"cannot open the pool of process {pid}: {error.strerror}"
            ) from error
        try:
            if fcntl.fcntl(ours, _F_GET_SEALS) & _SEALS != _SEALS:
                raise TransferError(f"descriptor {fd} of process {pid} is not a sealed segment")
            size_bytes = os.fstat(ours).st_size - _CLAIMS_BYTES
            if size_bytes < 1:
                raise TransferError(f"descriptor {fd} of process {pid} has no bytes of a pool")
            if owner and owner not in _read_claims(ours, size_bytes):
                raise TransferError(
                    f"descriptor {fd} of process {pid} is not the pool of {owner:016x}, which "
                    "named it"
                )
            segment = cls(_map(ours, size_bytes, mmap.MAP_SHARED), -1)
        except OSError as error:
            raise TransferError(f"cannot map the pool of process {pid}: {error}") from error
        finally:
            os.close(ours)
        # If the kernel cannot pre-fault, the first writes fault the pages in.
        prefault(segment.address, segment.size_bytes)
        return segment

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
        """The mapping as a buffer, for `PagedPool.wrap(..., segment=)`.

        `np.frombuffer` and `torch.frombuffer` make arrays in it that share its bytes. Raises:
        LayoutError after `close`.
        """
        if self._mapping is None:
            raise LayoutError(f"the segment of {self.size_bytes} bytes is closed")
        return self._mapping

    def claim(self, owner: int) -> None:
        """Claim the segment as the pool of the node `owner`, an incarnation, for peers to check.

        Raises: LayoutError.
        """
        if len(self._claims) == _CLAIMS_BYTES // _CLAIM.size:
            raise LayoutError(
                f"{len(self._claims)} nodes have claimed this segment, and no more can"
            )
        self._claims.append(owner)
        self._write_claims()

    def disclaim(self, owner: int) -> None:
        """Remove the claim of the node `owner`. Idempotent."""
        if owner in self._claims:
            self._claims.remove(owner)
            self._write_claims()

    def _write_claims(self) -> None:
        if self.fd >= 0:
            page = b"".join(map(_CLAIM.pack, self._claims)).ljust(_CLAIMS_BYTES, b"\0")
            os.pwrite(self.fd, page, self.size_bytes)

    def close(self) -> None:
        """Release the descriptor and the mapping. Idempotent."""
        # mmap.close is not an option: a torch tensor keeps the mmap object alive, but does not
        # count as a user of its buffer.
        self._mapping = None
        self.fd = -1
        if self._close_fd is not None:
            self._close_fd()  # only the first call has an effect


def _read_claims(fd: int, offset: int) -> set[int]:
    """Return the claims of a sealed segment, which are its last page. Raises: OSError."""
    return {owner for (owner,) in _CLAIM.iter_unpack(os.pread(fd, _CLAIMS_BYTES, offset)) if owner}


def _whole_pages(size_bytes: int) -> int:
    if size_bytes < 1:
        raise LayoutError(f"a segment of {size_bytes} bytes: at least 1 is needed")
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _affordable(size_bytes: int) -> int:
    """Return `size_bytes` if there is as much memory.

    Memory is pre-faulted: without this check, a process that asks for too much is killed, not
    refused.
    """
    available = available_memory()
    if available is not None and size_bytes > available.size_bytes:
        raise LayoutError(f"no memory for a pool of {size_bytes} bytes: {available}")
    return size_bytes


def _map(fd: int, size_bytes: int, flags: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, size_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def _own(segment: SharedSegment) -> SharedSegment:
    if not prefault(segment.address, segment.size_bytes):
        # Older kernels cannot pre-fault: touch our memory, which is zero anyway.
        ctypes.memset(segment.address, 0, segment.size_bytes)
    return segment
