"""The router's watch of its workers goes on whatever an answer makes it raise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvflow.router import workers as workers_module
from kvflow.router.feed import Source
from kvflow.router.identity import Identity
from kvflow.router.kvflow_engine import KvflowEngine, read_identity
from kvflow.router.policies import Policy
from kvflow.router.workers import Worker, Workers
from kvflow.testing.pair import until
from tests.fakes.servers import answers, serving


def identity(
    role: str | None = "prefill", *, life: str = "1", model: str = "", events: Source | None = None
) -> Identity:
    return Identity(role, None, life, "model", model, None, 0, events)


async def _no_identity(*_: object) -> Identity:
    raise AssertionError("it is not asked for")


@asynccontextmanager
async def watching(
    prefills: list[str],
    decodes: list[str] | None = None,
    *,
    poll_s: float = 3600,
    identify: Any = _no_identity,
) -> AsyncIterator[Workers]:
    async with aiohttp.ClientSession() as session:
        watched = Workers(prefills, decodes or [], session, poll_s, Policy(), identify)
        yield watched
        await watched.close()


async def test_a_worker_whose_answer_cannot_be_read_is_down_and_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Worker] = []

    async def ask(_: Workers, worker: Worker) -> str:
        asked.append(worker)
        raise KeyError("fingerprint")

    monkeypatch.setattr(Workers, "_ask", ask)
    monkeypatch.setattr(workers_module, "LEAST_CHECK_S", 0.0)
    async with watching(["http://127.0.0.1:1"], poll_s=0.001) as watched:
        await watched.start()
        await until(lambda: len(asked) >= 3, 10)
        [worker] = watched.all
        assert not worker.up and "asking it failed: KeyError" in worker.unavailable_reason


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (
            404,
            "",
            "/server_info answered 404: it is not a worker of kvflow; a router in front of vLLM",
        ),
        (418, "", "/server_info answered 418"),
        (200, "<html>", "JSON is malformed"),
        (200, "[" * 100_000, "maximum recursion depth exceeded"),
        (200, "[]", "it is not a prefill worker: its disaggregation_mode is None"),
    ],
)
async def test_what_another_server_answers_is_the_reason_and_no_error_of_the_router(
    status: int, body: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    info = web.get("/server_info", answers(body, status=status))
    async with (
        serving(web.get("/health", answers()), info) as server,
        watching([server.url], identify=KvflowEngine().identify) as watched,
    ):
        await watched.start()
        assert watched.all[0].unavailable_reason.startswith(reason)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_worker_that_leaves_as_it_is_asked_is_not_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()
    events = Source("tcp://127.0.0.1:1", None, 16)

    async def ask(_: Workers, worker: Worker) -> Identity:
        asked.set()
        await may_answer.wait()
        return identity(events=events)

    monkeypatch.setattr(Workers, "_ask", ask)
    async with watching([]) as watched:
        worker = Worker("prefill", "http://127.0.0.1:1")
        joining = asyncio.create_task(watched.add(worker))
        await asked.wait()
        watched.leave(worker)
        may_answer.set()
        await joining
        assert watched.all == [] and worker.cache.feed is None and not worker.up


async def test_what_is_known_of_a_worker_that_is_up_need_not_be_asked_again() -> None:
    """A worker that was down may be another process by now: it is asked for everything."""
    asked: list[Identity | None] = []
    found = identity()

    async def identify(
        session: aiohttp.ClientSession, url: str, role: str | None, known: Identity | None
    ) -> Identity:
        asked.append(known)
        return found

    async with (
        serving(web.get("/health", answers())) as server,
        watching([server.url], identify=identify) as watched,
    ):
        await watched.start()
        [worker] = watched.all
        await watched._check(worker)
        worker.mark_down("away")
        await watched._check(worker)
        assert asked == [None, found, None]


@pytest.mark.parametrize("role", [None, "regular"])
async def test_a_worker_of_any_role_has_one_of_the_two(role: str | None) -> None:
    worker = Worker("prefill", "http://127.0.0.1:1", follows=True)
    worker.mark_up(identity(role))
    assert not worker.up
    reason = f"it is not a prefill or decode worker: its disaggregation_mode is {role!r}"
    assert worker.unavailable_reason == reason


async def test_a_worker_that_is_up_is_said_to_be_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    worker = Worker("prefill", "http://127.0.0.1:1")

    def lines() -> int:
        return sum("prefill http://127.0.0.1:1 is up" in text for text in caplog.messages)

    found = []
    for life in ("1", "1", "2"):
        worker.mark_up(identity(life=life))
        found.append(lines())
    worker.mark_down("away")
    worker.mark_up(identity(life="2"))
    assert [*found, lines()] == [1, 1, 2, 3], "each life of it, and each return"


async def test_that_a_worker_fits_no_other_is_said_when_it_becomes_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with watching(["http://127.0.0.1:1"], ["http://127.0.0.1:2"]) as watched:
        prefill, decode = watched.all
        watched._take(prefill, identity(model="one"))
        for _ in range(2):
            watched._take(decode, identity("decode", model="two"))
        watched._take(decode, "away")
    [warned] = [text for text in caplog.messages if "gets no requests" in text]
    assert warned.startswith("decode http://127.0.0.1:2 gets no requests: ")


def test_a_worker_that_names_no_model_has_none() -> None:
    for given, model in (
        ({}, ""),
        ({"model_path": "a/b"}, "a/b"),
        ({"model_path": "a/b", "served_model_name": "c"}, "c"),
    ):
        assert read_identity({"disaggregation_mode": "decode", **given}).model == model
