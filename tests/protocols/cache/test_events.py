"""What subscribers are told: nothing before it is there, parents first, nothing of what failed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import pytest

from kvflow.protocols.cache.events import CLEARED, Cleared, Event, Removed, Stored, Tier
from kvflow.protocols.cache.hashes import ANY, Namespace, chain_root, token_bytes
from kvflow.protocols.cache.index import PrefixIndex
from kvflow.protocols.cache.nodes import Node
from kvflow.protocols.cache.writes import Write
from tests.protocols.cache.driver import Driver
from tests.protocols.cache.subscriber import Subscriber, block_hash, digest_chain

DEVICE, HOST, STORAGE = Tier

Kind = TypeVar("Kind", Stored, Removed, Cleared)
Brief: TypeAlias = tuple[str, Tier, tuple[int, ...] | int] | tuple[str]


class Cache:
    """Pages of one token, and a subscriber that gets every event at once."""

    def __init__(self) -> None:
        self.index = PrefixIndex(1, events=True)
        self.clock = itertools.count()
        self.numbers = itertools.count()
        self.subscriber = Subscriber()

    def pages(self, count: int) -> np.ndarray:
        return np.array([next(self.numbers) for _ in range(count)], np.int32)

    def insert(self, *ids: int, namespace: Namespace = ANY) -> None:
        self.index.insert(token_bytes(ids), self.pages(len(ids)), next(self.clock), namespace)

    def end(self, *ids: int) -> Node:
        found = self.index.match(token_bytes(ids), next(self.clock))
        assert found.end is not None and found.num_pages == len(ids)
        return found.end

    def begin(self, *ids: int, source: Tier = DEVICE, target: Tier = HOST) -> Write:
        end = self.end(*ids)
        count = self.index.missing(end, source, target)
        return self.index.begin_write(end, source, target, self.pages(count), count=count)

    def told(self) -> list[Brief]:
        """Events since the last call: (what, tier, their last tokens or the number of pages)."""
        events = self.index.take_events()
        self.subscriber.replay(events)
        return [brief(event) for event in events]


def only(kind: type[Kind], events: Sequence[Event]) -> list[Kind]:
    """Return the events, each of which must be of this kind."""
    found = [event for event in events if isinstance(event, kind)]
    assert len(found) == len(events)
    return found


def brief(event: Event) -> Brief:
    if isinstance(event, Stored):
        return "stored", event.tier, tuple(np.frombuffer(event.tokens, "<u4").tolist())
    if isinstance(event, Removed):
        return "removed", event.tier, len(event.digests)
    return ("cleared",)


def hashes(*ids: int) -> list[int]:
    return [block_hash(digest) for digest in digest_chain(ids, 1)]


def test_a_split_before_the_ack() -> None:
    cache = Cache()
    cache.insert(1, 2, 3, 4)
    write = cache.begin(1, 2, 3, 4)
    assert cache.told() == [("stored", DEVICE, (1, 2, 3, 4))]
    cache.insert(1, 2, 5, 6)
    assert cache.told() == [("stored", DEVICE, (5, 6))]
    cache.index.ack(write.number)
    events = only(Stored, cache.index.take_events())
    assert [brief(event) for event in events] == [
        ("stored", HOST, (1, 2)),
        ("stored", HOST, (3, 4)),
    ]
    assert [event.hashes for event in events] == [hashes(1, 2, 3, 4)[:2], hashes(1, 2, 3, 4)[2:]]
    assert [event.parent for event in events] == [None, hashes(1, 2)[-1]]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("failing", [None, 0, 1, 2])
@pytest.mark.parametrize("target", [HOST, STORAGE])
def test_copies_of_a_path_end_in_any_order(
    order: tuple[int, ...], failing: int | None, target: Tier
) -> None:
    cache = Cache()
    cache.insert(1, 2, 3, 4, 5, 6)
    writes = [cache.begin(*range(1, length + 1), target=target) for length in (2, 4, 6)]
    for fork in ((1, 9), (1, 2, 3, 9), (1, 2, 3, 4, 5, 9)):
        cache.insert(*fork)
    cache.told()
    landed: set[int] = set()
    for number in order:
        (cache.index.fail if number == failing else cache.index.ack)(writes[number].number)
        landed |= set() if number == failing else {number}
        cache.told()
        whole = next(count for count in range(4) if count not in landed)
        assert cache.subscriber.content()[target] == set(hashes(1, 2, 3, 4, 5, 6)[: 2 * whole])
    again = cache.begin(1, 2, 3, 4, 5, 6, target=target) if failing is not None else None
    assert cache.told() == []
    if again is not None:  # the hole heals, and what lies behind it is told of
        cache.index.ack(again.number)
        cache.told()
    assert cache.subscriber.content()[target] == set(hashes(1, 2, 3, 4, 5, 6))


def test_write_back_of_a_child_first() -> None:
    cache = Cache()
    cache.insert(1, 2)
    parent = cache.begin(1, 2)
    cache.insert(1, 2, 3)
    child = cache.begin(1, 2, 3)
    cache.told()
    cache.index.ack(child.number)
    assert cache.told() == []
    assert {event.tier for event in only(Stored, cache.index.snapshot_events())} == {DEVICE}
    cache.index.fail(parent.number)
    assert cache.told() == []
    assert len(cache.index.evict(HOST, 9).host) == 1
    assert cache.told() == [], "what was never told of is not taken back"


def test_a_failed_copy_and_a_stale_ack_say_nothing() -> None:
    cache = Cache()
    cache.insert(1, 2)
    write = cache.begin(1, 2)
    cache.told()
    cache.index.fail(write.number)
    cache.index.ack(write.number)
    assert cache.told() == []
    again = cache.begin(1, 2)
    cache.index.ack(write.number)
    assert cache.told() == [], "the ack of the copy that failed tells nothing of the one under way"
    cache.index.ack(again.number)
    assert cache.told() == [("stored", HOST, (1, 2))]


def test_a_load_back_is_told_of_when_it_has_landed() -> None:
    cache = Cache()
    cache.insert(1, 2)
    cache.index.ack(cache.begin(1, 2).number)
    cache.index.evict(DEVICE, 2)
    assert cache.told()[-1] == ("removed", DEVICE, 2)
    load = cache.begin(1, 2, source=HOST, target=DEVICE)
    assert cache.told() == []
    cache.index.ack(load.number)
    assert cache.told() == [("stored", DEVICE, (1, 2))]


def test_eviction_removes_children_first_and_only_what_went() -> None:
    cache = Cache()
    cache.insert(1, 2, 3, 4)
    cache.insert(1, 2, 5)
    cache.told()
    cache.index.evict(DEVICE, 1)
    assert len(cache.subscriber.content()[DEVICE]) == 5
    cache.told()
    cache.index.evict(DEVICE, 9)
    removed = [event.hashes for event in only(Removed, cache.index.take_events())]
    assert removed[-1] == hashes(1, 2)[::-1], "the last page first"
    assert sum(len(part) for part in removed) == 4


def test_what_leaves_the_index_leaves_storage_too() -> None:
    cache = Cache()
    cache.insert(1, 2)
    cache.index.ack(cache.begin(1, 2, target=STORAGE).number)
    cache.told()
    cache.index.evict(DEVICE, 2)
    assert cache.told() == [("removed", DEVICE, 2), ("removed", STORAGE, 2)]


def test_flush_clears_once_and_what_ends_after_it_is_silent() -> None:
    cache = Cache()
    cache.insert(1, 2, 3)
    write = cache.begin(1, 2, 3)
    cache.index.lock(cache.end(1, 2))
    cache.index.flush()
    # What was not taken before does not matter any more.
    assert cache.index.take_events() == [CLEARED]
    cache.index.ack(write.number)
    assert cache.told() == []
    cache.insert(1, 2)
    assert cache.told() == [("stored", DEVICE, (1, 2))]


def test_a_namespace_begins_its_chain_with_its_root() -> None:
    cache = Cache()
    own = Namespace(salt="s", lora="a")
    cache.insert(1, 2)
    cache.insert(1, 2, namespace=own)
    plain, other = only(Stored, cache.index.take_events())
    assert plain.hashes == hashes(1, 2)
    assert other.hashes == [
        block_hash(digest) for digest in digest_chain((1, 2), 1, chain_root(own))
    ]
    assert (other.parent, other.namespace) == (None, own)


def test_a_snapshot_is_the_content_with_parents_first() -> None:
    cache = Cache()
    cache.insert(1, 2, 3, 4)
    cache.insert(1, 2, 5)
    cache.insert(1, 2, namespace=Namespace(lora="a"))
    cache.index.ack(cache.begin(1, 2, 3).number)
    cache.begin(1, 2, 5)  # under way
    cache.told()
    late = Subscriber()
    late.replay(cache.index.snapshot_events())
    assert late.content() == cache.subscriber.content()
    assert len(late.content()[HOST]) == 3
    assert cache.told() == [], "a snapshot is nothing that has happened"


def test_pages_are_cut_short_bit_by_bit() -> None:
    ids = list(range(100))
    cache = Cache()
    cache.insert(*ids)
    cache.told()
    for left in range(99, 0, -1):
        cache.index.evict(DEVICE, 1)
        removed = only(Removed, cache.index.take_events())
        assert removed[0].hashes == [hashes(*ids)[left]]
    (rest,) = only(Stored, cache.index.snapshot_events())
    (again,) = only(Stored, cache.index.snapshot_events())
    assert again.digests is rest.digests, "a page is hashed once"
    assert rest.hashes == hashes(0) and len(rest.tokens) == 4
    # A page that is left keeps no long array.
    assert rest.digests.base is None or rest.digests.base.size <= 8


def test_nothing_is_recorded_unless_asked_for() -> None:
    index = PrefixIndex(1)
    index.insert(token_bytes([1, 2]), np.array([0, 1], np.int32), 0.0)
    assert index.take_events() == index.snapshot_events() == []


# --- every order


LONG = (0, 0, 0, 0)
SHORT_FORK, LONG_FORK = (0, 1), (0, 0, 0, 1)
STEPS = ("begin short", "begin long", "end first", "end second", "split high", "split low")


def possible(order: tuple[str, ...]) -> bool:
    """A write ends after it began: the first end needs one that has begun, the second both."""
    begun = [order.index("begin short"), order.index("begin long")]
    return order.index("end first") > min(begun) and order.index("end second") > max(
        [*begun, order.index("end first")]
    )


ORDERS = [order for order in itertools.permutations(STEPS) if possible(order)]


@pytest.mark.parametrize(
    "route", [(Tier.DEVICE, Tier.HOST), (Tier.DEVICE, Tier.STORAGE), (Tier.HOST, Tier.DEVICE)]
)
@pytest.mark.parametrize("outcomes", list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("newest_first", [False, True])
def test_every_order(
    route: tuple[Tier, Tier], outcomes: tuple[bool, bool], newest_first: bool
) -> None:
    for order in ORDERS:
        driver = Driver("lru")
        driver.insert(ANY, LONG, 0, False)
        if route[0] is Tier.HOST:  # a load back
            driver.begin_write(ANY, LONG, (Tier.DEVICE, Tier.HOST), 0)
            driver.end(min(driver.oracle.writes), True)
            driver.evict(Tier.DEVICE, len(LONG))
        steps = actions(driver, route, outcomes, newest_first)
        for name in order:
            steps[name]()
            driver.subscribers_know_what_can_be_read()
            driver.every_page_is_free_or_held()
        driver.finish()


def actions(
    driver: Driver, route: tuple[Tier, Tier], outcomes: tuple[bool, bool], newest_first: bool
) -> dict[str, Callable[[], None]]:
    def end(landed: bool) -> None:
        # The longer one may have found nothing left to copy.
        if writes := sorted(driver.oracle.writes):
            driver.end(writes[-1 if newest_first else 0], landed)

    return {
        "begin short": lambda: driver.begin_write(ANY, LONG[:2], route, 0),
        "begin long": lambda: driver.begin_write(ANY, LONG, route, 0),
        "end first": lambda: end(outcomes[0]),
        "end second": lambda: end(outcomes[1]),
        "split high": lambda: driver.insert(ANY, SHORT_FORK, 0, False),
        "split low": lambda: driver.insert(ANY, LONG_FORK, 0, False),
    }
