"""A router that asks a vLLM prefill and decode at once, where prefill has kvflow's connector; and
workers that join.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import aiohttp
import msgspec
import pytest

from kvflow.connectors.vllm.params import FromPrefill, ToDecode, read_params
from kvflow.http.authorization import Keys
from kvflow.router.vllm_engine import _Address
from tests.server.fake_service import Server, served
from tests.server.fake_vllm import ROOM_OF_PREFILL, FakeVllm, Fleet, fleet
from tests.server.test_vllm_router import BODY, post, text_of

Session = aiohttp.ClientSession


def pair() -> tuple[FakeVllm, FakeVllm]:
    """A prefill and a decode with kvflow's connector."""
    rooms: dict[int, asyncio.Event] = {}
    return FakeVllm("kvflow", rooms), FakeVllm("kvflow", rooms)


async def test_the_first_request_tells_where_decodes_find_a_prefill(session: Session) -> None:
    p, d = pair()
    async with fleet([p], [d], "together") as r:
        for stream in (False, True, False):
            status, answer = await post(session, r, stream=stream)
            assert (status, text_of(answer)) == (200, "1 2 3 ")
    assert p.params[0]["remote_engine_id"] is None and d.params[0]["kvflow_room"] == ROOM_OF_PREFILL
    for first, second in zip(p.params[1:], d.params[1:], strict=True):
        room = first["kvflow_room"]
        assert first == {"do_remote_decode": True, "do_remote_prefill": False, "kvflow_room": room}
        assert second == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "kvflow_room": room,
            "remote_host": "10.0.0.7",
            "remote_port": 5600,
            "kvflow_decode_workers": 2,
        }
        assert 1 <= room <= (1 << 53) - 1
    assert p.params[1] != p.params[2], "each request has its own room"
    assert [body["max_tokens"] for body in p.bodies + d.bodies] == [1, 1, 1, 3, 3, 3]


async def test_the_connector_reads_what_the_router_writes(session: Session) -> None:
    """In both orders of the legs; and the router reads what the connector answers."""
    orders: tuple[Literal["sequential", "together"], ...] = ("sequential", "together")
    for legs in orders:
        p, d = pair()
        async with fleet([p], [d], legs) as r:
            for _ in range(2):
                await post(session, r)
        for n, (first, second) in enumerate(zip(p.params, d.params, strict=True)):
            is_named = legs == "together" and n > 0
            room = first["kvflow_room"] if is_named else ROOM_OF_PREFILL
            assert read_params(first) == ToDecode(room if is_named else None)
            assert read_params(second) == FromPrefill(
                room, "10.0.0.7", 5600, 2, is_computed=not is_named
            )


async def test_decode_is_asked_while_prefill_computes(session: Session) -> None:
    p, d = pair()
    async with fleet([p], [d], "together") as r:
        await post(session, r)
        p.gate.clear()
        d.started.clear()
        asking = asyncio.create_task(post(session, r, stream=True))
        await asyncio.wait_for(d.started.wait(), 5)
        assert len(p.bodies) == len(d.bodies) == 2 and not asking.done()
        p.gate.set()
        assert text_of((await asyncio.wait_for(asking, 5))[1]) == "1 2 3 "


async def test_a_client_that_leaves_ends_both_legs(session: Session) -> None:
    p, d = pair()
    async with fleet([p], [d], "together") as r:
        await post(session, r)
        p.gate.clear()
        for fake in (p, d):
            fake.started.clear()
        asking = asyncio.create_task(post(session, r, stream=True))
        await asyncio.gather(*(asyncio.wait_for(fake.started.wait(), 5) for fake in (p, d)))
        asking.cancel()
        for fake in (p, d):
            await asyncio.wait_for(fake.aborted.get(), 5)
        p.gate.set()
        assert (await post(session, r))[0] == 200
    assert "remote_engine_id" not in p.params[-1], "it was no fault of prefill's"


@pytest.mark.parametrize("status", [500, 502, 503, 504])
@pytest.mark.parametrize("failing", ["prefill", "decode"])
async def test_after_a_failure_the_same_pair_is_asked_one_by_one(
    session: Session, failing: str, status: int
) -> None:
    p, d = pair()
    async with fleet([p], [d], "together") as r:
        await post(session, r)
        (p if failing == "prefill" else d).failures.append(status)
        for _ in range(2):
            assert (await post(session, r))[0] == 200
    assert ["remote_engine_id" in params for params in p.params] == [True, False, True, False]


async def test_several_engines_behind_one_url_are_asked_one_by_one(session: Session) -> None:
    """A data-parallel vLLM: each of its engines has a registry of its own, and which gets a request
    nobody knows.
    """
    p, d = pair()
    async with fleet([p], [d], "together") as r:
        await post(session, r)
        p.failures.append(500)
        p.port = 5700
        for _ in range(3):
            assert (await post(session, r))[0] == 200
        assert ["remote_engine_id" in params for params in p.params] == [
            True,
            False,
            True,
            True,
            True,
        ]
        r.worker(p).mark_lost("reset", 0.0)
        for _ in range(2):
            assert (await post(session, r))[0] == 200
        assert "remote_engine_id" not in p.params[-1] and d.params[-1]["remote_port"] == 5700


async def test_what_vllm_refuses_is_no_failure_of_the_pair(session: Session) -> None:
    p, d = pair()
    async with fleet([p], [d], "together") as r:
        await post(session, r)
        assert (await post(session, r, model="other"))[0] == 404
        assert (await post(session, r))[0] == 200
    assert "remote_engine_id" not in p.params[-1]


@pytest.mark.parametrize("connector", ["nixl", ""])
async def test_other_connectors_are_asked_one_by_one(session: Session, connector: Any) -> None:
    p, d = FakeVllm(connector), FakeVllm(connector)
    async with fleet([p], [d], "together") as r:
        for _ in range(3):
            assert (await post(session, r))[0] == 200
    assert all("kvflow_room" not in (params or {}) for params in p.params + d.params)


async def join(session: Session, r: Fleet, url: str, **more: str) -> tuple[int, str]:
    body = {"url": url, **more}
    async with session.post(r.server.make_url("/workers"), json=body, headers=KEY) as answer:
        document = json.loads(await answer.read())
        return answer.status, document["message"] if answer.status == 202 else document["error"][
            "message"
        ]


KEY = {"Authorization": "Bearer key"}


async def test_a_vllm_joins_as_what_its_operator_says(session: Session) -> None:
    p, d, late = FakeVllm(), FakeVllm(), FakeVllm()
    async with served(late.app) as server, fleet([p], [d], keys=Keys(admin="key")) as r:
        status, said = await join(session, r, server.url)
        assert (status, said) == (
            400,
            "worker_type: give prefill or decode: a vLLM server does not say which of them it is",
        )
        assert await join(session, r, server.url, worker_type="prefill") == (
            202,
            "it gets requests",
        )
        late_worker = next(one for one in r.router.workers.all if one.url == server.url)
        r.router.membership.leave(r.worker(p))
        async with session.post(
            r.server.make_url("/v1/completions"), json=BODY, headers=KEY
        ) as answer:
            assert answer.status == 200
        assert (len(p.bodies), len(late.bodies), late_worker.role) == (0, 1, "prefill")


async def test_a_server_that_may_not_join(session: Session, decode_server: Server) -> None:
    p, d, other = FakeVllm(), FakeVllm(), FakeVllm()
    other.model = "another"
    async with served(other.app) as server, fleet([p], [d], keys=Keys(admin="key")) as r:
        status, said = await join(session, r, server.url, worker_type="decode")
        assert (status, "another model" in said) == (409, True)
        status, said = await join(session, r, decode_server.url, worker_type="decode")
        assert (status, "/version answered 404: it is not a vLLM server" in said) == (502, True)


async def test_a_leaving_prefill_stays_until_decode_has_its_pages(session: Session) -> None:
    """Decode may read from it until it has answered."""
    p, d = FakeVllm(), FakeVllm()
    d.gate.clear()
    async with fleet([p], [d]) as r:
        asking = asyncio.create_task(post(session, r))
        await asyncio.wait_for(d.started.wait(), 5)
        worker = r.worker(p)
        r.router.membership.leave(worker)
        assert worker in r.router.workers.all
        d.gate.set()
        assert (await asyncio.wait_for(asking, 5))[0] == 200
        assert worker not in r.router.workers.all


@pytest.mark.parametrize(
    "params",
    [
        b"null",
        b"[]",
        b'{"remote_host":"h"}',
        b'{"remote_host":"\xff"}',
        b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
    ids=["null", "a list", "no port", "no text", "nested"],
)
def test_what_names_no_prefill_with_our_connector_is_no_address(params: bytes) -> None:
    assert _Address.read(msgspec.Raw(params)) is None
