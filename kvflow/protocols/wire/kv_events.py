"""Cache events in the format that subscribers of vLLM and SGLang read: msgpack of [ts, events,
data_parallel_rank].

An event is a map with its kind under "type", or, in the older form, an array with its kind first.
Numpy lays out token ids and hashes, because a request's prompt would otherwise become tens of
thousands of Python integers.

**Media.** An event names its tier in `medium`, and the subscribers of each engine expect that
engine's names (`media_of`). An unknown name is worse than a missing one: SGLang's router drops
stored blocks with an unknown name, and applies a removal with an unknown name to all tiers. Older
Dynamo routers apply both to the device.

**Namespaces.** `lora_name` names the LoRA. As in vLLM, `extra_keys` lists for each block the other
inputs of its hash: the LoRA's name and, in the first block of a prompt, the salt. The chain of
hashes begins with `hashes.chain_root`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvflow.protocols.cache.choices import Dialect
from kvflow.protocols.cache.events import Event, Removed, Stored

# A request for a replay carries the number of the first batch that it wants. If SNAPSHOT follows
# the number, the replay begins with a snapshot. END is the number of the last frame of a replay.
SNAPSHOT = b"snapshot"
END = (-1).to_bytes(8, "big", signed=True)

Media: TypeAlias = tuple[str, str, str]  # names by tier
VLLM_MEDIA: Media = ("GPU", "CPU", "STORAGE")
ExtraKeys: TypeAlias = list[tuple[str, ...] | None]

# Msgpack heads of arrays, and of numbers with a fixed size, each with the big-endian numpy type of
# its number. Msgpack has shorter forms, but a fixed size lets numpy lay out all numbers at once.
_ARRAY_OF_3, _ARRAY_32 = b"\x93", b"\xdd"
_INT_64 = (0xD3, ">i8")
_UINT_16 = (0xCD, ">u2")
_UINT_32 = (0xCE, ">u4")


def media_of(dialect: Dialect, *, shared_storage: bool = False) -> Media:
    """Return the names of the tiers for the subscribers of a dialect. `shared_storage` is True if
    other workers read the same storage: SGLang distinguishes that from a worker's own disk.
    """
    if dialect == "vllm":
        return VLLM_MEDIA
    return ("GPU", "CPU_PINNED", "EXTERNAL" if shared_storage else "DISK")


class BlockStored(msgspec.Struct, tag="BlockStored", tag_field="type", frozen=True):
    block_hashes: msgspec.Raw
    parent_block_hash: int | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: ExtraKeys | msgspec.UnsetType | None = msgspec.UNSET


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", tag_field="type", frozen=True):
    block_hashes: msgspec.Raw
    medium: str


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type", frozen=True):
    pass


class PositionalBlockStored(BlockStored, tag="BlockStored", array_like=True, frozen=True):
    pass


class PositionalBlockRemoved(BlockRemoved, tag="BlockRemoved", array_like=True, frozen=True):
    pass


class PositionalAllBlocksCleared(
    AllBlocksCleared, tag="AllBlocksCleared", array_like=True, frozen=True
):
    pass


class BatchEncoder:
    """An encoder for the batches of one stream."""

    def __init__(
        self, page_size: int, rank: int = 0, *, positional: bool = False, media: Media = VLLM_MEDIA
    ) -> None:
        """`page_size` is the number of tokens per block. With `positional`, events are encoded as
        arrays, the older form.
        """
        self._page_size, self._rank, self._media = page_size, rank, media
        self._stored = PositionalBlockStored if positional else BlockStored
        self._removed = PositionalBlockRemoved if positional else BlockRemoved
        self._cleared = PositionalAllBlocksCleared() if positional else AllBlocksCleared()
        self._no_keys = None if positional else msgspec.UNSET
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: Iterable[Event], ts: float) -> bytes:
        """Return one encoded batch. `ts` is in seconds since the epoch."""
        return self._encoder.encode((ts, list(self._on_the_wire(events)), self._rank))

    def parts(self, events: Iterable[Event]) -> list[bytes]:
        """Return encoded events for `join`, so that a caller can make a long batch in steps."""
        return [self._encoder.encode(event) for event in self._on_the_wire(events)]

    def join(self, parts: list[bytes], ts: float) -> bytes:
        """Return one batch of encoded events. A long one is joined without the GIL."""
        head = _ARRAY_OF_3 + self._encoder.encode(ts) + _array_head(len(parts))
        return b"".join([head, *parts, self._encoder.encode(self._rank)])

    def _on_the_wire(self, events: Iterable[Event]) -> Iterable[msgspec.Struct]:
        for tier, group in groupby(
            events, key=lambda event: event.tier if isinstance(event, Removed) else None
        ):
            if tier is None:
                for event in group:
                    yield self._stored_event(event) if isinstance(event, Stored) else self._cleared
            # Eviction takes leaves one by one, and records an event for each. Subscribers receive
            # one event for consecutive removals from the same tier.
            else:
                together = [event.digests[:, 0] for event in group if isinstance(event, Removed)]
                yield self._removed(_packed(np.concatenate(together), *_INT_64), self._media[tier])

    def _stored_event(self, event: Stored) -> BlockStored:
        ids = np.frombuffer(event.tokens, "<u4")
        width = _UINT_16 if int(ids.max()) < 1 << 16 else _UINT_32
        return self._stored(
            block_hashes=_packed(event.digests[:, 0], *_INT_64),
            parent_block_hash=event.parent,
            token_ids=_packed(ids, *width),
            block_size=self._page_size,
            lora_id=None,
            medium=self._media[event.tier],
            lora_name=event.namespace.lora or None,
            extra_keys=_extra_keys(event) or self._no_keys,
        )


def _extra_keys(event: Stored) -> ExtraKeys:
    """Return one entry per block, or an empty list if all of them would be empty."""
    salt, lora = event.namespace
    if not lora and (not salt or event.parent is not None):
        return []
    keys: ExtraKeys = [(lora,) if lora else None] * len(event.digests)
    if salt and event.parent is None:
        keys[0] = (lora, salt) if lora else (salt,)
    return keys


def _packed(numbers: NDArray[Any], head: int, width: str) -> msgspec.Raw:
    packed = np.empty(len(numbers), [("head", "u1"), ("number", width)])
    packed["head"], packed["number"] = head, numbers
    return msgspec.Raw(_array_head(len(numbers)) + packed.tobytes())


def _array_head(count: int) -> bytes:
    return _ARRAY_32 + count.to_bytes(4, "big")


class StoredBlocks(msgspec.Struct, tag="BlockStored", tag_field="type", frozen=True):
    """The fields of BlockStored that a reader of a stream needs to track the cached blocks."""

    block_hashes: list[int]
    block_size: int
    medium: str | None = None


class RemovedBlocks(msgspec.Struct, tag="BlockRemoved", tag_field="type", frozen=True):
    block_hashes: list[int]
    medium: str | None = None


class _PositionalStored(msgspec.Struct, tag="BlockStored", array_like=True, frozen=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None
    medium: str | None = None


class _PositionalRemoved(RemovedBlocks, tag="BlockRemoved", array_like=True, frozen=True):
    pass


BlockEvent: TypeAlias = StoredBlocks | RemovedBlocks | AllBlocksCleared
_MAPS = msgspec.msgpack.Decoder(
    tuple[float, list[StoredBlocks | RemovedBlocks | AllBlocksCleared], int | None]
)
_ARRAYS = msgspec.msgpack.Decoder(
    tuple[
        float, list[_PositionalStored | _PositionalRemoved | PositionalAllBlocksCleared], int | None
    ]
)


def read_batch(payload: bytes | memoryview) -> list[BlockEvent]:
    """Return the events of a batch, in either form. Raises: msgspec.DecodeError,
    UnicodeDecodeError, RecursionError.
    """
    # A batch does not name its form, so a batch that is not valid as maps is read as arrays.
    try:
        return list(_MAPS.decode(payload)[1])
    except msgspec.ValidationError:
        return [
            StoredBlocks(event.block_hashes, event.block_size, event.medium)
            if isinstance(event, _PositionalStored)
            else event
            for event in _ARRAYS.decode(payload)[1]
        ]
