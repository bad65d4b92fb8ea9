"""The index against the oracle: inserts, splits, copies, evictions and flushes in any order."""

from __future__ import annotations

import random
from typing import TypeAlias

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvflow.protocols.cache.events import Tier
from kvflow.protocols.cache.hashes import ANY, Namespace
from kvflow.protocols.cache.policies import POLICIES
from tests.protocols.cache.driver import POOL, Driver

Prompt: TypeAlias = tuple[int, ...]

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
NAMESPACES = [ANY, ANY, ANY, Namespace(lora="a")]
ROUTES = [(0, 1), (0, 1), (1, 0), (0, 2), (1, 2)]
TIERS = [Tier.DEVICE, Tier.DEVICE, Tier.HOST]
COUNTS = [1, 1, 2, 5, POOL]


class IndexMachine(RuleBasedStateMachine):
    begun: Driver | None = None

    @property
    def driver(self) -> Driver:
        assert self.begun is not None
        return self.begun

    @initialize(policy=st.sampled_from(sorted(POLICIES)), needs_state=st.booleans())
    def start(self, policy: str, needs_state: bool) -> None:
        self.begun = Driver(policy, needs_state=needs_state)

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        prompt=PROMPTS,
        priority=st.integers(0, 2),
        share=st.booleans(),
    )
    def insert(self, namespace: Namespace, prompt: Prompt, priority: int, share: bool) -> None:
        self.driver.insert(namespace, prompt, priority, share)

    @rule(namespace=st.sampled_from(NAMESPACES), prompt=PROMPTS)
    def lock(self, namespace: Namespace, prompt: Prompt) -> None:
        self.driver.lock(namespace, prompt)

    @precondition(lambda self: self.driver.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        self.driver.unlock(data.draw(st.integers(0, len(self.driver.locked) - 1)))

    @rule(namespace=st.sampled_from(NAMESPACES), prompt=PROMPTS)
    def put_state(self, namespace: Namespace, prompt: Prompt) -> None:
        self.driver.put_state(namespace, prompt)

    @precondition(lambda self: self.driver.locked)
    @rule(data=st.data())
    def unlock_state(self, data: st.DataObject) -> None:
        self.driver.unlock_state(data.draw(st.integers(0, len(self.driver.locked) - 1)))

    @rule(count=st.integers(1, 3))
    def evict_states(self, count: int) -> None:
        self.driver.evict_states(count)

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        prompt=PROMPTS,
        route=st.sampled_from(ROUTES),
        cut=st.integers(0, 2),
    )
    def begin_write(
        self, namespace: Namespace, prompt: Prompt, route: tuple[int, int], cut: int
    ) -> None:
        self.driver.begin_write(namespace, prompt, route, cut)

    @precondition(lambda self: self.driver.oracle.writes or self.driver.ended)
    @rule(data=st.data(), landed=st.booleans())
    def end_write(self, data: st.DataObject, landed: bool) -> None:
        numbers = sorted(self.driver.oracle.writes) + self.driver.ended[-1:]  # the last is stale
        self.driver.end(data.draw(st.sampled_from(numbers)), landed)

    @rule(tier=st.sampled_from(TIERS), count=st.sampled_from(COUNTS))
    def evict(self, tier: Tier, count: int) -> None:
        self.driver.evict(tier, count)

    @rule(count=st.sampled_from(COUNTS), wanted=st.integers(1, 9))
    def evict_copied(self, count: int, wanted: int) -> None:
        self.driver.evict_copied(count, wanted)

    @rule(namespace=st.sampled_from(NAMESPACES), prompt=PROMPTS, first=st.integers(0, 3))
    def lose(self, namespace: Namespace, prompt: Prompt, first: int) -> None:
        self.driver.lose(namespace, prompt, first)

    @rule(really=st.integers(0, 5))
    def flush(self, really: int) -> None:
        if really == 5:
            self.driver.flush()

    @invariant()
    def every_page_is_free_or_held(self) -> None:
        if self.begun is not None:
            self.begun.every_page_is_free_or_held()

    @invariant()
    def subscribers_know_what_can_be_read(self) -> None:
        if self.begun is not None:
            self.begun.subscribers_know_what_can_be_read()

    def teardown(self) -> None:
        if self.begun is not None:
            self.begun.finish()


IndexMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestIndex = IndexMachine.TestCase


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_long_walk(policy: str, seed: int) -> None:
    """What short runs do not reach: deep trees, full pools, many copies at once."""
    rng = random.Random(f"{seed} {policy}")
    for _ in range(50):
        driver = Driver(policy, needs_state=rng.random() < 0.5)
        for _ in range(120):
            step(driver, rng)
            driver.every_page_is_free_or_held()
            driver.subscribers_know_what_can_be_read()
        driver.finish()


def step(driver: Driver, rng: random.Random) -> None:
    namespace, prompt = rng.choice(NAMESPACES), tuple(rng.choices((0, 1), k=rng.randint(1, 6)))
    kind = rng.randrange(100)
    writes = sorted(driver.oracle.writes)
    if kind < 6:
        driver.put_state(namespace, prompt)
    elif kind < 9:
        driver.evict_states(rng.choice((1, 1, 2)))
    elif kind < 11 and driver.locked:
        driver.unlock_state(rng.randrange(len(driver.locked)))
    elif kind < 34:
        driver.insert(namespace, prompt, rng.randrange(3), rng.random() < 0.5)
    elif kind < 41:
        driver.lock(namespace, prompt)
    elif kind < 47 and driver.locked:
        driver.unlock(rng.randrange(len(driver.locked)))
    elif kind < 64:
        driver.begin_write(namespace, prompt, rng.choice(ROUTES), rng.randrange(3))
    elif kind < 80 and writes:
        driver.end(rng.choice(writes), rng.random() < 0.7)
    elif kind < 82 and driver.ended:
        driver.end(rng.choice(driver.ended), rng.random() < 0.5)
    elif kind < 88:
        driver.evict_copied(rng.choice(COUNTS), rng.randint(1, 9))
    elif kind < 90:
        driver.lose(namespace, prompt, rng.randrange(4))
    elif kind < 99:
        driver.evict(rng.choice(TIERS), rng.choice(COUNTS))
    else:
        driver.flush()
