"""Rules for every state of the walk over the prefix index. A broken one raises AssertionError."""

from __future__ import annotations

from kvflow.proof.walk.cache_life import POOL, Copy, Life, name_of, path_of, prefixes
from kvflow.proof.walk.cache_worlds import Prompt
from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.nodes import PAGED, Node
from kvflow.protocols.machines.cached_run import RunPhase

PRESENT, ABSENT, ARRIVING = RunPhase.PRESENT, RunPhase.ABSENT, RunPhase.ARRIVING


def check(life: Life) -> None:
    nodes = life.nodes()
    for tier in PAGED:
        _check_pages(life, nodes, tier)
    present = _check_contents(life, nodes)
    _check_users(life)
    _check_subscriber(life, present)
    _check_pins(life, nodes)


def _check_pages(life: Life, nodes: list[Node], tier: Tier) -> None:
    """Check that the nodes hold exactly the pages of `tier` that are in use, each of them once."""
    held: list[int] = []
    for node in nodes:
        pages = node.pages[tier]
        if (pages is None) is not (node.phase[tier] is ABSENT) or (
            pages is not None and len(pages) != node.num_pages
        ):
            raise AssertionError(f"I1: {node!r} has {pages} in {tier.name.lower()}")
        held.extend([] if pages is None else pages.tolist())
    if sorted(held) != sorted(life.memory[tier]):
        raise AssertionError(
            f"I1: {tier.name.lower()} pages {sorted(life.memory[tier])} are out, and {held} cached"
        )


def _check_contents(life: Life, nodes: list[Node]) -> list[set[Prompt]]:
    """Check that every readable page holds the content of its tokens.

    Returns the readable prefixes of each tier, without flushed ones.
    """
    present: list[set[Prompt]] = [set(), set(), set()]
    for node in nodes:
        path = path_of(node)
        keys = list(prefixes(path))[len(path) - node.num_pages :]
        for tier in Tier:
            if node.phase[tier] is not PRESENT:
                continue
            if not node.detached:
                present[tier].update(keys)
            if tier is Tier.STORAGE:
                missing = [key for key in keys if key not in life.store]
            else:
                pages = node.pages[tier]
                assert pages is not None
                missing = [
                    k
                    for k, p in zip(keys, pages.tolist(), strict=True)
                    if life.memory[tier].get(p) != k
                ]
            if missing:
                raise AssertionError(
                    f"I14: {tier.name.lower()} has not got page {missing[0]}, and can be read"
                )
    return present


def _check_users(life: Life) -> None:
    """Check that no page was evicted while a request reads it or a copy uses it."""
    for lock in life.locks:
        for key, page in zip(prefixes(lock.key), lock.pages, strict=True):
            if life.memory[Tier.DEVICE].get(page) != key:
                raise AssertionError(
                    f"I13: page {page} of {key} was evicted, and a request reads it"
                )
    for copy in life.copies.values():
        for key, page in zip(copy.keys, copy.source_pages, strict=True):
            if life.memory[copy.source].get(page) != key:
                raise AssertionError(f"I13: page {page} of {key} was evicted, and a copy reads it")
        for page in copy.target_pages:
            if life.memory[copy.target].get(page) != ():
                raise AssertionError(f"I13: page {page} was given away, and a copy writes it")


def _check_subscriber(life: Life, present: list[set[Prompt]]) -> None:
    """Check that the published events name exactly the pages whose whole prefix is cached too."""
    life.subscriber.replay(life.index.take_events())
    for tier, keys, told in zip(Tier, present, life.subscriber.blocks, strict=True):
        connected = {
            name_of(key) for key in keys if all(prefix in keys for prefix in prefixes(key))
        }
        if more := told.keys() - connected:
            raise AssertionError(
                f"I10: {len(more)} pages are told of that {tier.name.lower()} has not got"
            )
        if connected - told.keys():
            raise AssertionError(f"I10: {tier.name.lower()} has pages that are not told of")


def _check_pins(life: Life, nodes: list[Node]) -> None:
    """Check the index's count of evictable device pages.

    A page can be evicted unless a request or a copy uses it, or uses a page below it.
    """
    # The expected count comes from the world's own locks and copies, not from the nodes' pins.
    used = {(lock.epoch, lock.key) for lock in life.locks}
    for copy in life.copies.values():
        if Tier.DEVICE in (copy.source, copy.target):
            used.update((copy.epoch, key) for key in copy.keys)
    pinned = {(epoch, prefix) for epoch, key in used for prefix in prefixes(key)}
    out = free = 0
    for node in nodes:
        if node.phase[Tier.DEVICE] is not ABSENT:
            path, epoch = path_of(node), life.epoch - node.detached
            ends = list(prefixes(path))[len(path) - node.num_pages :]
            out += node.num_pages
            free += sum((epoch, key) not in pinned for key in ends)
    if life.index.evictable_pages != free:
        raise AssertionError(
            f"I5: {life.index.evictable_pages} of {out} pages are said to be evictable, not {free}"
        )


def check_rest(rest: Life) -> None:
    """Check that a life at rest can free every page, which empties its index."""
    if rest.index.stats().writes_open:
        raise AssertionError("I5: writes are open that have ended")
    # Pages of one tier may lie below pages of the other, so evict from the tiers in turn.
    for _ in range(2 * POOL):
        before = sum(map(len, rest.memory))
        for tier in PAGED:
            rest.give_back(rest.index.evict(tier, POOL))
        if sum(map(len, rest.memory)) == before:
            break
    rest.subscriber.replay(rest.index.take_events())
    left, stats = [sorted(memory) for memory in rest.memory], rest.index.stats()
    if any(left) or any(stats.num_pages) or stats.num_nodes or rest.index._residents.num_pinned:
        raise AssertionError(f"I5: at rest pages {left} cannot be evicted: {stats}")
    if any(rest.subscriber.blocks):
        raise AssertionError("I10: nothing is cached, and subscribers do not know")


def check_landed(life: Life, copy: Copy) -> None:
    """Check that each page of a landed write is readable in the target tier, even after a split."""
    # If the epoch differs, a flush removed the pages from the tree.
    if copy.epoch != life.epoch:
        return
    present: set[Prompt] = set()
    for node in life.nodes():
        if not node.detached and node.phase[copy.target] is PRESENT:
            path = path_of(node)
            present.update(list(prefixes(path))[len(path) - node.num_pages :])
    if missing := [key for key in copy.keys if key not in present]:
        raise AssertionError(
            f"I10: page {missing[0]} has landed in {copy.target.name.lower()}, and is not there"
        )
