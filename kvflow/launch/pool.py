"""The pool of a role: its size from the settings, checked against memory before any of it is allocated."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import kvflow
from kvflow.config.settings import Settings
from kvflow.config.sources import ConfigError
from kvflow.memory.available import available_memory
from kvflow.memory.device import HOST, memory_of
from kvflow.memory.pool import PagedPool
from kvflow.memory.snapshot import SnapshotStore
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.layout import build_layout

if TYPE_CHECKING:
    import torch

DEFAULT_POOL_TOKENS = 65_536


def make_pool(
    settings: Settings, streams: Sequence[tuple[str, str, Sequence[int]]], fingerprint: str, device: torch.device
) -> PagedPool:
    """Allocate the pool for a model's `streams`, where the model is; blocks. Raises: ConfigError, LayoutError."""
    exact = [(name, dtype, tuple(shape)) for name, dtype, shape in streams]
    page_bytes = build_layout(exact, page_size=settings.page_size, num_pages=1).page_bytes
    num_pages = _num_pages(settings, page_bytes)
    with _one_at_a_time():
        _check_memory(settings, num_pages, page_bytes, device)
        layout = build_layout(
            exact,
            page_size=settings.page_size,
            num_pages=num_pages,
            order=settings.pool_order,
            fingerprint=fingerprint,
        )
        return PagedPool.allocate(layout, device=None if device.type == HOST else device)


def make_snapshots(settings: Settings, pool: PagedPool) -> SnapshotStore | None:
    """Allocate the host memory of retracted requests; blocks. None where none are retracted to it. Raises: ConfigError,
    LayoutError."""
    if settings.new_token_ratio >= 1 or not settings.host_memory_bytes:
        return None
    with _one_at_a_time():
        available = available_memory()
        if available is not None and settings.host_memory_bytes > available.size_bytes:
            raise ConfigError(f"--host-memory-bytes {settings.host_memory_bytes}: {available}")
        try:
            return SnapshotStore(pool, settings.host_memory_bytes)
        except MisuseError as error:
            raise ConfigError(f"--host-memory-bytes {settings.host_memory_bytes}: {error}") from None


def _num_pages(settings: Settings, page_bytes: int) -> int:
    if settings.num_pages:
        return settings.num_pages
    wanted = -(-DEFAULT_POOL_TOKENS // settings.page_size)
    return max(1, min(wanted, settings.pool_bytes // page_bytes))


def _check_memory(settings: Settings, num_pages: int, page_bytes: int, device: torch.device) -> None:
    available = available_memory() if device.type == HOST else memory_of(device)
    if available is None or num_pages * page_bytes <= available.size_bytes:
        return
    flag = f"--num-pages {num_pages}" if settings.num_pages else f"--pool-bytes {settings.pool_bytes}"
    raise ConfigError(
        f"{flag}: the pool needs {num_pages * page_bytes} bytes of memory ({num_pages} pages of {page_bytes}), but "
        f"{available}; at most {available.size_bytes // page_bytes} pages fit"
    )


@contextmanager
def _one_at_a_time() -> Generator[None]:
    """Roles that start together must not count the same free memory twice: a pool is pre-faulted when it is made."""
    descriptor = os.open(os.path.dirname(kvflow.__file__), os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
