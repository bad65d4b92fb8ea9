"""Cancelling any wait of a request's handler leaves no stream of tokens open."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress

import aiohttp
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from kvflow.testing.cancellation import Steps
from tests.fakes.service import FakeService, Meeting, Role

ROOMS = [7, 8]
BODY = {
    "input_ids": [[1], [5]],
    "sampling_params": {"max_new_tokens": 3},
    "bootstrap_host": ["127.0.0.1"] * 2,
    "bootstrap_port": [1, 2],
    "bootstrap_room": ROOMS,
}


def cancelling(seen: list[Steps[web.StreamResponse]], plan: range, after_s: float) -> Middleware:
    @web.middleware
    async def cancelled(request: web.Request, handler: Handler) -> web.StreamResponse:
        async def answered() -> web.StreamResponse:
            return await handler(request)

        seen.append(Steps(answered(), *plan, after_s=after_s))
        return await seen[-1]

    return cancelled


def slowly(service: FakeService, meeting: Meeting) -> None:
    loop = asyncio.get_running_loop()
    service.gate.clear()
    loop.call_later(0.02, service.gate.set)
    if service.role == "decode":
        for room in ROOMS:
            loop.call_later(0.01, meeting.of(room).set_result, None)


@pytest.mark.parametrize("how", ["once", "late", "twice", "throughout"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_every_wait(side: str, stream: bool, how: str) -> None:
    before = asyncio.all_tasks()
    for first in itertools.count():
        meeting = Meeting()
        role = Role(FakeService(side, meeting))
        slowly(role.service, meeting)
        seen: list[Steps[web.StreamResponse]] = []
        plan = range(first, first + {"once": 1, "late": 1, "twice": 2, "throughout": 6}[how])
        role.app.middlewares.insert(0, cancelling(seen, plan, 0.003 if how == "late" else 0.0))
        async with role:
            with suppress(aiohttp.ClientError):
                await role.call("POST", "/generate", {**BODY, "stream": stream})
        ended = {role.service.ended.get_nowait() for _ in range(role.service.ended.qsize())}
        assert ended == {request.room for request in role.service.requests}
        assert not role.pipeline.running
        assert asyncio.all_tasks() <= before
        (steps,) = seen
        if steps.waits <= first:
            assert ended == set(ROOMS)
            break
    print(f"{side} {'stream' if stream else 'whole'}, {how}: {first} waits")
    assert first
