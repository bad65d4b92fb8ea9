"""A router that chooses among fake workers by what they were sent, by load, or in turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, Self

import pytest

from kvflow.http.large_bodies import LARGE_BYTES
from kvflow.router.cache_view import Prompts
from kvflow.router.kvflow_engine import read_identity
from kvflow.router.policies import Policy, PolicyName
from kvflow.router.workers import Worker
from kvflow.testing.pair import until
from tests.fakes.servers import Front, labelled
from tests.fakes.service import NO_CACHE, FakeService, Meeting, Role

FIRST, SECOND, THIRD = ([start + i % 7 for i in range(20)] for start in (10, 20, 30))


class Pairs(Front):
    def __init__(
        self, policy: PolicyName = "cache_aware", *, cache: bool = True, most_more: int = 8
    ) -> None:
        meeting = Meeting()
        names = ("prefill", "prefill", "decode", "decode")
        self.roles = [Role(FakeService(name, meeting)) for name in names]
        self.decodes = self.roles[2:]
        for role in self.roles if cache else ():
            role.service.changed_report = {"cache": NO_CACHE, "pages_total": 4096}
        self._chosen = Policy(policy, balance_abs_threshold=most_more)

    async def __aenter__(self) -> Self:
        workers = AsyncExitStack()
        for role in self.roles:
            await workers.enter_async_context(role)
        super().__init__(self.roles[:2], self.roles[2:], retry_timeout_s=0, policy=self._chosen)
        self._stack.push_async_callback(workers.aclose)
        return await super().__aenter__()

    async def send(self, prompt: list[int], **fields: Any) -> None:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2}, **fields}
        await self.post("/generate", body)

    async def ask(self, prompt: list[int], **fields: Any) -> tuple[int, int]:
        before = [len(role.service.requests) for role in self.roles]
        await self.send(prompt, **fields)
        p0, _, d0, d1 = (
            len(role.service.requests) - n for role, n in zip(self.roles, before, strict=True)
        )
        assert d0 + d1 == 1 and p0 in (0, 1)
        return 1 - p0, 1 - d0

    def known(self) -> list[int]:
        return [len(worker.cache.prefixes) for worker in self.router.workers.all]

    def ask_workers_who_they_are(self) -> None:
        for one in self.router.workers.all:
            one.check_due.set()


@pytest.fixture
async def front() -> AsyncIterator[Pairs]:
    async with Pairs() as made:
        yield made


async def test_a_conversation_stays_where_its_turns_before_are(front: Pairs) -> None:
    homes = [await front.ask(prompt) for prompt in (FIRST, SECOND, THIRD)]
    for used in zip(*homes, strict=True):
        assert len(set(used)) == 2, "new ones go to the least loaded"
    for turn in range(1, 5):
        for prompt, home in ((FIRST, homes[0]), (THIRD, homes[2]), (SECOND, homes[1])):
            assert await front.ask([*prompt, *range(4 * turn)]) == home
    hits = labelled(await front.metrics(), "kvflow_router_worker_prefix_hits_total")
    for role in ("prefill", "decode"):
        assert sum(hits[key] for key in hits if key[0] == role) == 12


async def test_prefill_and_decode_are_chosen_each_by_its_own_memory(front: Pairs) -> None:
    prefill, decode = await front.ask(FIRST)
    for one in front.router.workers.of("prefill"):
        one.cache.forget()
    found = [await front.ask(FIRST) for _ in range(3)]
    assert found == [(1 - prefill, decode)] * 3, "the prefill that was sent less, and it again"


@pytest.mark.parametrize("salt", ["cache_salt", "extra_key"])
async def test_another_salt_is_another_prompt(front: Pairs, salt: str) -> None:
    home = await front.ask(FIRST, **{salt: "a"})
    assert await front.ask(FIRST, **{salt: "b"}) == (1 - home[0], 1 - home[1])
    assert await front.ask(FIRST, **{salt: "a"}) == home


async def test_a_flush_is_the_end_of_what_is_known(front: Pairs) -> None:
    await front.ask(FIRST)
    assert sum(front.known()) == 2
    assert (await front.call("POST", "/flush_cache")).status == 200
    assert front.known() == [0] * 4


async def test_another_process_at_an_address_is_known_to_have_nothing(front: Pairs) -> None:
    home = await front.ask(FIRST)
    front.decodes[home[1]].service.incarnation += 1
    front.ask_workers_who_they_are()
    await until(lambda: sum(front.known()) == 1)
    assert await front.ask(FIRST) == (home[0], 1 - home[1])


async def test_workers_without_a_cache_are_chosen_by_load() -> None:
    async with Pairs(cache=False) as front:
        homes = Counter([await front.ask(FIRST) for _ in range(6)])
        assert set(homes.values()) == {3} and front.known() == [0] * 4


@pytest.mark.parametrize("opened", [b"[", b'{"a":'], ids=["lists", "objects"])
async def test_a_large_body_that_is_nested_deep_is_400(front: Pairs, opened: bytes) -> None:
    """As deep as JSON may be. Where the router does not look, a worker refuses it."""
    deep = opened * 900 + b"1" + (b"]" if opened == b"[" else b"}") * 900
    raw = b'{"text": "%b", "chat_template_kwargs": %b, "messages": [{}]}' % (
        b"x" * LARGE_BYTES,
        deep,
    )
    for at, path in ((front, "/generate"), (front.roles[0], "/v1/chat/completions")):
        await at.refused(400, path, data=raw)


async def test_a_cache_that_is_switched_off_is_noticed(front: Pairs) -> None:
    await front.ask(FIRST)
    for role in front.roles:
        role.service.changed_report = {}
    front.ask_workers_who_they_are()
    await until(lambda: not front.router.workers.cache_prompts())
    assert front.known() == [0] * 4


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
async def test_other_policies_do_not_look_at_prompts(policy: PolicyName) -> None:
    async with Pairs(policy) as front:
        assert Counter([(await front.ask(FIRST))[0] for _ in range(6)]) == {0: 3, 1: 3}
        assert front.known() == [0] * 4


async def test_an_overloaded_worker_is_passed_over() -> None:
    async with Pairs(most_more=2) as front:
        await front.ask(FIRST)
        for role in front.decodes:
            role.service.gate.clear()
        asked = [asyncio.create_task(front.send([*FIRST, i])) for i in range(8)]
        workers = front.router.workers.all
        await until(lambda: sum(one.running for one in workers) == 16)
        # Three are more than two more than none; from the fourth on both have the prompt, and
        # share what comes.
        assert [one.running for one in workers] == [4, 4, 4, 4]
        for role in front.decodes:
            role.service.gate.set()
        await asyncio.gather(*asked)


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
    turns = [worker(0, prompt, turn=5), worker(9, turn=4)]
    assert first_of(Policy("round_robin"), turns, prompt) == 1


INFO: dict[str, Any] = {
    "disaggregation_mode": "prefill",
    "incarnation": "1",
    "page_size": 16,
    "prefix_cache": {"pages": 0},
    "pages": {"total": 64},
}


def test_another_role_is_another_memory() -> None:
    turned = Worker("prefill", "http://a", follows=True)
    prefixes = turned.cache.prefixes
    turned.mark_up(read_identity(INFO))
    with turned.sent(Prompts([[1, 2]], {})):
        pass
    turned.mark_up(read_identity(INFO))
    assert (prefixes.matched([[1, 2]]), prefixes.limit_bytes) == (2, 64 * 16 * 4)
    turned.mark_up(read_identity(INFO | {"disaggregation_mode": "decode"}))
    assert len(turned.cache.prefixes) == 0


def test_true_is_no_number_of_a_worker() -> None:
    events = {"endpoint": "tcp://127.0.0.1:7000"}
    fields = ("disaggregation_bootstrap_port", "wire_version", "page_size")
    known = read_identity(INFO | dict.fromkeys(fields, 4) | {"kv_events": events})
    assert (known.bootstrap_port, known.wire_version, bool(known.events)) == (4, 4, True)
    other = read_identity(INFO | dict.fromkeys(fields, True) | {"kv_events": events})
    assert (other.bootstrap_port, other.wire_version, other.events) == (None, None, None)


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
        {"page_size": True},
        {"pages": {"total": True}},
        {"prefix_cache": {"host_limit_pages": True}},
    ],
    ids=str,
)
def test_a_worker_that_says_nothing_of_a_cache_has_none(changes: dict[str, Any]) -> None:
    assert read_identity(INFO).cache_tokens == 1024
    assert read_identity(INFO | {"prefix_cache": {"host_limit_pages": 36}}).cache_tokens == 1600
    assert read_identity(INFO | changes).cache_tokens == 0
