"""The limits of a request's tries, in number and in time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvflow.http.errors import Failure
from kvflow.protocols.errors import Cause, Code
from kvflow.router.cache_view import Prompts
from kvflow.router.identity import Identity
from kvflow.router.legs import PairFailedError
from kvflow.router.policies import Policy
from kvflow.router.tries import MOST_TRIES, Tries, fitting
from kvflow.router.workers import Worker, Workers
from kvflow.testing.pair import until
from tests.fakes.servers import Front
from tests.fakes.service import BODY, Role


def workers(role: str, *models: str) -> list[Worker]:
    made = [Worker(role, f"http://{role}{n}") for n in range(len(models))]
    for worker, fingerprint in zip(made, models, strict=True):
        worker.identity = Identity(None, None, "", "m", fingerprint, None, 0, None)
    return made


def test_no_request_is_tried_more_often_than_the_limit() -> None:
    tries = Tries(3600, {503})
    [prefill], [decode] = workers("prefill", "one"), workers("decode", "one")
    failed = PairFailedError(Failure(503, str(Code.SHUTDOWN), "it drains"))
    for _ in range(MOST_TRIES - 1):
        tries.note(failed, prefill, decode)
    with pytest.raises(PairFailedError) as caught:
        tries.note(failed, prefill, decode)
    assert caught.value is failed


def test_only_workers_of_one_model_are_tried_together() -> None:
    p, d = workers("prefill", "one", "two"), workers("decode", "two", "one")
    assert list(fitting(p, d)) == [(p[0], d[1]), (p[1], d[0])]


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


async def test_pauses_are_bounded_in_all_and_not_one_by_one(prefill: Role, decode: Role) -> None:
    """The longest pause is a second, which in all leaves time for six tries."""
    decode.service.failure = Cause(Code.PEER_LOST, "its prefill is away")
    async with Front([prefill], [decode], retry_timeout_s=1.0) as front:
        error = await front.refused(502, "/generate", BODY)
        assert error["code"] == "peer_lost"
        assert len(decode.service.requests) < MOST_TRIES / 2


async def test_a_request_that_waits_is_served_by_a_worker_that_stays_after_all(
    prefill: Role, decode: Role
) -> None:
    async with Front([prefill], [decode], retry_timeout_s=3600) as front:
        worker, router = front.worker(decode), front.router
        with worker.busy():  # a request keeps it from being forgotten
            router.workers.leave(worker)
            asking = asyncio.create_task(front.post("/generate", BODY))
            await until(lambda: router.waiting, 20)
            router.workers.stay(worker)
            await asyncio.wait_for(asking, 20)


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
    prefills, decodes = workers("prefill", "one"), workers("decode", "two")
    assert Tries(3600, {503}).untried(prefills, decodes) is None
