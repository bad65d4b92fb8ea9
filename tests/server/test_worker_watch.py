"""The router's watch of its workers goes on whatever an answer makes it raise."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kvflow.router import workers as workers_module
from kvflow.router.feed import Source
from kvflow.router.identity import Identity
from kvflow.router.kvflow_engine import KvflowEngine, read_identity
from kvflow.router.policies import Policy
from kvflow.router.workers import Worker, Workers
from tests.server.fake_service import served


async def test_a_worker_whose_answer_cannot_be_read_is_down_and_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Worker] = []

    async def ask(_: Workers, worker: Worker) -> str:
        asked.append(worker)
        raise KeyError("fingerprint")

    monkeypatch.setattr(Workers, "_ask", ask)
    monkeypatch.setattr(workers_module, "LEAST_CHECK_S", 0.0)
    async with aiohttp.ClientSession() as session:
        watched = Workers(["http://127.0.0.1:1"], [], session, 0.001, Policy(), _no_identity)
        async with asyncio.timeout(10):
            await watched.start()
            while len(asked) < 3:
                await asyncio.sleep(0.001)
        assert (
            not watched.all[0].up
            and "asking it failed: KeyError" in watched.all[0].unavailable_reason
        )
        await watched.close()


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (
            404,
            "",
            (
                "/server_info answered 404: it is not a worker of kvflow; a router in front of "
                "vLLM servers is"
            ),
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
    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def info(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/server_info", info)])
    async with served(app) as server, aiohttp.ClientSession() as session:
        watched = Workers([server.url], [], session, 3600, Policy(), KvflowEngine().identify)
        await watched.start()
        assert watched.all[0].unavailable_reason.startswith(reason)
        await watched.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_worker_that_leaves_as_it_is_asked_is_not_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, answers = asyncio.Event(), asyncio.Event()
    events = Source("tcp://127.0.0.1:1", None, 16)

    async def ask(_: Workers, worker: Worker) -> Identity:
        asked.set()
        await answers.wait()
        return Identity("prefill", None, "1", "model", "", None, 0, events)

    monkeypatch.setattr(Workers, "_ask", ask)
    async with aiohttp.ClientSession() as session:
        watched = Workers([], [], session, 60, Policy(), _no_identity)
        worker = Worker("prefill", "http://127.0.0.1:1")
        joining = asyncio.create_task(watched.add(worker))
        await asked.wait()
        watched.leave(worker)
        answers.set()
        await joining
        assert watched.all == [] and worker.cache.feed is None and not worker.up
        await watched.close()


async def _no_identity(
    session: aiohttp.ClientSession, url: str, role: str | None, known: Identity | None
) -> Identity:
    raise AssertionError("it is not asked for")


async def test_what_is_known_of_a_worker_that_is_up_need_not_be_asked_again() -> None:
    """A worker that was down may be another process by now: it is asked for everything."""
    asked: list[Identity | None] = []
    found = Identity("prefill", None, "1", "model", "", None, 0, None)

    async def identify(
        session: aiohttp.ClientSession, url: str, role: str | None, known: Identity | None
    ) -> Identity:
        asked.append(known)
        return found

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/health", health)])
    async with served(app) as server, aiohttp.ClientSession() as session:
        watched = Workers([server.url], [], session, 3600, Policy(), identify)
        await watched.start()
        [worker] = watched.all
        await watched._check(worker)
        worker.mark_down("away")
        await watched._check(worker)
        assert asked == [None, found, None]
        await watched.close()


@pytest.mark.parametrize("role", [None, "regular"])
async def test_a_worker_of_any_role_has_one_of_the_two(role: str | None) -> None:
    worker = Worker("prefill", "http://127.0.0.1:1", follows=True)
    worker.mark_up(Identity(role, None, "1", "model", "", None, 0, None))
    assert not worker.up
    assert (
        worker.unavailable_reason
        == f"it is not a prefill or decode worker: its disaggregation_mode is {role!r}"
    )


async def test_a_worker_that_is_up_is_said_to_be_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    worker = Worker("prefill", "http://127.0.0.1:1")
    first, second = (
        Identity("prefill", None, life, "model", "", None, 0, None) for life in ("1", "2")
    )

    def lines() -> int:
        return sum(
            "prefill http://127.0.0.1:1 is up" in record.getMessage() for record in caplog.records
        )

    found = []
    for identity in (first, first, second):
        worker.mark_up(identity)
        found.append(lines())
    worker.mark_down("away")
    worker.mark_up(second)
    assert [*found, lines()] == [1, 1, 2, 3], "each life of it, and each return"


async def test_that_a_worker_fits_no_other_is_said_when_it_becomes_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, two = (
        Identity(None, None, "1", "model", fingerprint, None, 0, None)
        for fingerprint in ("one", "two")
    )
    async with aiohttp.ClientSession() as session:
        watched = Workers(
            ["http://127.0.0.1:1"], ["http://127.0.0.1:2"], session, 3600, Policy(), _no_identity
        )
        prefill, decode = watched.all
        watched._take(prefill, msgspec.structs.replace(one, role="prefill"))
        for _ in range(2):
            watched._take(decode, msgspec.structs.replace(two, role="decode"))
        watched._take(decode, "away")
        await watched.close()
    warned = [
        record.getMessage()
        for record in caplog.records
        if "gets no requests" in record.getMessage()
    ]
    assert len(warned) == 1 and warned[0].startswith(
        "decode http://127.0.0.1:2 gets no requests: "
    ), warned


def test_a_worker_that_names_no_model_has_none() -> None:
    for given, model in (
        ({}, ""),
        ({"model_path": "a/b"}, "a/b"),
        ({"model_path": "a/b", "served_model_name": "c"}, "c"),
    ):
        assert read_identity({"disaggregation_mode": "decode", **given}).model == model
