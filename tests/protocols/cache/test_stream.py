"""Streams of batches, and subscribers that lose some, join late, or ask for what is not kept."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.hashes import token_bytes
from kvflow.protocols.cache.index import PrefixIndex
from kvflow.protocols.cache.stream import BATCH_BYTES, Batch, EventStream, StreamLimits
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.wire.kv_events import BatchEncoder
from tests.protocols.cache.driver import PAGE_SIZE, Driver, name
from tests.protocols.cache.subscriber import Subscriber
from tests.protocols.cache.test_index_stateful import step


class Knower(Subscriber):
    """Applies batches in order. Events are about sets, so that some may come twice."""

    def __init__(self) -> None:
        super().__init__()
        self.last = -1

    def stored(self, medium: str, hashes: list[int], parent: int | None) -> None:
        for number in hashes:
            self.blocks[medium][number] = parent
            parent = number

    def removed(self, medium: str, hashes: list[int]) -> None:
        for number in hashes:
            self.blocks[medium].pop(number, None)

    def apply(self, batch: Batch) -> None:
        self.last = batch.seq
        for event in events_of(batch):
            if event["type"] == "BlockStored":
                self.stored(event["medium"], event["block_hashes"], event["parent_block_hash"])
            elif event["type"] == "BlockRemoved":
                self.removed(event["medium"], event["block_hashes"])
            else:
                self.cleared()

    def ask_again(self, stream: EventStream) -> None:
        """As a replay goes: what is kept, or a snapshot and the newest number."""
        batches = stream.kept_from(self.last + 1)
        if batches is None:
            newest = stream.next_seq - 1
            batches = [Batch(newest, stream.encoder.encode(stream.snapshot(), 0.0))]
        for batch in batches:
            self.apply(batch)


def events_of(batch: Batch) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = msgspec.msgpack.decode(batch.payload)[1]
    return events


def kinds(batch: Batch) -> list[str]:
    return [event["type"] for event in events_of(batch)]


def index_of(pages: int, page_size: int = 1) -> PrefixIndex:
    index = PrefixIndex(page_size, events=True)
    ids = range(pages * page_size)
    index.insert(token_bytes(list(ids)), np.arange(pages, dtype=np.int32), 0.0)
    return index


def add(index: PrefixIndex, *ids: int) -> None:
    index.insert(token_bytes(ids), np.arange(len(ids), dtype=np.int32), 9.0)


@pytest.mark.parametrize(
    "limits", [StreamLimits(), StreamLimits(3, 1 << 20, 1 << 20), StreamLimits(50, 400, 300)]
)
def test_whoever_loses_batches_ends_with_what_is_cached(limits: StreamLimits, seed: int) -> None:
    rng = random.Random(f"{seed} {limits}")
    for _ in range(15):
        driver = Driver("lru")
        stream = EventStream(driver.index, BatchEncoder(PAGE_SIZE), limits)
        faithful, lossy, late = Knower(), Knower(), Knower()
        for _ in range(100):
            step(driver, rng)
            if rng.random() < 0.5:
                continue  # more in one batch, or more than may wait
            while (batch := stream.next_batch(0.0)) is not None:
                assert batch.seq == faithful.last + 1
                faithful.apply(batch)
                if rng.random() < 0.5:
                    continue  # lost on its way
                if batch.seq != lossy.last + 1:
                    lossy.ask_again(stream)
                if batch.seq > lossy.last:
                    lossy.apply(batch)
        while (batch := stream.next_batch(0.0)) is not None:
            faithful.apply(batch)
        lossy.ask_again(stream)
        late.ask_again(stream)
        expected = [{name(key) for key in driver.oracle.connected(tier)} for tier in Tier]
        assert faithful.content() == expected
        assert lossy.content() == expected
        assert late.content() == expected


def test_a_stream_begins_with_what_is_there() -> None:
    stream = EventStream(index_of(3), BatchEncoder(1), first_seq=7)
    batch = stream.next_batch(0.0)
    assert batch is not None
    assert (batch.seq, kinds(batch)) == (7, ["AllBlocksCleared", "BlockStored"])
    assert stream.next_batch(0.0) is None


def test_a_long_wait_is_sent_in_parts() -> None:
    index = PrefixIndex(512, events=True)
    stream = EventStream(index, BatchEncoder(512))
    stream.next_batch(0.0)
    for prompt in range(20):
        add_long(index, prompt)
    sizes = []
    while (batch := stream.next_batch(0.0)) is not None:
        sizes.append(len(kinds(batch)))
    assert sum(sizes) == 20
    assert max(sizes) <= BATCH_BYTES // (4 * 51_200) + 1


def add_long(index: PrefixIndex, prompt: int) -> None:
    ids = np.arange(51_200, dtype=np.uint32) + prompt
    index.insert(token_bytes(ids), np.arange(100, dtype=np.int32), float(prompt))


def test_events_that_wait_too_long_are_replaced_by_what_is_there() -> None:
    index = index_of(1)
    stream = EventStream(index, BatchEncoder(1), StreamLimits(10, 1 << 20, 100))
    stream.next_batch(0.0)
    for fork in range(1, 10):
        add(index, 0, fork)
    index.evict(Tier.DEVICE, 8)
    batch = stream.next_batch(0.0)
    assert batch is not None
    assert (batch.seq, kinds(batch)) == (1, ["AllBlocksCleared", "BlockStored", "BlockStored"])
    assert stream.num_resets == 1
    add(index, 0, 20)
    batch = stream.next_batch(0.0)
    assert batch is not None and kinds(batch) == ["BlockStored"], "it goes on with what happens"


def test_what_is_kept() -> None:
    index = index_of(1)
    stream = EventStream(index, BatchEncoder(1), StreamLimits(kept_batches=3))
    sent = [stream.next_batch(0.0)]
    for fork in range(1, 5):
        add(index, 0, fork)
        sent.append(stream.next_batch(0.0))
    assert stream.kept_from(1) is None
    assert stream.kept_from(2) == sent[2:]
    assert stream.kept_from(4) == sent[4:]
    assert stream.kept_from(5) == stream.kept_from(2**64 - 1) == []


def test_bytes_are_bounded_too() -> None:
    index = index_of(1)
    stream = EventStream(index, BatchEncoder(1), StreamLimits(kept_bytes=1))
    stream.next_batch(0.0)
    assert stream.kept_from(0) is not None, "the newest is kept, whatever its size"
    add(index, 0, 1)
    stream.next_batch(0.0)
    assert stream.kept_from(0) is None


@pytest.mark.parametrize(
    "limits", [StreamLimits(0), StreamLimits(kept_bytes=0), StreamLimits(waiting_bytes=-1)]
)
def test_limits_that_are_none(limits: StreamLimits) -> None:
    with pytest.raises(MisuseError, match="at least 1"):
        EventStream(index_of(1), BatchEncoder(1), limits)


def test_what_waits_is_counted_until_it_is_sent() -> None:
    """A prompt of `add_long` is 208,000 bytes of tokens and hashes."""
    for more, resets in ((3, 0), (4, 1)):
        index = PrefixIndex(512, events=True)
        stream = EventStream(index, BatchEncoder(512), StreamLimits(waiting_bytes=4_500_000))
        stream.next_batch(0.0)
        for prompt in range(20 + more):
            if prompt == 20:
                batch = stream.next_batch(0.0)
                assert batch is not None and len(kinds(batch)) == 2
            add_long(index, prompt)
        stream.next_batch(0.0)
        assert (stream.num_resets, stream.has_waiting) == (resets, True)


def test_a_long_snapshot_leaves_no_room_behind() -> None:
    index = index_of(50)
    stream = EventStream(index, BatchEncoder(1), StreamLimits(waiting_bytes=100))
    stream.next_batch(0.0)
    assert not stream.has_waiting
    for turn in range(1, 4):
        for fork in range(5):  # of 36 bytes
            add(index, 100 * turn + fork)
        stream.next_batch(0.0)
        assert stream.num_resets == turn


def test_as_many_bytes_are_kept_as_may_be() -> None:
    index = index_of(1)
    stream = EventStream(index, BatchEncoder(1), StreamLimits(kept_bytes=1_000))
    sizes = []
    for fork in range(1, 40):
        batch = stream.next_batch(0.0)
        assert batch is not None
        sizes.append(len(batch.payload))
        kept = next(batches for seq in range(40) if (batches := stream.kept_from(seq)))
        total = sum(len(batch.payload) for batch in kept)
        assert total <= 1_000
        # Not one more could have been kept.
        assert len(kept) == len(sizes) or total + sizes[-len(kept) - 1] > 1_000
        add(index, 0, fork)
    assert sum(sizes) > 2_000


def test_a_heartbeat_has_a_number_and_nothing_else() -> None:
    stream = EventStream(index_of(1), BatchEncoder(1), first_seq=5)
    assert stream.kept_from(4) is None, "nothing is kept yet"
    stream.next_batch(0.0)
    beat = stream.heartbeat(1.0)
    assert (beat.seq, msgspec.msgpack.decode(beat.payload)) == (6, [1.0, [], 0])
    assert stream.kept_from(6) == [beat]


def test_a_snapshot_longer_than_what_may_wait_is_sent_to_its_end() -> None:
    index = PrefixIndex(512, events=True)
    for prompt in range(20):
        add_long(index, prompt)
    stream = EventStream(index, BatchEncoder(512), StreamLimits(waiting_bytes=1_000))
    sizes = []
    while (batch := stream.next_batch(0.0)) is not None:
        sizes.append(len(kinds(batch)))
        assert len(sizes) <= 21
    assert (sum(sizes), stream.num_resets) == (21, 0)
