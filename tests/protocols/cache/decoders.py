"""Structs of the subscribers out there, as their projects have them. Unknown fields are refused."""

from __future__ import annotations

from typing import Any, Union

import msgspec

from tests.protocols.cache.subscriber import Subscriber


class VllmBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class VllmEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True, forbid_unknown_fields=True):
    pass


class VllmBlockStored(VllmEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class VllmBlockRemoved(VllmEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class VllmAllBlocksCleared(VllmEvent, tag="AllBlocksCleared"):
    pass


class VllmKVEventBatch(VllmBatch):
    # As it stands there.
    events: list[Union[VllmBlockStored, VllmBlockRemoved, VllmAllBlocksCleared]]  # noqa: UP007


class SglangEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class SglangBlockStored(SglangEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class SglangBlockRemoved(SglangEvent, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class SglangAllBlocksCleared(SglangEvent, tag="AllBlocksCleared"):
    pass


class SglangKVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[SglangBlockStored | SglangBlockRemoved | SglangAllBlocksCleared]
    attn_dp_rank: int | None = None


# As of 2026-06 SGLang sends and reads maps, too, of the same fields.
class SglangMapBlockStored(
    SglangBlockStored, tag="BlockStored", array_like=False, forbid_unknown_fields=True
):
    pass


class SglangMapBlockRemoved(
    SglangBlockRemoved, tag="BlockRemoved", array_like=False, forbid_unknown_fields=True
):
    pass


class SglangMapAllBlocksCleared(
    SglangAllBlocksCleared, tag="AllBlocksCleared", array_like=False, forbid_unknown_fields=True
):
    pass


class SglangMapKVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[SglangMapBlockStored | SglangMapBlockRemoved | SglangMapAllBlocksCleared]
    attn_dp_rank: int | None = None


class VllmPositionalBlockStored(VllmBlockStored, tag="BlockStored", array_like=True):
    pass


class VllmPositionalBlockRemoved(VllmBlockRemoved, tag="BlockRemoved", array_like=True):
    pass


class VllmPositionalAllBlocksCleared(VllmAllBlocksCleared, tag="AllBlocksCleared", array_like=True):
    pass


class VllmPositionalKVEventBatch(VllmBatch):
    events: list[
        VllmPositionalBlockStored | VllmPositionalBlockRemoved | VllmPositionalAllBlocksCleared
    ]


# name: (the decoder, whether it reads the older form)
DECODERS: dict[str, tuple[msgspec.msgpack.Decoder[Any], bool]] = {
    "vllm": (msgspec.msgpack.Decoder(VllmKVEventBatch), False),
    "sglang": (msgspec.msgpack.Decoder(SglangMapKVEventBatch), False),
    "vllm positional": (msgspec.msgpack.Decoder(VllmPositionalKVEventBatch), True),
    "sglang positional": (msgspec.msgpack.Decoder(SglangKVEventBatch), True),
}


# The media of each world: vLLM's `MEDIUM_*` (kv_events.py, 0.32), SGLang's `StorageMedium`
# (kv_events.py, 0.5).
MEDIA = {"vllm": ("GPU", "CPU", "STORAGE"), "sglang": ("GPU", "CPU_PINNED", "DISK", "EXTERNAL")}


class SglangRouterBlocks:
    """Where a worker has its blocks, as SGLang's router counts it: a store on a medium that it does
    not know is dropped, and a removal there removes the block from all media."""

    def __init__(self) -> None:
        self.media: dict[int, set[str]] = {}

    def apply(self, batch: Any) -> None:
        known = MEDIA["sglang"]
        for event in batch.events:
            if hasattr(event, "token_ids"):
                for number in event.block_hashes if event.medium in known else ():
                    self.media.setdefault(number, set()).add(event.medium)
            elif hasattr(event, "block_hashes"):
                for number in event.block_hashes:
                    self.media.get(number, set()).difference_update(
                        {event.medium} if event.medium in known else known
                    )
            else:
                self.media.clear()

    def content(self) -> dict[int, set[str]]:
        return {number: media for number, media in self.media.items() if media}


def apply(subscriber: Subscriber, batch: Any) -> None:
    for event in batch.events:
        if hasattr(event, "token_ids"):
            assert len(event.token_ids) == event.block_size * len(event.block_hashes)
            subscriber.stored(event.medium, event.block_hashes, event.parent_block_hash)
        elif hasattr(event, "block_hashes"):
            subscriber.removed(event.medium, event.block_hashes)
        else:
            subscriber.cleared()
