"""What the index counts, what it refuses, and that its queues do not grow with use."""

from __future__ import annotations

import numpy as np
import pytest

from kvflow.protocols.cache.events import Tier
from kvflow.protocols.errors import MisuseError
from tests.protocols.cache.test_index import DEVICE, HOST, STORAGE, Cache, pages


def test_evictions_are_counted_by_tier() -> None:
    cache = Cache()
    cache.insert(1, 2, 3)
    cache.index.ack(cache.back_up(1, 2, 3).number)
    assert cache.index.stats().num_evicted == (0, 0)
    cache.index.evict(DEVICE, 2)
    assert cache.index.stats().num_evicted == (2, 0)
    cache.index.evict(DEVICE, 1)
    cache.index.evict(HOST, 1)
    assert cache.index.stats().num_evicted == (3, 1)


def test_queues_hold_a_node_once_however_often_it_is_used() -> None:
    cache = Cache(needs_state=True)
    cache.insert(1, 2, 3)
    assert cache.index.put_state(_key(1, 2, 3), 7)
    cache.index.ack(cache.back_up(1, 2, 3).number)
    own = cache.index._residents
    for _ in range(20):
        found = cache.match(1, 2, 3)
        assert found.device_end is not None
        cache.index.lock(found.device_end)
        cache.index.lock_state(found.device_end)
        cache.index.unlock_state(found.device_end)
        cache.index.unlock(found.device_end)
    assert [len(queue) for queue in (*own._queues, own.states._queue)] == [1, 1, 1]


def test_a_flushed_state_goes_with_its_pages_and_not_before() -> None:
    cache = Cache(needs_state=True)
    end = cache.insert(1, 2).end
    assert end is not None and cache.index.put_state(_key(1, 2), 7)
    cache.index.lock(end)
    assert not cache.index.flush().states
    assert not cache.index.evict_states(1).states
    assert cache.index.unlock(end).states == (7,)


def test_what_was_flushed_is_offered_to_no_queue() -> None:
    cache = Cache()
    cache.insert(1, 2)
    found = cache.match(1, 2)
    assert found.device_end is not None
    cache.index.lock(found.device_end)
    cache.index.flush()
    with pytest.raises(MisuseError, match="no longer in the cache"):
        cache.index.begin_write(found.device_end, DEVICE, HOST, pages(0, 1))
    assert found.device_end.queued == 0
    assert not cache.index.evict(DEVICE, 2).device.size
    assert cache.index.unlock(found.device_end).device.size == 2


@pytest.mark.parametrize(
    ("source", "target", "given", "said"),
    [
        (STORAGE, HOST, pages(0, 1), "a source is device or host"),
        (DEVICE, DEVICE, pages(0, 1), "no copy from device to device"),
        (DEVICE, HOST, pages(), "a write of 0 pages"),
        (DEVICE, HOST, [0, 1], "a numpy array of int32"),
        (DEVICE, HOST, np.zeros((2, 1), np.int32), r"of shape \(2, 1\)"),
    ],
)
def test_a_write_that_cannot_be_is_refused_and_takes_nothing(
    source: Tier, target: Tier, given, said: str
) -> None:
    cache = Cache()
    end = cache.insert(1, 2).end
    assert end is not None
    with pytest.raises(MisuseError, match=said):
        cache.index.begin_write(end, source, target, given)
    assert cache.index.stats().writes_open == 0 and cache.index.evictable_pages == 2


def test_a_write_to_storage_has_no_target_pages() -> None:
    cache = Cache()
    cache.insert(1, 2)
    cache.index.ack(cache.back_up(1, 2).number)
    end = cache.match(1, 2).end
    assert end is not None
    write = cache.index.begin_write(end, HOST, STORAGE, pages(5, 6))
    assert write.target_pages.size == 0 and write.source_pages.tolist() == [0, 1]
    assert not cache.index.fail(write.number).host.size, "what was given is not the index's"


def _key(*ids: int) -> bytes:
    return np.array(ids, "<u4").tobytes()
