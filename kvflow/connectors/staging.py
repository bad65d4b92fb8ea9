"""Staging for the KV cache of an engine: its settings, and its memory."""

from __future__ import annotations

import logging

from kvflow.memory.available import one_at_a_time
from kvflow.memory.copies import copier_for
from kvflow.memory.pool import PagedPool
from kvflow.memory.staging import Staging
from kvflow.protocols.errors import LayoutError, MisuseError

AUTO, ALWAYS = "auto", "always"
_kept: list[Staging] = []


def check_staging(mode: str) -> None:
    """Raises: MisuseError if `mode` is neither "auto" nor "always"."""
    if mode not in (AUTO, ALWAYS):
        raise MisuseError(f"staging {mode!r} is neither {AUTO!r} nor {ALWAYS!r}")


def check_staging_bytes(size_bytes: int) -> None:
    """Raises: MisuseError if `size_bytes` is below 0."""
    if size_bytes < 0:
        raise MisuseError(f"staging_bytes {size_bytes} is below 0")


def is_staged(pool: PagedPool, mode: str) -> bool:
    """Return False for a pool in host memory, unless `mode` is "always". No data plane reaches a
    pool on a device.
    """
    return mode == ALWAYS or not pool.on_host


def make_staging(
    pool: PagedPool,
    mode: str,
    size_bytes: int,
    default_bytes: int,
    *,
    setting: str,
    log: logging.Logger,
) -> Staging | None:
    """Allocate host memory through which the transfers of a node over `pool` pass.

    Return None for a pool that needs none (see `is_staged`). The call blocks. With a `size_bytes`
    of 0, `default_bytes` are the bound; if both are 0, the staging is as large as the pool.

    Raises: LayoutError if the memory of the pool's device cannot be copied; MisuseError naming
    `setting`, if the host memory does not suffice or cannot be pinned.
    """
    if not is_staged(pool, mode):
        return None
    # No size of the staging would help where this fails.
    copier_for(pool).close()
    try:
        with one_at_a_time():
            found = Staging(pool, size_bytes or default_bytes)
    except (LayoutError, MisuseError) as error:
        given = f"{setting} {size_bytes}" if size_bytes else setting
        raise MisuseError(f"{given}: {error}") from None
    log.info(
        "kvflow: KV cache on %s; transfers pass through %d bytes of host memory",
        pool.device,
        found.host.layout.size_bytes,
    )
    return found


def close_staging(staging: Staging, *, is_proven: bool) -> None:
    """Free the memory of a staging whose node is closed.

    Without a proof for every loan, a peer may still write into it, so it stays until the process
    ends. Idempotent.
    """
    if is_proven:
        staging.close()
    elif staging not in _kept:
        _kept.append(staging)
