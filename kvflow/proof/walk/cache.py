"""The walk over the shipped prefix index in a small world, through every order of events.

A state is the index with the memory, the store, the copies, the locks and the subscriber around it.
One step is one operation on the index, such as an insertion or the end of a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from kvflow.proof.walk.cache_life import POOL, Copy, Life, Lock, key_bytes, prefixes
from kvflow.proof.walk.cache_rules import check, check_landed, check_rest
from kvflow.proof.walk.cache_worlds import FIRST, FORKS, SAVE, CacheBounds, Prompt, Route
from kvflow.protocols.cache.events import Tier
from kvflow.protocols.errors import MisuseError
from kvflow.protocols.pages.layout import NO_PLACES

Step = Callable[[Life], bool]
"""A step of the world, which returns False if it was impossible."""


class State:
    """A state of the walk. States with the same future compare equal."""

    __slots__ = ("_key", "left", "life", "resting")

    def __init__(self, life: Life, left: CacheBounds) -> None:
        self._key = (life.fingerprint(), left)
        self.resting = not life.copies and not life.locks
        # `CacheWorld.acts` pickles the life. The walk calls `acts` only for new states, so it never
        # pickles the others.
        self.life: Life | None = life
        self.left = left

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self._key == other._key


class CacheWorld:
    def __init__(self, bounds: CacheBounds) -> None:
        self.bounds = bounds

    def start(self) -> State:
        life = Life()
        _insert(life, FIRST)
        if self.bounds.on_host:
            _begin(life, FIRST, SAVE, len(FIRST))
            _end(life, max(life.copies), landed=True)
        if not self.bounds.on_device:
            life.give_back(life.index.evict(Tier.DEVICE, POOL))
        check(life)
        return State(life, self.bounds)

    def rests(self, state: State) -> bool:
        return state.resting

    def acts(self, state: State) -> Iterator[tuple[str, bool, Callable[[], State]]]:
        life, state.life = state.life, None
        assert life is not None, "a state is gone on from once"
        frozen = life.frozen()
        # `_rest` empties the index, so it runs as an act, on a copy of the life.
        if state.resting:
            rest = partial(self._after, state, frozen, _rest, state.left)
            yield "nothing more happens", True, rest
        for text, fair, step, less in self._steps(life, state.left):
            yield text, fair, partial(self._after, state, frozen, step, less)

    @staticmethod
    def _after(state: State, frozen: bytes, step: Step, left: CacheBounds) -> State:
        life = Life.thawed(frozen)
        try:
            if not step(life):
                return state
        except MisuseError as error:
            raise AssertionError(f"I5: what is right is refused: {error}") from error
        check(life)
        return State(life, left)

    def _steps(
        self, life: Life, left: CacheBounds
    ) -> Iterator[tuple[str, bool, Step, CacheBounds]]:
        for number, copy in life.copies.items():
            pages = [len(key) for key in copy.keys]
            what = f"the copy of pages {pages} to {copy.target.name.lower()}"
            yield f"{what} lands", True, partial(_end, number=number, landed=True), left
            yield f"{what} fails", False, partial(_end, number=number, landed=False), left
        for n, lock in enumerate(life.locks):
            yield f"who reads {lock.key} ends", True, partial(_unlock, which=n), left
        if left.writes:
            less = left._replace(writes=left.writes - 1)
            for route in left.routes:
                for prompt, count in self._written(life):
                    text = f"{count} pages of {prompt} are copied to {route[1].name.lower()}"
                    begin = partial(_begin, prompt=prompt, route=route, count=count)
                    yield text, False, begin, less
        if left.splits:
            less = left._replace(splits=left.splits - 1)
            for fork in FORKS:
                if fork not in life.inserted and FIRST in life.inserted:
                    yield f"{fork} is cached", False, partial(_insert, prompt=fork), less
        if life.epoch and FIRST not in life.inserted:
            yield f"{FIRST} is cached again", False, partial(_insert, prompt=FIRST), left
        if left.evictions:
            less = left._replace(evictions=left.evictions - 1)
            for tier in (Tier.DEVICE, Tier.HOST):
                for count in (1, POOL):
                    text = f"{count} pages are to leave {tier.name.lower()}"
                    yield text, False, partial(_evict, tier=tier, count=count), less
        if left.flushes:
            yield "all is forgotten", False, _flush, left._replace(flushes=left.flushes - 1)
        if left.locks:
            less = left._replace(locks=left.locks - 1)
            for prompt in (FIRST, FIRST[:2]):
                yield f"a request reads {prompt}", False, partial(_lock, prompt=prompt), less
        if left.stales and life.last_ended:
            less = left._replace(stales=left.stales - 1)
            yield "a write is told to have landed again", False, _end_again, less

    @staticmethod
    def _written(life: Life) -> Iterator[tuple[Prompt, int]]:
        yield FIRST, 2
        for prompt in sorted(life.inserted):
            yield prompt, len(prompt)


def _rest(life: Life) -> bool:
    check_rest(life)
    return False


def _insert(life: Life, prompt: Prompt) -> bool:
    pages = life.take(Tier.DEVICE, list(prefixes(prompt)))
    inserted = life.index.insert(key_bytes(prompt), pages, 0.0)
    for page in inserted.duplicates.tolist():
        del life.memory[Tier.DEVICE][page]
    life.inserted |= {prompt}
    return True


def _begin(life: Life, prompt: Prompt, route: Route, count: int) -> bool:
    source, target = route
    found = life.index.match(key_bytes(prompt), 0.0)
    if found.end is None or not (missing := life.index.missing(found.end, source, target)):
        return False
    count = min(count, missing)
    pages = NO_PLACES if target is Tier.STORAGE else life.take(target, [()] * count)
    write = life.index.begin_write(found.end, source, target, pages, count=count)
    keys = tuple(prompt[: offset + 1] for offsets in write.offsets for offset in offsets)
    sources, targets = tuple(write.source_pages.tolist()), tuple(write.target_pages.tolist())
    life.copies[write.number] = Copy(life.epoch, source, target, keys, sources, targets)
    return True


def _end(life: Life, number: int, landed: bool) -> bool:
    # Read the sources at the end of the copy, so that the rules see a source that changed.
    copy = life.copies.pop(number)
    if landed and copy.target is Tier.STORAGE:
        life.store.update(life.memory[copy.source][page] for page in copy.source_pages)
    elif landed:
        held = [life.memory[copy.source][page] for page in copy.source_pages]
        life.memory[copy.target].update(zip(copy.target_pages, held, strict=True))
    life.give_back(life.index.ack(number) if landed else life.index.fail(number))
    life.last_ended = number
    if landed:
        check_landed(life, copy)
    return True


def _end_again(life: Life) -> bool:
    for end in (life.index.ack, life.index.fail):
        freed = end(life.last_ended)
        if freed.device.size or freed.host.size:
            raise AssertionError("I6: a write that has ended gives pages back")
    return True


def _lock(life: Life, prompt: Prompt) -> bool:
    found = life.index.match(key_bytes(prompt), 0.0)
    if found.device_end is None:
        return False
    life.index.lock(found.device_end)
    pages = tuple(found.device_pages.tolist())
    life.locks.append(Lock(found.device_end, life.epoch, prompt[: len(pages)], pages))
    return True


def _unlock(life: Life, which: int) -> bool:
    life.give_back(life.index.unlock(life.locks.pop(which).node))
    return True


def _evict(life: Life, tier: Tier, count: int) -> bool:
    freed = life.index.evict(tier, count)
    life.give_back(freed)
    return bool(freed.device.size or freed.host.size)


def _flush(life: Life) -> bool:
    life.give_back(life.index.flush())
    life.epoch, life.inserted = life.epoch + 1, frozenset()
    return True
