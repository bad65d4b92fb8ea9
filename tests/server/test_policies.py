"""How a router chooses among workers: by what they were sent, by their load, or in turn; over
fakes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from kvflow.http.large_bodies import LARGE_BYTES
from kvflow.router.cache_view import Prompts
from kvflow.router.kvflow_engine import read_identity
from kvflow.router.policies import Policy, PolicyName
from kvflow.router.router import Router
from kvflow.router.routes import router_app
from kvflow.router.workers import Worker
from kvflow.serve.cache.prefix import CacheStats
from tests.server.fake_service import FakeService, Meeting, Role, Server, served
from tests.server.test_measures import labelled, scrape

CACHE = CacheStats(pages=0, evictable_pages=0, asked_tokens=0, hit_tokens=0, evicted_pages=0)
FIRST, SECOND, THIRD = ([start + i % 7 for i in range(20)] for start in (10, 20, 30))


class Front:
    """Two prefills and two decodes behind a router."""

    def __init__(
        self, router: Router, server: Server, session: aiohttp.ClientSession, roles: list[Role]
    ) -> None:
        self.router, self.server, self.roles, self._session = router, server, roles, session
        self.prefills, self.decodes = roles[:2], roles[2:]

    async def post(self, prompt: list[int], **fields: Any) -> None:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2}, **fields}
        async with self._session.post(self.server.make_url("/generate"), json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def ask(self, prompt: list[int], **fields: Any) -> tuple[int, int]:
        """Which prefill and which decode have served it."""
        before = [len(role.service.requests) for role in self.roles]
        await self.post(prompt, **fields)
        p0, _, d0, d1 = (
            len(role.service.requests) - n for role, n in zip(self.roles, before, strict=True)
        )
        assert d0 + d1 == 1 and p0 in (0, 1)
        return 1 - p0, 1 - d0

    async def flush(self) -> None:
        async with self._session.post(self.server.make_url("/flush_cache")) as answer:
            assert answer.status == 200

    async def metric(self, name: str) -> dict[tuple[str, ...], float]:
        return labelled(await scrape(self._session, self.server), name)

    def known(self) -> list[int]:
        """How many chunks of prompts each worker is known to have."""
        return [len(worker.cache.prefixes) for worker in self.router.workers.all]

    def ask_workers_who_they_are(self) -> None:
        for one in self.router.workers.all:
            one.check_due.set()


class Fronts:
    """Makes them."""

    def __init__(
        self, meeting: Meeting, session: aiohttp.ClientSession, stack: AsyncExitStack
    ) -> None:
        self._meeting, self._session, self._stack = meeting, session, stack

    async def make(
        self, policy: PolicyName = "cache_aware", *, cache: bool = True, most_more: int = 8
    ) -> Front:
        roles, servers = [], []
        for name in ("prefill", "prefill", "decode", "decode"):
            service = FakeService(name, self._meeting)
            service.changed_report = {"cache": CACHE, "pages_total": 4096} if cache else {}
            roles.append(Role(service))
            servers.append(await self._stack.enter_async_context(served(roles[-1].app)))
        urls = [server.url for server in servers]
        chosen = Policy(policy, balance_abs_threshold=most_more)
        router = Router(urls[:2], urls[2:], poll_s=3600, retry_timeout_s=0, policy=chosen)
        self._stack.push_async_callback(router.close)
        await router.start()
        server = await self._stack.enter_async_context(served(router_app(router)))
        return Front(router, server, self._session, roles)


@pytest.fixture
async def fronts(meeting: Meeting, session: aiohttp.ClientSession) -> AsyncIterator[Fronts]:
    async with AsyncExitStack() as stack:
        yield Fronts(meeting, session, stack)


async def test_a_conversation_stays_where_its_turns_before_are(fronts: Fronts) -> None:
    front = await fronts.make()
    homes = [await front.ask(prompt) for prompt in (FIRST, SECOND, THIRD)]
    assert len({home[0] for home in homes}) == len({home[1] for home in homes}) == 2, (
        "new ones go to the least loaded"
    )
    for turn in range(1, 5):
        for prompt, home in ((FIRST, homes[0]), (THIRD, homes[2]), (SECOND, homes[1])):
            assert await front.ask([*prompt, *range(4 * turn)]) == home
    hits = await front.metric("kvflow_router_worker_prefix_hits_total")
    assert [sum(hits[key] for key in hits if key[0] == role) for role in ("prefill", "decode")] == [
        12,
        12,
    ]


async def test_prefill_and_decode_are_chosen_each_by_its_own_memory(fronts: Fronts) -> None:
    front = await fronts.make()
    prefill, decode = await front.ask(FIRST)
    for one in front.router.workers.of("prefill"):
        one.cache.forget()
    found = [await front.ask(FIRST) for _ in range(3)]
    assert found == [(1 - prefill, decode)] * 3, (
        "the prefill that was sent less; from then on the same"
    )


@pytest.mark.parametrize("salt", ["cache_salt", "extra_key"])
async def test_another_salt_is_another_prompt(fronts: Fronts, salt: str) -> None:
    front = await fronts.make()
    home = await front.ask(FIRST, **{salt: "a"})
    assert await front.ask(FIRST, **{salt: "b"}) == (1 - home[0], 1 - home[1])
    assert await front.ask(FIRST, **{salt: "a"}) == home


async def test_a_flush_is_the_end_of_what_is_known(fronts: Fronts) -> None:
    front = await fronts.make()
    await front.ask(FIRST)
    assert sum(front.known()) == 2
    await front.flush()
    assert front.known() == [0] * 4


async def test_another_process_at_an_address_is_known_to_have_nothing(fronts: Fronts) -> None:
    front = await fronts.make()
    home = await front.ask(FIRST)
    front.decodes[home[1]].service.incarnation += 1
    front.ask_workers_who_they_are()
    async with asyncio.timeout(5):
        while sum(front.known()) != 1:
            await asyncio.sleep(0.005)
    assert await front.ask(FIRST) == (home[0], 1 - home[1])


async def test_workers_without_a_cache_are_chosen_by_load(fronts: Fronts) -> None:
    front = await fronts.make(cache=False)
    homes = Counter([await front.ask(FIRST) for _ in range(6)])
    assert set(homes.values()) == {3} and front.known() == [0] * 4


@pytest.mark.parametrize("opened", [b"[", b'{"a":'], ids=["lists", "objects"])
async def test_a_large_body_that_is_nested_deep_is_400(
    fronts: Fronts, session: aiohttp.ClientSession, opened: bytes
) -> None:
    """As deep as JSON may be: neither the router nor, where the router does not look, a worker
    fails on it.
    """
    front = await fronts.make()
    deep = opened * 900 + b"1" + (b"]" if opened == b"[" else b"}") * 900
    raw = b'{"text": "%b", "chat_template_kwargs": %b, "messages": [{}]}' % (
        b"x" * LARGE_BYTES,
        deep,
    )
    prefill = front.router.workers.of("prefill")[0]
    for url, path in ((front.server.url, "/generate"), (prefill.url, "/v1/chat/completions")):
        async with session.post(url + path, data=raw) as answer:
            assert answer.status == 400, await answer.text()


async def test_a_cache_that_is_switched_off_is_noticed(fronts: Fronts) -> None:
    front = await fronts.make()
    await front.ask(FIRST)
    for role in front.roles:
        role.service.changed_report = {}
    front.ask_workers_who_they_are()
    async with asyncio.timeout(5):
        while front.router.workers.cache_prompts():
            await asyncio.sleep(0.005)
    assert front.known() == [0] * 4


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
async def test_other_policies_do_not_look_at_prompts(fronts: Fronts, policy: PolicyName) -> None:
    front = await fronts.make(policy)
    assert Counter([(await front.ask(FIRST))[0] for _ in range(6)]) == {0: 3, 1: 3}
    assert front.known() == [0] * 4


async def test_an_overloaded_worker_is_passed_over(fronts: Fronts) -> None:
    front = await fronts.make(most_more=2)
    await front.ask(FIRST)
    for role in front.decodes:
        role.service.gate.clear()
    asked = [asyncio.create_task(front.post([*FIRST, i])) for i in range(8)]
    async with asyncio.timeout(5):
        while sum(one.running for one in front.router.workers.all) < 16:
            await asyncio.sleep(0.005)
    running = {
        role: [one.running for one in front.router.workers.of(role)]
        for role in ("prefill", "decode")
    }
    for role in front.decodes:
        role.service.gate.set()
    await asyncio.gather(*asked)
    # Three are more than two more than none; from the fourth on both have the prompt, and share
    # what comes.
    assert running == {"prefill": [4, 4], "decode": [4, 4]}


def worker(running: int, *chains: list[int], turn: int = 0) -> Worker:
    made = Worker("prefill", "http://a")
    made.running, made.turn = running, turn
    made.cache.prefixes.resize(1 << 16)
    made.cache.prefixes.note(chains)
    return made


def first_of(policy: Policy, workers: list[Worker], prompt: list[int]) -> int:
    least = min(one.running for one in workers)
    return min(
        range(len(workers)), key=lambda i: policy.order(workers[i], least, Prompts([prompt], {}))
    )


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ((0, 0), 0),
        ((8, 0), 0),
        ((9, 0), 1),  # more than 8 more
        ((30, 20), 0),
        ((31, 20), 1),
        ((300, 299), 0),  # and more than half as many again
    ],
)
def test_both_thresholds_must_be_passed(loads: tuple[int, int], expected: int) -> None:
    workers = [worker(loads[0], [1, 2, 3]), worker(loads[1], [1])]
    assert first_of(Policy(), workers, [1, 2, 3, 4]) == expected


def test_among_equals_the_least_loaded() -> None:
    prompt = [1, 2, 3]
    assert first_of(Policy(), [worker(3, prompt), worker(2, prompt), worker(0, [1])], prompt) == 1
    assert first_of(Policy(), [worker(3, [7]), worker(2), worker(4)], prompt) == 1
    assert first_of(Policy("least_loaded"), [worker(3, prompt), worker(2)], prompt) == 1
    assert (
        first_of(Policy("round_robin"), [worker(0, prompt, turn=5), worker(9, turn=4)], prompt) == 1
    )


def test_another_role_is_another_memory() -> None:
    info = {
        "disaggregation_mode": "prefill",
        "incarnation": "1",
        "page_size": 16,
        "prefix_cache": {"pages": 0},
    }
    turned = Worker("prefill", "http://a", follows=True)
    turned.mark_up(read_identity(info | {"pages": {"total": 64}}))
    with turned.sent(Prompts([[1, 2]], {})):
        pass
    turned.mark_up(read_identity(info | {"pages": {"total": 64}}))
    assert (
        turned.cache.prefixes.matched([[1, 2]]) == 2
        and turned.cache.prefixes.limit_bytes == 64 * 16 * 4
    )
    turned.mark_up(read_identity(info | {"pages": {"total": 64}, "disaggregation_mode": "decode"}))
    assert len(turned.cache.prefixes) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"prefix_cache": None},
        {"prefix_cache": True},
        {"prefix_cache": {"host_limit_pages": "many"}},
        {"pages": None},
        {"pages": {"total": "many"}},
        {"page_size": None},
        {"page_size": -1},
    ],
    ids=str,
)
def test_a_worker_that_says_nothing_of_a_cache_has_none(changes: dict[str, Any]) -> None:
    info = {
        "disaggregation_mode": "prefill",
        "page_size": 16,
        "prefix_cache": {"pages": 0},
        "pages": {"total": 64},
    }
    assert read_identity(info).cache_tokens == 1024
    assert read_identity(info | {"prefix_cache": {"host_limit_pages": 36}}).cache_tokens == 1600
    assert read_identity(info | changes).cache_tokens == 0
