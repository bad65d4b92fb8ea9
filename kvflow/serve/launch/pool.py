"""The pool of a role. Its size is checked against the free memory before it is allocated."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from kvflow.memory.available import Available, available_memory, one_at_a_time
from kvflow.memory.device import HOST, memory_of
from kvflow.memory.pool import PagedPool
from kvflow.memory.snapshot import SnapshotStore
from kvflow.memory.staging import Staging
from kvflow.protocols.errors import LayoutError, MisuseError
from kvflow.protocols.pages.arrange import from_shards
from kvflow.protocols.pages.kinds import ROW, StateKind
from kvflow.protocols.pages.layout import PoolLayout, build_layout, resized
from kvflow.serve.config.catalog import FIELDS, flag_of
from kvflow.serve.config.settings import Settings
from kvflow.serve.config.sources import ConfigError
from kvflow.transports.data.slices import TINY_BELOW_BYTES, are_tiny

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("kvflow.serve")
DEFAULT_POOL_TOKENS = 65_536
# One spare row per this many requests, because the row of an ended request may still be copied.
_MORE_ROWS = 16
_MOST_EMPTY_PAGES = 1 << 20
_MOST_PAGES = 1 << 26  # as many as --num-pages takes


class _Budget(NamedTuple):
    """The bytes that a pool may take if --num-pages does not say, and the setting behind them."""

    size_bytes: int
    named: str
    most_tokens: int


def make_pool(
    settings: Settings,
    streams: Sequence[StateKind],
    fingerprint: str,
    device: torch.device,
    *,
    ring_bytes: int = 0,
    sharing: int = 1,
) -> PagedPool:
    """Allocate the pool for a model's `streams` in the memory of the model's device. This blocks.

    `ring_bytes` of each row hold sliding windows. `sharing` processes divide --mem-fraction.

    Raises: ConfigError, LayoutError.
    """
    has_rows = any(kind.unit == ROW for kind in streams)
    one = build_layout(streams, page_size=settings.page_size, num_pages=1, num_rows=int(has_rows))
    with one_at_a_time():
        budget = _budget(settings, device, sharing)
        num_rows = _num_rows(settings, budget, one, ring_bytes) if has_rows else 0
        num_pages = _num_pages(settings, budget, one, num_rows)
        sized = resized(one, (num_pages, num_rows) if has_rows else (num_pages,))
        check_length(settings, sized)
        _check_memory(settings, budget, sized, device)
        layout = build_layout(
            streams,
            page_size=settings.page_size,
            num_pages=sized.num_pages,
            num_rows=num_rows,
            order=settings.pool_order,
            fingerprint=fingerprint,
        )
        return PagedPool.allocate(layout, device=None if device.type == HOST else device)


def make_staging(settings: Settings, pool: PagedPool, default_bytes: int) -> Staging | None:
    """Allocate host memory for staging, or return None without staging. This blocks.

    A `default_bytes` of 0 means as many bytes as the pool has. Raises: ConfigError.
    """
    shards = _shards_told_apart(settings, pool)
    if pool.on_host and settings.staging == "auto" and shards == 1:
        return None
    with one_at_a_time(), _naming("staging_bytes", settings):
        try:
            return Staging(pool, settings.staging_bytes or default_bytes, shards=shards)
        except LayoutError as error:
            if not pool.on_host or settings.staging == "always":
                raise
            _log.warning("slices are written as they are: %s", error)
            return None


def _shards_told_apart(settings: Settings, pool: PagedPool) -> int:
    """Return each prefill's number of shards if its slices would be tiny, otherwise 1."""
    plane, shards = settings.disaggregation_transfer_backend, settings.disaggregation_prefill_tp
    if shards < 2 or not are_tiny(plane, blocks := from_shards(pool.layout, shards)):
        return 1
    _log.info(
        "prefills of %d shards would write slices of %d bytes on average over %s, which is fast "
        "from %d on: they are brought together in staging",
        shards,
        blocks.mean_bytes,
        plane,
        TINY_BELOW_BYTES[plane],
    )
    return shards


def make_snapshots(settings: Settings, pool: PagedPool) -> SnapshotStore | None:
    """Allocate the host memory for the state of retracted requests. This blocks.

    Return None if the memory is not used, or if it cannot be allocated and no setting needs it.

    Raises: ConfigError.
    """
    if not _uses_host_memory(settings):
        return None
    try:
        with one_at_a_time(), _naming("host_memory_bytes", settings):
            _check_host_memory(settings)
            return SnapshotStore(pool, settings.host_memory_bytes)
    except ConfigError as error:
        if _needs_host_memory(settings):
            raise
        _log.warning("retracted requests are computed again, from no host memory: %s", error)
        return None


def check_host_memory(settings: Settings) -> None:
    """Check host memory for retracted requests before a model is loaded. Raises: ConfigError."""
    if _uses_host_memory(settings) and _needs_host_memory(settings):
        with _naming("host_memory_bytes", settings):
            _check_host_memory(settings)


def _uses_host_memory(settings: Settings) -> bool:
    return settings.new_token_ratio < 1 and settings.host_memory_bytes > 0


def _needs_host_memory(settings: Settings) -> bool:
    """Return True if a setting asks for this memory, or retracted requests depend on it."""
    asked_for = settings.host_memory_bytes != FIELDS["host_memory_bytes"].default
    return asked_for or settings.host_memory_full == "refuse"


def _check_host_memory(settings: Settings) -> None:
    available = available_memory()
    if available is not None and settings.host_memory_bytes > available.size_bytes:
        raise MisuseError(str(available))


@contextmanager
def _naming(name: str, settings: Settings) -> Generator[None]:
    try:
        yield
    except MisuseError as error:
        raise ConfigError(f"{flag_of(name)} {getattr(settings, name)}: {error}") from None


def check_length(settings: Settings, sized: PoolLayout) -> None:
    """Check that a pool holds one request of --max-model-len tokens. Raises: ConfigError."""
    # The last token of a completion is never fed back, so the pool holds one token less.
    needed = -(-(settings.max_model_len - 1) // sized.page_size)
    if needed <= sized.num_pages:
        return
    tokens, bytes_ = sized.num_pages * sized.page_size, resized(sized, (needed, *sized.counts[1:]))
    raise ConfigError(
        f"--max-model-len {settings.max_model_len}: the KV pool holds {tokens} tokens "
        f"({sized.num_pages} pages of {sized.page_size}), and one request of this length needs "
        f"{needed * sized.page_size} ({bytes_.size_bytes} bytes of pool); set --num-pages {needed} "
        f"or more, or --pool-bytes, or --mem-fraction, or --max-model-len {tokens + 1} at most"
    )


def _budget(settings: Settings, device: torch.device, sharing: int) -> _Budget:
    if not settings.mem_fraction:
        named = f"--pool-bytes {settings.pool_bytes}"
        return _Budget(settings.pool_bytes, named, DEFAULT_POOL_TOKENS)
    named = f"--mem-fraction {settings.mem_fraction:g}"
    available = _available(device)
    if available is None:
        raise ConfigError(
            f"{named}: the available memory is not known here; set --num-pages or --pool-bytes"
        )
    size_bytes = int(available.size_bytes * settings.mem_fraction / sharing)
    return _Budget(size_bytes, f"{named} ({size_bytes} bytes, as {available})", 1 << 40)


def _available(device: torch.device) -> Available | None:
    return available_memory() if device.type == HOST else memory_of(device)


def _num_rows(settings: Settings, budget: _Budget, one: PoolLayout, ring_bytes: int) -> int:
    """Return the number of rows: one per running request, and some spare ones.

    If bytes are the limit, rows get at most half of them, or all of them if pages hold no bytes.
    """
    wanted = settings.max_running_requests + -(-settings.max_running_requests // _MORE_ROWS)
    if settings.num_pages:
        return wanted
    share = budget.size_bytes // 2 if one.page_bytes else budget.size_bytes
    fitting = share // one.row_bytes
    windows = (
        f"; {ring_bytes} of them are sliding windows: --sliding-window-rows never keeps these in "
        "pages"
    )
    instead = windows if ring_bytes else ""
    if fitting < 1:
        least = one.row_bytes * (2 if one.page_bytes else 1)
        raise ConfigError(
            f"{budget.named}: the state of one request takes {one.row_bytes} "
            f"bytes of {share} for rows; at least {least} are needed{instead}"
        )
    if fitting < settings.max_running_requests:
        _log.info(
            "the pool has %d rows of %d bytes, for as many requests at once: "
            "--max-running-requests is %d, and %s%s",
            fitting,
            one.row_bytes,
            settings.max_running_requests,
            budget.named,
            instead,
        )
    return min(wanted, fitting)


def _num_pages(settings: Settings, budget: _Budget, one: PoolLayout, num_rows: int) -> int:
    if settings.num_pages:
        return settings.num_pages
    # Pages without bytes only count tokens. Each row can have the default number of tokens.
    if not one.page_bytes:
        return min(-(-DEFAULT_POOL_TOKENS // settings.page_size) * num_rows, _MOST_EMPTY_PAGES)
    wanted = min(-(-budget.most_tokens // settings.page_size), _MOST_PAGES)
    return max(1, min(wanted, (budget.size_bytes - num_rows * one.row_bytes) // one.page_bytes))


def _check_memory(
    settings: Settings, budget: _Budget, sized: PoolLayout, device: torch.device
) -> None:
    available = _available(device)
    needed = sized.room_bytes(sized.counts)
    if available is None or needed <= available.size_bytes:
        return
    rows_bytes = sized.num_rows * sized.row_bytes
    rows = f" and {sized.num_rows} rows of {sized.row_bytes}" if sized.num_rows else ""
    if sized.num_rows and (rows_bytes > available.size_bytes or not sized.page_bytes):
        flag = f"--max-running-requests {settings.max_running_requests}"
        most = available.size_bytes // sized.row_bytes
        fits = (
            f"at most {most} rows fit, one for each running request and 1 more for {_MORE_ROWS} of "
            "them"
        )
    else:
        flag = f"--num-pages {settings.num_pages}" if settings.num_pages else budget.named
        fits = f"at most {(available.size_bytes - rows_bytes) // sized.page_bytes} pages fit"
    raise ConfigError(
        f"{flag}: the pool needs {needed} bytes of memory ({sized.num_pages} pages of "
        f"{sized.page_bytes}{rows}), but {available}; {fits}"
    )
