"""The router's own metrics: tries, load and state of each worker, errors by class, the first token
of a stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import aiohttp
import pytest

from kvflow.http.errors import bounded_code
from kvflow.protocols.errors import Cause, Code
from kvflow.router.router import Router
from kvflow.router.routes import router_app
from tests.server.fake_service import FakeService, Meeting, Role, Server, served
from tests.server.test_measures import labelled, samples, scrape

Session = aiohttp.ClientSession
BODY = {"text": "w1", "sampling_params": {"max_new_tokens": 3}}


@pytest.fixture
async def spare(meeting: Meeting) -> AsyncIterator[Server]:
    async with served(Role(FakeService("decode", meeting)).app) as server:
        yield server


@pytest.fixture
async def router(
    prefill_server: Server, decode_server: Server, spare: Server
) -> AsyncIterator[Router]:
    made = Router(
        [prefill_server.url], [decode_server.url, spare.url], poll_s=3600, retry_timeout_s=0.1
    )
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def server(router: Router) -> AsyncIterator[Server]:
    async with served(router_app(router)) as made:
        yield made


async def post(session: Session, server: Server, **changes: object) -> int:
    async with session.post(server.make_url("/generate"), json={**BODY, **changes}) as answer:
        await answer.read()
        return answer.status


async def test_requests_tries_and_first_tokens(
    server: Server,
    decode: Role,
    prefill_server: Server,
    decode_server: Server,
    spare: Server,
    session: Session,
    caplog: pytest.LogCaptureFixture,
) -> None:
    decode.service.failure = Cause(Code.SHUTDOWN, "it drains")
    caplog.set_level(logging.INFO, logger="kvflow.router")
    assert [await post(session, server, stream=n == 0) for n in range(4)] == [200] * 4
    told = [r.getMessage() for r in caplog.records if "trying again" in r.getMessage()]
    assert told and all("it drains" in line and decode_server.url in line for line in told)
    text = await scrape(session, server)
    found = samples(text)
    tried = labelled(text, "kvflow_router_worker_tries_total")
    assert (
        tried["decode", spare.url] == 4
        and tried["decode", decode_server.url] == found["kvflow_retries_total"] >= 1
    )
    assert tried["prefill", prefill_server.url] == 4 + found["kvflow_retries_total"]
    assert labelled(text, "kvflow_requests_total")[("/generate", "200")] == 4
    assert found["kvflow_router_time_to_first_token_seconds_count"] == 1  # that of the stream
    assert (
        labelled(text, "kvflow_router_errors_total") == {}
        and found["kvflow_router_running_requests"] == 0
    )


async def test_errors_by_class_and_refusals_apart(
    server: Server, prefill: Role, session: Session
) -> None:
    prefill.service.failure = Cause(Code.ENGINE_ERROR, "a step failed")
    assert await post(session, server) == 500
    assert await post(session, server, stream=True) == 500
    assert await post(session, server, sampling_params={"n": 500}) == 400
    text = await scrape(session, server)
    assert labelled(text, "kvflow_router_errors_total") == {("engine_error",): 2}
    assert labelled(text, "kvflow_requests_refused_total") == {("bad_request",): 1}


async def test_load_and_state_of_each_worker(
    server: Server,
    router: Router,
    prefill: Role,
    prefill_server: Server,
    decode_server: Server,
    session: Session,
) -> None:
    prefill.service.gate.clear()
    asking = asyncio.ensure_future(post(session, server))
    await prefill.service.started.wait()
    router.workers.of("decode")[0].mark_down("for this test")
    text = await scrape(session, server)
    load = labelled(text, "kvflow_router_worker_requests")
    assert (
        load["prefill", prefill_server.url]
        == 1
        == sum(n for (role, _), n in load.items() if role == "decode")
    )
    up = labelled(text, "kvflow_router_worker_up")
    assert (up["decode", decode_server.url], sum(up.values())) == (0, 2)
    assert labelled(text, "kvflow_router_running_requests") == {(): 1}
    prefill.service.gate.set()
    assert await asking == 200


@pytest.mark.parametrize(
    ("code", "label"),
    [
        ("peer_lost", "peer_lost"),
        ("model_not_found", "model_not_found"),
        ("503", "503"),
        ("", "other"),
        ("x" * 5000, "other"),
        ("evil\n", "other"),
        ("12345", "other"),
        ("\u0661\u0662\u0663", "other"),
    ],
)
def test_a_foreign_workers_code_makes_no_new_label(code: str, label: str) -> None:
    assert bounded_code(code) == label
