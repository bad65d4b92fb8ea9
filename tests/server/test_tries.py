"""How often a request is tried: so many times, with pauses of so long in all, and at once where a
worker stays.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from kvflow.http.errors import Failure
from kvflow.protocols.errors import Cause, Code
from kvflow.router.cache_view import Prompts
from kvflow.router.identity import Identity
from kvflow.router.legs import PairFailedError
from kvflow.router.policies import Policy
from kvflow.router.tries import MOST_TRIES, Tries, fitting
from kvflow.router.workers import Worker, Workers
from tests.server.fake_service import Meeting, Role, Server
from tests.server.test_retries import post, routed


def test_no_request_is_tried_more_often_than_the_limit() -> None:
    tries = Tries(3600, {503})
    prefill, decode = Worker("prefill", "http://a"), Worker("decode", "http://b")
    failed = PairFailedError(Failure(503, str(Code.SHUTDOWN), "it drains"))
    for _ in range(MOST_TRIES - 1):
        tries.note(failed, prefill, decode)
    with pytest.raises(PairFailedError) as caught:
        tries.note(failed, prefill, decode)
    assert caught.value is failed


def test_only_workers_of_one_model_are_tried_together() -> None:
    prefills = [Worker("prefill", f"http://p{n}") for n in range(2)]
    decodes = [Worker("decode", f"http://d{n}") for n in range(2)]
    for worker, fingerprint in (
        (prefills[0], "one"),
        (prefills[1], "two"),
        (decodes[0], "two"),
        (decodes[1], "one"),
    ):
        worker.identity = Identity(None, None, "", "m", fingerprint, None, 0, None)
    assert list(fitting(prefills, decodes)) == [
        (prefills[0], decodes[1]),
        (prefills[1], decodes[0]),
    ]


@pytest.mark.parametrize(
    ("url", "host"), [("http://10.0.0.7:1/", "10.0.0.7"), ("http://[fd00::1]:1", "fd00::1")]
)
def test_a_worker_knows_its_host(url: str, host: str) -> None:
    assert Worker("prefill", url).host == host


def test_what_a_failed_worker_has_to_do_makes_no_other_one_overloaded() -> None:
    """The least loaded one of those that may be tried is what others are measured against."""
    failed, knows, idle = (Worker("decode", f"http://d{n}") for n in range(3))
    prompts = Prompts([[1, 2, 3]], {})
    knows.running, idle.running = 12, 6
    knows.cache.prefixes.resize(1 << 20)
    with knows.cache.expecting(prompts):
        pass
    stand_in: Any = SimpleNamespace(
        _paired=lambda role: [failed, knows, idle], _policy=Policy("cache_aware")
    )

    async def ranked() -> list[Worker]:
        return Workers.ranked(stand_in, "decode", {failed: 1}, prompts)

    assert asyncio.run(ranked()) == [knows, idle, failed]


async def test_pauses_are_bounded_in_all_and_not_one_by_one(
    prefill_server: Server, decode: Role, decode_server: Server, session: aiohttp.ClientSession
) -> None:
    """The longest pause is a second: with that much in all there is time for six tries, and not for
    the limit.
    """
    decode.service.failure = Cause(Code.PEER_LOST, "its prefill is away")
    async with routed([prefill_server], [decode_server], retry_timeout_s=1.0) as r:
        status, answer = await post(session, r.server)
        assert (status, answer["error"]["code"]) == (502, "peer_lost")
        assert 1 < len(decode.service.requests) < MOST_TRIES / 2


async def test_a_request_that_waits_is_served_by_a_worker_that_stays_after_all(
    meeting: Meeting,
    prefill_server: Server,
    decode: Role,
    decode_server: Server,
    session: aiohttp.ClientSession,
) -> None:
    async with routed([prefill_server], [decode_server], retry_timeout_s=3600) as r:
        worker = r.worker(decode_server)
        with worker.busy():  # a request keeps it from being forgotten
            r.router.workers.leave(worker)
            asking = asyncio.create_task(post(session, r.server))
            async with asyncio.timeout(20):
                while not r.router.waiting:
                    await asyncio.sleep(0.01)
            r.router.workers.stay(worker)
            status, _ = await asyncio.wait_for(asking, 20)
        assert status == 200


def test_the_pauses_between_tries_grow_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[tuple[float, float]] = []

    def drawn(least: float, most: float) -> float:
        pauses.append((least, most))
        return most

    monkeypatch.setattr("kvflow.router.tries.random.uniform", drawn)
    tries = Tries(3600, {503})
    assert [tries.pause_s() for _ in range(7)] == [most for _, most in pauses]
    assert pauses == [(most / 2, most) for most in (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0)]


def test_before_the_first_try_no_pair_has_an_error_to_repeat() -> None:
    prefill, decode = Worker("prefill", "http://p"), Worker("decode", "http://d")
    for worker, fingerprint in ((prefill, "one"), (decode, "two")):
        worker.identity = Identity(None, None, "", "m", fingerprint, None, 0, None)
    assert Tries(3600, {503}).untried([prefill], [decode]) is None
