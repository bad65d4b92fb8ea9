"""Batches of cache events, byte for byte what subscribers of vLLM and SGLang read."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvflow.protocols.cache.choices import Dialect
from kvflow.protocols.cache.events import CLEARED, Event, Tier
from kvflow.protocols.cache.hashes import ANY, Namespace, chain_root, token_bytes
from kvflow.protocols.cache.index import PrefixIndex
from kvflow.protocols.wire.kv_events import BatchEncoder, media_of
from tests.protocols.cache.decoders import DECODERS, MEDIA, SglangRouterBlocks, apply
from tests.protocols.cache.subscriber import Subscriber, block_hash, digest_chain

IDS = [5, 1, 65_536, 2**32 - 1, 0, 7, 8, 9]  # 4 pages of 2
SMALL = [5, 1, 65_535, 9]
JUST_ABOVE = [5, 1, 65_536, 9]


def events(ids: list[int], namespace: Namespace = ANY) -> tuple[PrefixIndex, list[Event]]:
    index = PrefixIndex(2, events=True)
    index.insert(token_bytes(ids), np.arange(len(ids) // 2, dtype=np.int32), 0.0, namespace)
    return index, index.take_events()


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("ids", [IDS, SMALL, JUST_ABOVE])
def test_a_batch_is_read_by(name: str, ids: list[int]) -> None:
    decoder, positional = DECODERS[name]
    index, recorded = events(ids)
    index.evict(Tier.DEVICE, 1)
    recorded += [*index.take_events(), CLEARED]
    batch = decoder.decode(BatchEncoder(2, 3, positional=positional).encode(recorded, 1.5))
    assert (batch.ts, msgspec.structs.astuple(batch)[2]) == (1.5, 3)
    stored, removed, _ = batch.events
    expected = [block_hash(digest) for digest in digest_chain(ids, 2)]
    hashes, parent, tokens, size, lora, medium, lora_name, *_ = msgspec.structs.astuple(stored)
    assert (hashes, parent, tokens) == (expected, None, ids)
    assert (size, lora, medium, lora_name) == (2, None, "GPU", None)
    assert (removed.block_hashes, removed.medium) == (expected[-1:], "GPU")


def test_the_maps_are_those_of_the_contract() -> None:
    index, recorded = events(SMALL)
    index.evict(Tier.DEVICE, 2)
    batch = msgspec.msgpack.decode(
        BatchEncoder(2).encode([*recorded, *index.take_events(), CLEARED], 0.0)
    )
    first = [block_hash(digest) for digest in digest_chain(SMALL, 2)]
    assert batch == [
        0.0,
        [
            {
                "type": "BlockStored",
                "block_hashes": first,
                "parent_block_hash": None,
                "token_ids": SMALL,
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": first[::-1], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
        0,
    ]


def test_the_older_form_is_positional() -> None:
    index, recorded = events(SMALL)
    index.evict(Tier.DEVICE, 2)
    encoder = BatchEncoder(2, positional=True)
    batch = msgspec.msgpack.decode(encoder.encode([*recorded, *index.take_events(), CLEARED], 0.0))
    first = [block_hash(digest) for digest in digest_chain(SMALL, 2)]
    assert batch[1] == [
        ["BlockStored", first, None, SMALL, 2, None, "GPU", None, None],
        ["BlockRemoved", first[::-1], "GPU"],
        ["AllBlocksCleared"],
    ]


@pytest.mark.parametrize(
    ("namespace", "lora", "first", "later"),
    [
        (Namespace(lora="a"), "a", [["a"], ["a"]], [["a"]]),
        (Namespace(salt="s"), None, [["s"], None], None),
        (Namespace(salt="s", lora="a"), "a", [["a", "s"], ["a"]], [["a"]]),
    ],
)
def test_namespaces(namespace: Namespace, lora: str | None, first: Any, later: Any) -> None:
    index, recorded = events([1, 2, 3, 4], namespace)
    index.insert(token_bytes([1, 2, 3, 4, 5, 6]), np.arange(3, dtype=np.int32), 1.0, namespace)
    recorded += index.take_events()
    head, tail = msgspec.msgpack.decode(BatchEncoder(2).encode(recorded, 0.0))[1]
    expected = [
        block_hash(digest) for digest in digest_chain(range(1, 7), 2, chain_root(namespace))
    ]
    assert (head["block_hashes"], tail["block_hashes"]) == (expected[:2], expected[2:])
    assert (head["parent_block_hash"], tail["parent_block_hash"]) == (None, expected[1])
    assert (head["lora_name"], head["extra_keys"], tail.get("extra_keys")) == (lora, first, later)


def test_small_token_ids_take_three_bytes() -> None:
    payloads = [BatchEncoder(2).encode(events(ids)[1], 0.0) for ids in (SMALL, JUST_ABOVE)]
    assert b"\xcd\xff\xff" in payloads[0] and b"\xce\x00\x01\x00\x00" in payloads[1]
    assert len(payloads[1]) - len(payloads[0]) == 2 * len(SMALL)


def test_leaves_that_are_evicted_together_leave_in_one_event() -> None:
    index, _ = events([1, 2])
    for fork in range(5):
        index.insert(token_bytes([1, 2, 3, fork]), np.arange(2, dtype=np.int32), 1.0 + fork)
    index.take_events()
    index.evict(Tier.DEVICE, 6)
    batch = msgspec.msgpack.decode(BatchEncoder(2).encode(index.take_events(), 0.0))
    assert [len(event["block_hashes"]) for event in batch[1]] == [6]


def test_a_batch_made_bit_by_bit_is_the_same() -> None:
    index, recorded = events(IDS)
    index.insert(token_bytes(SMALL), np.arange(2, dtype=np.int32), 1.0)
    recorded += index.take_events()
    encoder = BatchEncoder(2)
    parts = [part for event in recorded for part in encoder.parts([event])]
    decode = msgspec.msgpack.decode
    assert decode(encoder.join(parts, 2.0)) == decode(encoder.encode(recorded, 2.0))


def through_the_tiers() -> tuple[PrefixIndex, list[Event]]:
    """Four pages go to host and storage, and leave the host; two of them are forgotten then."""
    index, recorded = events(SMALL + SMALL)
    end = index.match(token_bytes(SMALL + SMALL), 1.0).end
    assert end is not None
    pages = np.arange(4, dtype=np.int32)
    index.ack(index.begin_write(end, Tier.DEVICE, Tier.HOST, pages).number)
    index.ack(index.begin_write(end, Tier.HOST, Tier.STORAGE, count=4).number)
    index.evict(Tier.HOST, 4)
    index.evict(Tier.DEVICE, 2)
    return index, recorded + index.take_events()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_every_world_gets_media_that_it_knows(name: str, shared: bool) -> None:
    decoder, positional = DECODERS[name]
    dialect: Dialect = "vllm" if name.startswith("vllm") else "sglang"
    media = media_of(dialect, shared_storage=shared)
    assert set(media) <= set(MEDIA[dialect]) and len(set(media)) == len(Tier)
    index, recorded = through_the_tiers()
    expected, subscriber = Subscriber(), Subscriber(media)
    expected.replay(index.snapshot_events())
    assert [len(held) for held in expected.content()] == [2, 0, 2]
    apply(
        subscriber,
        decoder.decode(BatchEncoder(2, positional=positional, media=media).encode(recorded, 0.0)),
    )
    assert subscriber.content() == expected.content()


@pytest.mark.parametrize("positional", [False, True])
def test_sglang_s_router_knows_what_stays_when_pages_leave_the_host(positional: bool) -> None:
    decoder, _ = DECODERS["sglang positional" if positional else "sglang"]
    _, recorded = through_the_tiers()
    first, second, *_ = (block_hash(digest) for digest in digest_chain(SMALL + SMALL, 2))

    def told(dialect: Dialect) -> dict[int, set[str]]:
        encoder = BatchEncoder(2, positional=positional, media=media_of(dialect))
        router = SglangRouterBlocks()
        router.apply(decoder.decode(encoder.encode(recorded, 0.0)))
        return router.content()

    both = {"GPU", "DISK"}
    assert told("sglang") == {first: both, second: both}
    assert told("vllm") == {}, "by vLLM's names a removal from the host is one from the device"
