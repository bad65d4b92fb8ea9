"""The router's own metrics: tries, load and state of each worker, errors, first tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from kvflow.http.errors import bounded_code
from kvflow.protocols.errors import Cause, Code
from tests.fakes.servers import Front, labelled, summed
from tests.fakes.service import BODY, Role


@pytest.fixture
async def front(prefill: Role, decode: Role, spare: Role) -> AsyncIterator[Front]:
    async with Front([prefill], [decode, spare], retry_timeout_s=0.1) as made:
        yield made


async def test_requests_tries_and_first_tokens(
    front: Front, decode: Role, prefill: Role, spare: Role, caplog: pytest.LogCaptureFixture
) -> None:
    decode.service.failure = Cause(Code.SHUTDOWN, "it drains")
    caplog.set_level(logging.INFO, logger="kvflow.router")
    await front.events("/generate", BODY)
    for _ in range(3):
        await front.post("/generate", BODY)
    told = [line for line in caplog.messages if "trying again" in line]
    assert told and all("it drains" in line and decode.url in line for line in told)
    text = await front.metrics()
    found = summed(text)
    tried = labelled(text, "kvflow_router_worker_tries_total")
    retries = found["kvflow_retries_total"]
    assert retries >= 1 and tried == {
        ("prefill", prefill.url): 4 + retries,
        ("decode", decode.url): retries,
        ("decode", spare.url): 4,
    }
    assert labelled(text, "kvflow_requests_total")[("/generate", "200")] == 4
    assert found["kvflow_router_time_to_first_token_seconds_count"] == 1  # that of the stream
    assert labelled(text, "kvflow_router_errors_total") == {}
    assert found["kvflow_router_running_requests"] == 0


async def test_errors_by_class_and_refusals_apart(front: Front, prefill: Role) -> None:
    prefill.service.failure = Cause(Code.ENGINE_ERROR, "a step failed")
    for stream in (False, True):
        await front.refused(500, "/generate", {**BODY, "stream": stream})
    await front.refused(400, "/generate", {**BODY, "sampling_params": {"n": 500}})
    text = await front.metrics()
    assert labelled(text, "kvflow_router_errors_total") == {("engine_error",): 2}
    assert labelled(text, "kvflow_requests_refused_total") == {("bad_request",): 1}


async def test_load_and_state_of_each_worker(front: Front, prefill: Role, decode: Role) -> None:
    prefill.service.gate.clear()
    asking = asyncio.create_task(front.post("/generate", BODY))
    await prefill.begun()
    front.worker(decode).mark_down("for this test")
    text = await front.metrics()
    load = labelled(text, "kvflow_router_worker_requests")
    assert load["prefill", prefill.url] == 1
    assert sum(n for (role, _), n in load.items() if role == "decode") == 1
    up = labelled(text, "kvflow_router_worker_up")
    assert (up["decode", decode.url], sum(up.values())) == (0, 2)
    assert labelled(text, "kvflow_router_running_requests") == {(): 1}
    prefill.service.gate.set()
    await asking


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
