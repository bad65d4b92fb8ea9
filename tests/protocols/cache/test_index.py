"""Single stories of the index: splits, stale acknowledgements, locks, order, states, bad input."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.hashes import ANY, Namespace, token_bytes
from kvflow.protocols.cache.index import Inserted, Match, PrefixIndex
from kvflow.protocols.cache.nodes import Node
from kvflow.protocols.cache.writes import Write
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.layout import PageIndices

DEVICE, HOST, STORAGE = Tier


def pages(*numbers: int) -> PageIndices:
    return np.array(numbers, np.int32)


class Cache:
    """Pages of one token; page numbers on the device are 100 + the order of insertion."""

    def __init__(self, policy: str = "lru", *, needs_state: bool = False) -> None:
        self.index = PrefixIndex(1, policy, needs_state=needs_state)
        self.clock = itertools.count()
        self.next_page = 100

    def insert(
        self, *ids: int, namespace: Namespace = ANY, shared: int = 0, priority: int = 0
    ) -> Inserted:
        given = np.arange(self.next_page, self.next_page + len(ids), dtype=np.int32)
        self.next_page += len(ids)
        return self.index.insert(
            token_bytes(ids), given, next(self.clock), namespace, shared=shared, priority=priority
        )

    def insert_node(self, *ids: int) -> Node:
        """Insert, and return the node of the last page."""
        end = self.insert(*ids).end
        assert end is not None
        return end

    def match(self, *ids: int, namespace: Namespace = ANY) -> Match:
        return self.index.match(token_bytes(ids), next(self.clock), namespace)

    def match_node(self, *ids: int) -> Node:
        """Match, and return the node of the last page."""
        end = self.match(*ids).end
        assert end is not None
        return end

    def back_up(self, *ids: int, at: int = 0) -> Write:
        end = self.match_node(*ids)
        count = self.index.missing(end, DEVICE, HOST)
        return self.index.begin_write(end, DEVICE, HOST, pages(*range(at, at + count)))


@pytest.mark.parametrize("start", [1, 2, 3])
def test_stored_pages_in_the_middle_of_what_came_meanwhile_are_not_taken(start: int) -> None:
    """All of the prompt came meanwhile as one run, which has no host pages."""
    cache = Cache()
    cache.insert(1, 2, 3, 4)
    given = pages(*range(start, 4))
    back = cache.index.insert_stored(
        token_bytes((1, 2, 3, 4)), given, next(cache.clock), start=start
    )
    assert back.tolist() == given.tolist() and cache.index.stats().num_pages == (4, 0, 0)
    assert cache.match(1, 2, 3, 4).device_pages.tolist() == [100, 101, 102, 103]
    assert not cache.index.evict(HOST, 4).host.size
    assert cache.index.evict(DEVICE, 4).device.size == 4


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_splits_on_both_sides_of_three_copies(order: tuple[int, ...], failing: int | None) -> None:
    cache = Cache()
    cache.insert(1, 2, 3, 4, 5, 6)
    writes = []
    for length in (2, 4, 6):  # each is what the host lacks so far
        end = cache.match_node(*range(1, length + 1))
        writes.append(cache.index.begin_write(end, DEVICE, HOST, pages(length - 2, length - 1)))
    for fork in ((1, 9), (1, 2, 3, 9), (1, 2, 3, 4, 5, 9)):
        cache.insert(*fork)
    assert len(cache.index.evict(DEVICE, 50).device) == 3, "only the forks' ends can go"
    for number in order:
        freed = (cache.index.fail if number == failing else cache.index.ack)(writes[number].number)
        assert sorted(freed.host.tolist()) == (
            [2 * number, 2 * number + 1] if number == failing else []
        )
    hole = [] if failing is None else [100 + 2 * failing, 101 + 2 * failing]
    end = cache.match_node(1, 2, 3, 4, 5, 6)
    assert cache.index.missing(end, DEVICE, HOST) == len(hole)
    if hole:  # it is visible, and heals
        again = cache.index.begin_write(end, DEVICE, HOST, pages(50, 51))
        assert again.source_pages.tolist() == hole
        cache.index.ack(again.number)
    assert len(cache.index.evict(DEVICE, 50).device) == 6
    found = cache.match(1, 2, 3, 4, 5, 6)
    assert (found.num_pages, len(found.device_pages)) == (6, 0)
    assert found.end is not None
    load = cache.index.begin_write(found.end, HOST, DEVICE, pages(*range(6)))
    wanted = [50 + n % 2 if failing is not None and n // 2 == failing else n for n in range(6)]
    assert load.source_pages.tolist() == wanted


def test_a_stale_acknowledgement_changes_nothing_of_a_run_that_was_written_again() -> None:
    cache = Cache()
    cache.insert(1, 2)
    first = cache.back_up(1, 2)
    assert cache.index.fail(first.number).host.tolist() == [0, 1]
    assert cache.index.evict(DEVICE, 2).device.tolist() == [100, 101]
    cache.insert(1, 2)
    second = cache.back_up(1, 2, at=7)
    for end in (cache.index.ack, cache.index.fail):
        assert end(first.number).host.tolist() == []
    assert not len(cache.index.evict(DEVICE, 2).device), "the second copy still reads these pages"
    assert cache.index.fail(second.number).host.tolist() == [7, 8]
    assert cache.index.stats().stale_ends == 2


def test_a_flush_holds_what_a_copy_and_a_lock_use_until_they_end() -> None:
    cache = Cache()
    locked = cache.insert_node(1, 2)
    cache.insert(1, 2, 3)
    cache.insert(4)
    cache.index.lock(locked)
    write = cache.back_up(1, 2, 3)
    assert cache.index.flush().device.tolist() == [105]
    assert cache.match(1, 2, 3).num_pages == 0
    freed = cache.index.ack(write.number)
    assert (freed.device.tolist(), freed.host.tolist()) == ([104], [2])
    freed = cache.index.unlock(locked)
    assert (freed.device.tolist(), freed.host.tolist()) == ([100, 101], [0, 1])
    assert cache.index.stats().num_nodes == 0


@pytest.mark.parametrize(
    ("policy", "order"), [("lru", "abcd"), ("lfu", "cbda"), ("slru", "cabd"), ("priority", "cdab")]
)
def test_order_of_eviction(policy: str, order: str) -> None:
    cache = Cache(policy)
    for name, priority in zip("abcd", (1, 2, 0, 0), strict=True):
        cache.insert(ord(name), priority=priority)
    for name in "aaabbcdd":
        cache.match(ord(name))
    gone = [int(cache.index.evict(DEVICE, 1).device[0]) for _ in order]
    assert "".join("abcd"[page - 100] for page in gone) == order


def test_by_depth_the_deepest_page_goes_first() -> None:
    cache = Cache("depth")
    for prompt in ((1,), (2,), (3,), (4,), (1, 5, 6), (3, 5)):
        cache.insert(*prompt)  # of the last two, pages 104 and 107 are duplicates
    gone = [int(cache.index.evict(DEVICE, 1).device[0]) for _ in range(7)]
    assert gone == [106, 105, 108, 101, 103, 100, 102]


def test_states_bound_what_a_model_with_states_matches() -> None:
    cache = Cache(needs_state=True)
    cache.insert(1, 2, 3, 4)
    found = cache.match(1, 2, 3, 4)
    assert (found.num_pages, found.end, found.branch_pages) == (0, None, 4)
    assert not found.device_pages.size
    assert cache.index.put_state(token_bytes([1, 2, 3, 4]), 7)
    assert (cache.match(1, 2).num_pages, cache.match(1, 2).branch_pages) == (0, 2)
    # A state is put into the middle of what was inserted at once.
    assert cache.index.put_state(token_bytes([1, 2]), 8)
    assert not cache.index.put_state(token_bytes([1, 2]), 9), "it has one"
    assert not cache.index.put_state(token_bytes([1, 2, 5]), 9), "nothing is cached there"
    assert not cache.index.put_state(token_bytes([1, 2]), 9, Namespace("other"))
    found = cache.match(1, 2, 3, 9)
    assert (found.num_pages, found.state, found.branch_pages) == (2, 8, 3)
    assert cache.match(1, 2, 3, 4, 5).state == 7, "a split leaves it where it was"


def test_a_state_goes_with_its_page_or_before_it() -> None:
    cache = Cache(needs_state=True)
    cache.insert(1, 2, 3, 4)
    for length in (2, 4):
        assert cache.index.put_state(token_bytes(range(1, length + 1)), length)
    freed = cache.index.evict(DEVICE, 1)
    assert (freed.device.tolist(), freed.states) == ([103], (4,))
    # The other pages stay.
    assert (cache.match(1, 2, 3).num_pages, cache.match(1, 2, 3).branch_pages) == (2, 3)
    assert cache.index.evict_states(5).states == (2,)
    assert cache.index.stats().num_pages[DEVICE] == 3 and cache.match(1, 2, 3).num_pages == 0
    assert cache.index.put_state(token_bytes([1, 2]), 2), "it may be put again"


def test_a_state_stays_as_long_as_one_tier_has_its_page() -> None:
    cache = Cache(needs_state=True)
    cache.insert(1, 2)
    assert cache.index.put_state(token_bytes([1, 2]), 5)
    cache.index.ack(cache.back_up(1, 2).number)
    assert cache.index.evict(DEVICE, 2).states == ()
    found = cache.match(1, 2)
    # To be loaded first.
    assert (found.num_pages, found.device_pages.size, found.state) == (2, 0, None)
    assert found.end is not None
    cache.index.ack(cache.index.begin_write(found.end, HOST, DEVICE, pages(0, 1)).number)
    assert cache.match(1, 2).state == 5


def test_the_device_has_what_ends_in_a_state_there() -> None:
    cache = Cache(needs_state=True)
    cache.insert(1, 2, 3, 4)
    for length in (1, 4):
        assert cache.index.put_state(token_bytes(range(1, length + 1)), length)
    cache.index.ack(cache.back_up(1, 2, 3, 4).number)
    cache.index.evict(DEVICE, 1)
    found = cache.match(1, 2, 3, 4)
    assert (found.num_pages, found.device_pages.tolist(), found.state) == (4, [100], 1)


def test_a_locked_state_stays_and_its_pages_with_it() -> None:
    cache = Cache(needs_state=True)
    end = cache.insert_node(1)
    with pytest.raises(MisuseError, match="cannot lock a state"):
        cache.index.lock_state(end)
    assert cache.index.put_state(token_bytes([1]), 3)
    with pytest.raises(MisuseError, match="cannot lock a state"):
        cache.index.lock_state(end)
    cache.index.lock(end)
    cache.index.lock_state(end)
    assert cache.index.evict_states(1).states == () and cache.index.flush().states == ()
    with pytest.raises(MisuseError, match="or whose state is"):
        cache.index.unlock(end)
    cache.index.unlock_state(end)
    with pytest.raises(MisuseError, match="cannot unlock a state"):
        cache.index.unlock_state(end)
    assert cache.index.unlock(end).states == (3,), "it was flushed meanwhile"


def test_namespaces_share_nothing_and_leave_nothing() -> None:
    cache = Cache()
    lora = Namespace(lora="french")
    cache.insert(1, 2, namespace=lora)
    assert (cache.match(1, 2).num_pages, cache.match(1, 2, namespace=lora).num_pages) == (0, 2)
    cache.index.evict(DEVICE, 2)
    assert cache.index.stats().num_namespaces == 0


def test_a_million_tokens_and_a_path_of_many_nodes() -> None:
    index = PrefixIndex(16)
    tokens = token_bytes(np.arange(1 << 20) % 50_000)
    numbers = np.arange(1 << 16, dtype=np.int32)
    for stop in range(1, 1200):  # as many nodes, one below the other
        index.insert(tokens[: stop * 64], numbers[stop - 1 : stop], stop, shared=stop - 1)
    index.insert(tokens, numbers[1199:], 1 << 20, shared=1199)
    found = index.match(tokens, 1 << 20)
    assert np.array_equal(found.device_pages, numbers)
    assert found.end is not None and found.device_end is not None
    index.lock(found.device_end)
    write = index.begin_write(found.end, DEVICE, HOST, numbers)
    assert not index.flush().device.size
    assert not index.ack(write.number).device.size
    freed = index.unlock(found.device_end)
    assert len(freed.device) == len(freed.host) == 1 << 16
    index.insert(tokens, numbers, 1 << 20)
    assert len(index.evict(DEVICE, 1 << 16).device) == 1 << 16
    del index, found
    gc.collect()


def test_bad_input_is_one_line() -> None:
    cache = Cache()
    index, end = cache.index, cache.insert_node(1, 2)
    cache.match(1)
    gone = cache.insert_node(5)
    index.lock(end)
    index.evict(DEVICE, 1)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: PrefixIndex(0), "page_size 0: at least 1 token is needed"),
        (
            lambda: PrefixIndex(1, "fifo"),
            "unknown eviction policy 'fifo'; use lru, lfu, slru, priority, depth",
        ),
        (lambda: index.match(b"12345", 99), "tokens must be bytes, 4 for each token id"),
        (
            lambda: index.match([1], 99),  # type: ignore[arg-type]
            "tokens must be bytes, 4 for each token id",
        ),
        (lambda: index.match(b"", -1), "time went back from 2 s to -1 s"),
        (lambda: cache.insert(1, 2, shared=1), "2 pages given for pages 1 to 2 of the tokens"),
        (
            lambda: index.insert(token_bytes([8]), pages(), 99, shared=1),
            "1 pages are said to be shared, and the device has 0",
        ),
        (
            lambda: index.insert(token_bytes([8]), [1], 99),  # type: ignore[arg-type]
            "pages must be a numpy array of int32, not list",
        ),
        (
            lambda: index.insert(token_bytes([8]), pages(1).astype("u8"), 99),
            "pages must be a numpy array of int32 [n]",
        ),
        (lambda: index.lock(gone), "cannot lock a prefix that is not all on the device"),
        (lambda: index.unlock(gone), "cannot unlock a prefix that is not locked"),
        (
            lambda: index.begin_write(end, DEVICE, HOST, pages(1, 2, 3)),
            "a write of 3 pages: host lacks 2 of this prefix",
        ),
        (
            lambda: index.begin_write(end, DEVICE, HOST, pages(1), count=2),
            "1 pages given for a write of 2",
        ),
        (lambda: index.begin_write(end, DEVICE, DEVICE, pages(1)), "no copy from device to device"),
        (lambda: index.missing(gone, DEVICE, HOST), "this prefix is no longer in the cache"),
        (lambda: index.evict(STORAGE, 1), "only device and host have pages that can be evicted"),
    ]
    before = index.stats()
    for call, text in cases:
        with pytest.raises(MisuseError) as error:
            call()
        assert str(error.value).startswith(text) and "\n" not in str(error.value)
    assert index.stats() == before


def test_pages_that_were_given_with_gaps_come_out_in_order() -> None:
    cache = Cache()
    gaps = np.arange(0, 8, dtype=np.int32)[::2]
    cache.index.insert(token_bytes([1, 2, 3, 4]), gaps, 0)
    cache.clock = itertools.count(1)
    cache.insert(1, 2, 9)
    assert cache.match(1, 2, 3, 4).device_pages.tolist() == [0, 2, 4, 6]
    assert sorted(cache.index.evict(DEVICE, 9).device.tolist()) == [0, 2, 4, 6, 102]


# --- counts, refusals, bounds


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
    end = cache.insert_node(1, 2)
    assert cache.index.put_state(_key(1, 2), 7)
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
def test_a_refused_write_takes_nothing(
    source: Tier, target: Tier, given: PageIndices | list[int], said: str
) -> None:
    cache = Cache()
    end = cache.insert_node(1, 2)
    with pytest.raises(MisuseError, match=said):
        cache.index.begin_write(end, source, target, given)  # type: ignore[arg-type]
    assert cache.index.stats().writes_open == 0 and cache.index.evictable_pages == 2


def test_a_write_to_storage_has_no_target_pages() -> None:
    cache = Cache()
    cache.insert(1, 2)
    cache.index.ack(cache.back_up(1, 2).number)
    end = cache.match_node(1, 2)
    write = cache.index.begin_write(end, HOST, STORAGE, pages(5, 6))
    assert write.target_pages.size == 0 and write.source_pages.tolist() == [0, 1]
    assert not cache.index.fail(write.number).host.size, "what was given is not the index's"


def _key(*ids: int) -> bytes:
    return np.array(ids, "<u4").tobytes()
